"""GPTQ: columns are rounded one after another, and the inputs that follow compensate the error (arXiv:2210.17323).

For a matmul ``y = x w`` with inputs of the Gram matrix H, rounding input i of w to q_i changes y least if the inputs
that are not yet rounded move by ``-(w_i - q_i) / [H^-1]_ii * [H^-1]_i,:``. A Cholesky factor of the inverse has all of
these rows (section 3.3). A group's parameters are fitted when its first input is reached, to weights that the errors
before it have moved.

Correlations between inputs that a text of few rows shows are partly chance, and compensating for them costs on other
text. ``shrinkage`` counts them for less: on held-out text the error of SmolLM2's widest matrices falls below that of
rounding to the nearest only with it, see ``docs/serve/quantise.md``.

Legend: I inputs, O outputs, G groups.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jaxllm.quant.grids import Grid, GridParams

BLOCK = 128
"""Inputs that are rounded between two updates of all that follow; it changes no value but by rounding errors."""
DAMPING = 0.01
MOST_DAMPING = 10.0
SHRINKAGE = 0.3
"""``shrinkage`` of the methods: the best of 0.03, 0.1, 0.3 and 1 on held-out text after 3,072 tokens of calibration,
and as good as 0.1 after 12,288."""


def gptq(
    weight: Float[Array, "I O"],
    gram: Float[Array, "I I"],
    grid: Grid,
    group: int | None,
    *,
    act_order: bool = False,
    static: GridParams | None = None,
    damping: float = DAMPING,
    shrinkage: float = 0.0,
) -> tuple[UInt8[Array, "I O"], GridParams]:
    """Codes, and the parameters of every group, [G, O].

    Args:
        gram: sum of the outer products of the inputs with themselves; its scale does not matter.
        grid: what is rounded to.
        group: inputs that share parameters; None: all.
        act_order: round inputs of the largest activations first. Groups are then fitted to the weights as they were
            ("static groups"), so that they stay runs of neighbouring inputs.
        static: parameters of every group; None: fitted to the group's weights.
        damping: part of the mean of the Gram matrix's diagonal that is added to the diagonal.
        shrinkage: part of each element of the diagonal that is added to it.

    Raises:
        FloatingPointError: the Gram matrix is not positive definite; with more damping it is.
    """
    inputs = weight.shape[0]
    size = group or inputs
    dead = jnp.diag(gram) == 0
    order = jnp.argsort(-jnp.diag(gram), stable=True) if act_order else jnp.arange(inputs)
    weight = jnp.where(dead[:, None], 0, weight)
    factor = _factor(gram, dead, order, damping, shrinkage)
    if not bool(jnp.isfinite(factor).all()):
        raise FloatingPointError(f"the inputs' Gram matrix is not positive definite with a damping of {damping:g}.")
    if act_order and static is None:
        static = fit_groups(grid, weight, size)
    codes, params = _round(grid, size, weight[order], factor, order, static)
    return jnp.zeros_like(codes).at[order].set(codes), static or params


def gptq_damped(
    weight: Float[Array, "I O"], gram: Float[Array, "I I"], grid: Grid, group: int | None, **options: Any
) -> tuple[UInt8[Array, "I O"], GridParams, float]:
    """``gptq`` with ten times the damping until it succeeds, and the damping that it took.

    Args:
        options: those of ``gptq`` but for the damping.
    """
    damping = DAMPING
    while True:
        try:
            return *gptq(weight, gram, grid, group, damping=damping, **options), damping
        except FloatingPointError:
            if damping >= MOST_DAMPING:
                raise
            damping *= 10


def fit_groups(grid: Grid, weight: Float[Array, "I O"], size: int) -> GridParams:
    """Parameters of all groups of a matrix, [G, O]."""
    inputs, outputs = weight.shape
    count = -(-inputs // size)
    padded = jnp.concatenate([weight, jnp.broadcast_to(weight[-1:], (size * count - inputs, outputs))])
    return grid.fit(padded.reshape(count, size, outputs))


@jax.jit
def _factor(
    gram: Array, dead: Array, order: Array, damping: float | Array, shrinkage: float | Array
) -> Float[Array, "I I"]:
    """Upper Cholesky factor of the inverse of the damped Gram matrix, in the order of rounding."""
    diagonal = jnp.diag(gram)
    gram = gram + jnp.diag(jnp.where(dead, 1, damping * jnp.mean(diagonal) + shrinkage * diagonal))
    lower = jnp.linalg.cholesky(gram[order][:, order])
    half = jax.scipy.linalg.solve_triangular(lower, jnp.eye(gram.shape[0], dtype=gram.dtype), lower=True)
    return jnp.linalg.cholesky(half.T @ half).T


@functools.partial(jax.jit, static_argnums=(0, 1))
def _round(
    grid: Grid, size: int, weight: Array, factor: Array, order: Array, static: GridParams | None
) -> tuple[UInt8[Array, "I O"], GridParams]:
    inputs, outputs = weight.shape
    count = -(-inputs // size)
    # A block never crosses the beginning of a group, whose parameters want every error before it.
    block = size if size <= BLOCK else next(n for n in range(BLOCK, 0, -1) if size % n == 0)
    whole = -(-inputs // block) * block
    extra = whole - inputs
    weight = jnp.concatenate([weight, jnp.zeros((extra, outputs), weight.dtype)])
    factor = jnp.pad(factor, (0, extra)) + jnp.diag(jnp.arange(whole) >= inputs).astype(factor.dtype)
    groups_of = jnp.pad(order, (0, extra), mode="edge") // size
    wide = count * size
    empty = jnp.zeros((count, outputs), weight.dtype)

    def one_block(b: Array, carry: tuple[Array, Array, GridParams]) -> tuple[Array, Array, GridParams]:
        weight, codes, params = carry
        start = b * block

        if static is None:

            def fitted(params: GridParams) -> GridParams:
                padded = jnp.pad(weight, ((0, max(0, wide - whole)), (0, 0)))
                rows = jax.lax.dynamic_slice_in_dim(padded, start, size)
                # The rows beyond the matrix repeat its last, which changes no extreme.
                last = jnp.minimum(start + jnp.arange(size), inputs - 1) - start
                own = grid.fit(rows[last][None])
                return jax.tree.map(lambda all_, new: all_.at[start // size].set(new[0]), params, own)

            params = jax.lax.cond(start % size == 0, fitted, lambda params: params, params)

        rows = jax.lax.dynamic_slice_in_dim(weight, start, block)
        corner = jax.lax.dynamic_slice(factor, (start, start), (block, block))

        def one_input(i: Array, inner: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            rows, errors, found = inner
            own = jax.tree.map(lambda p: p[groups_of[start + i]], params if static is None else static)
            code = grid.encode(rows[i], own)
            error = (rows[i] - grid.decode(code, own)) / corner[i, i]
            later = jnp.where(jnp.arange(block) > i, corner[i], 0)
            return rows - later[:, None] * error, errors.at[i].set(error), found.at[i].set(code)

        nothing = jnp.zeros_like(rows)
        _, errors, found = jax.lax.fori_loop(0, block, one_input, (rows, nothing, nothing.astype(jnp.uint8)))
        across = jax.lax.dynamic_slice(factor, (start, 0), (block, whole))
        across = jnp.where(jnp.arange(whole) >= start + block, across, 0)
        return (
            weight - across.T @ errors,
            jax.lax.dynamic_update_slice_in_dim(codes, found, start, 0),
            params,
        )

    start = weight, jnp.zeros((whole, outputs), jnp.uint8), GridParams(empty, empty)
    _, codes, params = jax.lax.fori_loop(0, whole // block, one_block, start)
    return codes[:inputs], params
