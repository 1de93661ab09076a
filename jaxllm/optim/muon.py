"""Muon (Jordan et al. 2024; arXiv:2502.16982) for matrices within layers, based on optax.contrib's."""

from __future__ import annotations

import math
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

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

        orthogonal = scale_by_muon(beta=MOMENTUM, weight_dimension_numbers=numbers)
        return optax.chain(auto_sharded(orthogonal), optax.stateless(sized))

    return partition_matrices(logical_axes, of_matrices, optax.scale_by_adam(b1=b1, b2=b2, eps=eps))
