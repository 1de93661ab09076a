"""Muon (Jordan et al. 2024; arXiv:2502.16982) for matrices within layers, with the orthogonalisation of optax.contrib.

The momentum is its authors' Nesterov momentum: ``M <- mu M + G``, and ``G + mu M`` is orthogonalised. There is no bias
correction (optax's Muon has Nadam's): the orthogonalisation divides by the norm, so the size of M has no effect, and
M is stored times ``1 - mu``, as optax stores it.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, MuonState, scale_by_muon

from jaxllm.optim.matrix_params import MatrixDims
from jaxllm.optim.param_groups import auto_sharded, partition_matrices

MOMENTUM = 0.95
RMS = 0.2
"""Root mean square of AdamW's updates, to which Muon's are scaled (arXiv:2502.16982, equation 4)."""


def scale_by_muon_or_adam(logical_axes: Any, b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Muon for matrices within layers; Adam for embeddings, output heads, gains and biases.

    Args:
        logical_axes: of the parameters.
        b1, b2, eps: Adam's.
    """

    def of_matrices(found: list[MatrixDims]) -> optax.GradientTransformation:
        def numbers(updates: Any) -> Any:
            return jax.tree.unflatten(jax.tree.structure(updates), [MuonDimensionNumbers(*one[:2]) for one in found])

        def sized(updates: Any, params: Any) -> Any:
            del params
            flat, structure = jax.tree.flatten(updates)
            larger = [
                max(math.prod(update.shape[i] for i in side) for side in (of.rows, of.columns))
                for update, of in zip(flat, found, strict=True)
            ]
            return structure.unflatten([update * RMS * math.sqrt(n) for update, n in zip(flat, larger, strict=True)])

        orthogonal = _nesterov(scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=numbers))
        return optax.chain(auto_sharded(orthogonal), optax.stateless(sized))

    return partition_matrices(logical_axes, of_matrices, optax.scale_by_adam(b1=b1, b2=b2, eps=eps))


def _nesterov(orthogonalised: optax.GradientTransformation) -> optax.GradientTransformation:
    """Muon with Nesterov momentum, from Muon without momentum."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MuonState]:
        mu = optax.tree.update_moment(updates, state.mu, MOMENTUM, 1)
        ahead = optax.tree.update_moment(updates, mu, MOMENTUM, 1)
        none = jax.tree.map(jnp.zeros_like, mu)
        out, new = orthogonalised.update(ahead, MuonState(state.count, none, state.ns_coeffs), params)
        return out, MuonState(optax.tree.get(new, "count"), mu, state.ns_coeffs)

    return optax.GradientTransformation(orthogonalised.init, update)
