"""Type checker that tests put on every function of the packages, through jaxtyping's import hook."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep585DeprecationWarning, BeartypeDecorHintPep3119Exception

_F = TypeVar("_F", bound=Callable)

# An int is a fine value for a float field, as PEP 484 has it.
_CONF = BeartypeConf(is_pep484_tower=True)


def check(function: _F) -> _F:
    """beartype, save for signatures with a Protocol that is not @runtime_checkable: those stay as they are.

    tests/contract/test_floors.py asks for @runtime_checkable, so the exception does not last.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BeartypeDecorHintPep585DeprecationWarning)  # ruff's business
            return beartype(conf=_CONF)(function)
    except BeartypeDecorHintPep3119Exception:
        return function
