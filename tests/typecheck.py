"""Type checker that tests put on every function of the packages, through jaxtyping's import hook."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep585DeprecationWarning, BeartypeDecorHintPep3119Exception

_F = TypeVar("_F", bound=Callable)

# An int is a fine value for a float field, as PEP 484 has it.
_CONF = BeartypeConf(is_pep484_tower=True)


_made: dict[Any, Callable] = {}


def check(function: _F) -> _F:
    """beartype, save for signatures with a Protocol that is not @runtime_checkable: those stay as they are.

    tests/contract/test_floors.py asks for @runtime_checkable, so the exception does not last.

    A function inside a function comes here whenever its definition runs. What jaxtyping hands over is no more than its
    signature, which checks what it is called with, so the checker made for the first serves all that are alike.
    """
    if "<locals>" not in function.__qualname__:
        return _check(function)
    code = function.__code__
    key = (
        function.__module__,
        function.__qualname__,
        code.co_code,
        code.co_varnames,
        tuple(function.__annotations__.items()),
        len(function.__defaults__ or ()),
        tuple(function.__kwdefaults__ or ()),
    )
    try:
        found = _made.get(key)
    except TypeError:  # an annotation without a hash
        return _check(function)
    if found is None:
        found = _made[key] = _check(function)
    return found  # type: ignore[return-value]


def _check(function: _F) -> _F:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BeartypeDecorHintPep585DeprecationWarning)  # ruff's business
            return beartype(conf=_CONF)(function)
    except BeartypeDecorHintPep3119Exception:
        return function
