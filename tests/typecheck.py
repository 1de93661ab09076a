"""Type checker that tests put on every function of the packages, through jaxtyping's import hook.

Where an annotation speaks of arrays, jaxtyping keeps a memo of their dimensions for each call, which costs tens of
microseconds: a planner that calls small functions a million times would take five times as long. So functions without
arrays get beartype alone, and of those inside other functions, defined anew with every call, pyright takes care.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import sys
import types
import typing
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import jaxtyping
from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep585DeprecationWarning, BeartypeDecorHintPep3119Exception

_F = TypeVar("_F", bound=Callable)

# An int is a fine value for a float field, as PEP 484 has it.
_CONF = BeartypeConf(is_pep484_tower=True, violation_type=TypeError)


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


_KINDS = [name for name, kind in vars(jaxtyping).items() if hasattr(kind, "dtypes")]
# The last two are names of array types in jaxllm.
_ARRAYS = re.compile(rf"\b({'|'.join(_KINDS)}|PyTree|PRNGKeyArray|ArrayLike|Cells|LayerIndex)\b")
_by_jaxtyping = jaxtyping.jaxtyped


def _by_arrays(thing: Any = None, **typechecker: Any) -> Any:
    """``jaxtyping.jaxtyped`` for what takes or returns arrays, the checker alone for the rest."""
    if thing is None:
        return lambda thing: _by_arrays(thing, **typechecker)
    function: Any
    if isinstance(thing, type):
        function = vars(thing).get("__init__") if dataclasses.is_dataclass(thing) else None
        modules = [base.__module__ for base in thing.__mro__]  # a field has the names of the class that it is from
    else:
        function, modules = thing, [thing.__module__]
    if not hasattr(function, "__code__"):
        return thing
    if any(_ARRAYS.search(str(annotation)) for annotation in function.__annotations__.values()):
        return _by_jaxtyping(thing, **typechecker)
    if "<locals>" in thing.__qualname__:
        return thing
    names = dict(collections.ChainMap(*(vars(sys.modules[module]) for module in modules)))
    function.__annotations__ = {name: _resolved(said, names) for name, said in function.__annotations__.items()}
    checked = _check(function)
    if thing is function:
        return checked
    thing.__init__ = checked
    return thing


def _resolved(annotation: Any, names: dict[str, Any]) -> Any:
    """The type that an annotation names; Any where its name is imported for type checkers only, or not yet there."""
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, names, include_extras=True)["it"]
    except Exception:
        return Any


jaxtyping.jaxtyped = _by_arrays  # what the import hook writes into modules


def _check(function: _F) -> _F:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BeartypeDecorHintPep585DeprecationWarning)  # ruff's business
            return beartype(conf=_CONF)(function)
    except BeartypeDecorHintPep3119Exception:
        return function
