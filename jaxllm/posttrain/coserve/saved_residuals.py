"""Saved residuals: which values a backward pass takes from its forward pass, and which it can compute again.

FlexLLM prunes the graph of a step with an adapter (arXiv:2402.18789, section 5.2): an activation is saved only if the
gradient of the adapter needs it. Here differentiation with respect to the adapter alone leaves out what only gradients
of frozen weights need; of the residuals that remain, those that depend on nothing but values that the backward pass has
anyway, such as frozen weights and the cache of keys and values, are computed again, and equal ones are saved once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal


class ResidualPlan(NamedTuple):
    """Residual plan: which leaves of a pullback are saved.

    Attributes:
        slots: of each leaf, its place among the saved values; None: it is computed again.
        shapes: shape and dtype of each saved value.
    """

    slots: tuple[int | None, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the saved values."""
        return sum(shape.size * shape.dtype.itemsize for shape in self.shapes)

    def saved(self, pullback: Any) -> list[Any]:
        """The saved values of a pullback."""
        found: dict[int, Any] = {}
        for slot, leaf in zip(self.slots, jax.tree.leaves(pullback), strict=True):
            if slot is not None:
                found[slot] = leaf
        return [found[slot] for slot in range(len(self.shapes))]

    def restored(self, pullback: Any, saved: Sequence[Any]) -> Any:
        """A pullback that was made with other values, with the saved ones."""
        leaves, tree = jax.tree.flatten(pullback)
        slots = zip(self.slots, leaves, strict=True)
        return tree.unflatten([leaf if slot is None else saved[slot] for slot, leaf in slots])


def residual_plan(pullback_of: Callable[[Any, Any], Any], again: Any, forward: Any) -> ResidualPlan:
    """Plan of the residuals of a pullback.

    Args:
        pullback_of: ``(again, forward) -> pullback`` of ``jax.vjp``, traceable.
        again: values, or their shapes, that the backward pass has too.
        forward: those that only the forward pass has.
    """

    def leaves(again: Any, forward: Any) -> list[Any]:
        return jax.tree.leaves(pullback_of(again, forward))

    jaxpr = jax.make_jaxpr(leaves)(again, forward).jaxpr
    first = len(jax.tree.leaves(again))
    dependent = set(jaxpr.invars[first:])
    for equation in jaxpr.eqns:
        if any(not isinstance(var, Literal) and var in dependent for var in equation.invars):
            dependent |= set(equation.outvars)
    places: dict[Any, int] = {}
    slots = [
        places.setdefault(var, len(places)) if not isinstance(var, Literal) and var in dependent else None
        for var in jaxpr.outvars
    ]
    shapes = tuple(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in places)
    return ResidualPlan(tuple(slots), shapes)
