"""Low-rank Adam: GaLore (arXiv:2403.03507), APOLLO and APOLLO-Mini (arXiv:2412.05270).

A gradient G of m x n, m the smaller side, is projected by P to ``R = P G`` of r x n, and Adam's two moments are R's.
GaLore's P are the r leading left singular vectors of G, and its update is projected back: ``P^T adam(R)``. APOLLO's P
is random, and its update is G with each column scaled by what Adam does to R's: ``|adam(R)| / |R|``; APOLLO-Mini has r
= 1 and one such scale per matrix. P is renewed every ``refresh`` steps; the moments stay.

Legend: S stacked matrices, m and n their smaller and larger side, r rank.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxllm.optim.adam8bit import Moments, quantise_moments
from jaxllm.optim.matrix_params import (
    MatrixDims,
    decompose_each,
    from_matrices,
    mean,
    sides,
    to_matrices,
    zeros_of_rank,
)
from jaxllm.optim.param_groups import auto_sharded, partition_matrices

LowRank = Literal["galore", "apollo", "apollo_mini"]
GALORE_SCALE = 0.25
"""Scale of GaLore's updates (section 5)."""
APOLLO_MINI_SCALE = math.sqrt(128)
"""Scale of APOLLO-Mini's updates: one random direction underestimates a matrix (section 4.2 and its authors' code)."""
MAX_NORM_GROWTH = 1.01
"""Largest growth of an update's norm from one step to the next (section 4.1, after arXiv:2410.01623)."""


class LowRankState(NamedTuple):
    """Optimizer state by matrix, dimensions as G's: moments [S r n], GaLore's P [S m r], APOLLO's last norm [S]."""

    count: Int[Array, ""]
    first: Any
    second: Any
    projector: Any
    norm: Any


def scale_by_low_rank(
    logical_axes: Any, kind: LowRank, rank: int, refresh: int, b1: float, b2: float, eps: float, moments: Moments
) -> optax.GradientTransformation:
    """Low-rank Adam for matrices within layers; plain Adam for embeddings, output heads, gains and biases.

    Args:
        logical_axes: of the parameters.
        kind: the projection.
        rank: r; 0 for a quarter of m. APOLLO-Mini's is always 1.
        refresh: steps between two projections.
        b1, b2, eps: Adam's.
        moments: storage of matrices' moments; projections are stored in the gradients' dtype.
    """

    def of_matrices(found: list[MatrixDims]) -> optax.GradientTransformation:
        def init(params: Any) -> LowRankState:
            leaves, structure = jax.tree.flatten(params)
            both = [sides(leaf, one) for leaf, one in zip(leaves, found, strict=True)]
            ranks = [_rank(kind, rank, leaf, small) for leaf, (small, _) in zip(leaves, both, strict=True)]
            zeros = [zeros_of_rank(leaf, small, r) for leaf, (small, _), r in zip(leaves, both, ranks, strict=True)]
            empty = [jnp.zeros((), leaf.dtype) for leaf in leaves]
            if kind == "galore":
                projectors = [
                    zeros_of_rank(leaf, large, r) for leaf, (_, large), r in zip(leaves, both, ranks, strict=True)
                ]
                norms = empty
            else:
                projectors = empty
                norms = [
                    jnp.zeros_like(mean(leaf, small + large)) for leaf, (small, large) in zip(leaves, both, strict=True)
                ]
            back = structure.unflatten
            return LowRankState(
                jnp.zeros((), jnp.int32),
                back(zeros),
                back([jnp.zeros_like(one) for one in zeros]),
                back(projectors),
                back(norms),
            )

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            del params
            leaves, structure = jax.tree.flatten(updates)
            olds = [structure.flatten_up_to(part) for part in state[1:]]
            made = [
                _step(state.count, number, grad, of, *(part[number] for part in olds))
                for number, (grad, of) in enumerate(zip(leaves, found, strict=True))
            ]
            out, *news = (structure.unflatten(part) for part in zip(*made, strict=True))
            return out, LowRankState(state.count + 1, *news)

        def _step(
            count: Array,
            number: int,
            grad: Array,
            of: MatrixDims,
            first: Array,
            second: Array,
            projector: Array,
            norm: Array,
        ) -> tuple[Array, ...]:
            small, large = sides(grad, of)
            whole, m, v = (to_matrices(x, small, large) for x in (grad, first, second))
            if kind == "galore":
                fresh = lambda: _leading(whole, m.shape[1])  # noqa: E731
                down = jax.lax.cond(count % refresh == 0, fresh, lambda: to_matrices(projector, large, small))
                projector = from_matrices(down, projector.shape, large, small)
            else:
                key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), number), count // refresh)
                shape = (len(whole), m.shape[1], whole.shape[1])
                down = jax.random.normal(key, shape, whole.dtype) / math.sqrt(m.shape[1])
            seen = jnp.einsum("srm,smn->srn", down, whole)
            m, v = b1 * m + (1 - b1) * seen, b2 * v + (1 - b2) * jnp.square(seen)
            steps = (count + 1).astype(whole.dtype)
            adam = m / (1 - b1**steps) / (jnp.sqrt(v / (1 - b2**steps)) + eps)
            if kind == "galore":
                out = GALORE_SCALE * jnp.einsum("srm,srn->smn", down, adam)
            else:
                over = (1,) if kind == "apollo" else (1, 2)
                out = (
                    whole
                    * (_norm(adam, over) / (_norm(seen, over) + eps))
                    * (APOLLO_MINI_SCALE if kind == "apollo_mini" else 1)
                )
                now, before = _norm(out, (1, 2)), norm.reshape(-1, 1, 1)
                most = jnp.where(before > 0, jnp.minimum(now, MAX_NORM_GROWTH * before), now)
                out = out * (most / jnp.maximum(now, jnp.finfo(now.dtype).tiny))
                norm = most.reshape(norm.shape)
            back = lambda x, like: from_matrices(x, like.shape, small, large)  # noqa: E731
            return back(out, grad), back(m, first), back(v, second), projector, norm

        rule = optax.GradientTransformation(init, update)
        return auto_sharded(quantise_moments(moments, rule, first="first", second="second"))

    return partition_matrices(logical_axes, of_matrices, optax.scale_by_adam(b1=b1, b2=b2, eps=eps))


def _rank(kind: LowRank, rank: int, leaf: Array, small: tuple[int, ...]) -> int:
    side = math.prod(leaf.shape[i] for i in small)
    return 1 if kind == "apollo_mini" else min(side, rank or max(1, side // 4))


def _norm(x: Float[Array, "S m n"], over: tuple[int, ...]) -> Array:
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=over, keepdims=True))


def _leading(whole: Float[Array, "S m n"], rank: int) -> Float[Array, "S r m"]:
    """Leading left singular vectors."""
    squares = jnp.einsum("smn,skn->smk", whole, whole)
    vectors = decompose_each(lambda stack: jnp.linalg.eigh(stack)[1], squares)  # by rising values
    return vectors[:, :, ::-1][:, :, :rank].mT
