"""Muon (Jordan et al. 2024; arXiv:2502.16982) for matrices within layers, over optax.contrib's."""

from __future__ import annotations

import math
from typing import Any

import jax
import optax
from jaxtyping import Array
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from jaxllm.optim.matrices import Matrix, matrices

MOMENTUM = 0.95
RMS = 0.2
"""Root mean square of AdamW's updates, which Muon's are scaled to (arXiv:2502.16982, equation 4)."""


def scale_by_muon_or_adam(logical_axes: Any, b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Matrices within layers by Muon; embeddings, output heads, gains and biases by Adam with these numbers."""
    found = jax.tree.map(lambda one: one, matrices(logical_axes), is_leaf=_is_found)
    labels = jax.tree.map(lambda one: "adam" if one is None or one.vocabulary else "muon", found, is_leaf=_is_found)
    axes = jax.tree.map(
        lambda one: MuonDimensionNumbers(one.rows, one.columns) if one and not one.vocabulary else None,
        found,
        is_leaf=_is_found,
    )

    def size(updates: Any) -> Any:
        """Updates of which each matrix is orthogonal, at the size of AdamW's."""

        def one(update: Array, of: Matrix) -> Array:
            sides = [math.prod(update.shape[i] for i in side) for side in (of.rows, of.columns)]
            return update * (RMS * math.sqrt(max(sides)))

        flat, structure = jax.tree.flatten(updates)
        chosen = [one for one in jax.tree.leaves(found, is_leaf=_is_found) if one and not one.vocabulary]
        return structure.unflatten([one(update, of) for update, of in zip(flat, chosen, strict=True)])

    muon = optax.chain(
        automatic(scale_by_muon(beta=MOMENTUM, weight_dimension_numbers=lambda _: _chosen(axes))),
        optax.stateless(lambda updates, params: size(updates)),
    )
    return optax.partition({"muon": muon, "adam": optax.scale_by_adam(b1=b1, b2=b2, eps=eps)}, labels)


def automatic(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same on a mesh of explicit axes, with what is sent in an update left to the compiler.

    A product of a matrix with itself is ambiguous where both its sides are split.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        if jax.sharding.get_abstract_mesh().empty:
            return transform.update(updates, state)
        places = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, (updates, state))
        return jax.sharding.auto_axes(transform.update, out_sharding=places)(updates, state)

    return optax.GradientTransformation(transform.init, update)


def _is_found(x: Any) -> bool:
    return x is None or isinstance(x, Matrix)


def _chosen(axes: Any) -> Any:
    return jax.tree.map(
        lambda one: optax.MaskedNode() if one is None else one,
        axes,
        is_leaf=lambda x: x is None or isinstance(x, MuonDimensionNumbers),
    )
