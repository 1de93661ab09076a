"""Reading traced programs: every equation, inner programs included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a (closed) jaxpr and of the jaxprs in its equations' parameters."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(value):
                yield from equations(value)


def is_jaxpr(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")


def dtypes(equation: Any) -> set[str]:
    """Dtypes of an equation's inputs and outputs, where they are arrays of numbers."""
    avals = [v.aval for v in (*equation.invars, *equation.outvars)]
    return {str(a.dtype) for a in avals if hasattr(a, "dtype")}
