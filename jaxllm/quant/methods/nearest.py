"""Rounding to the nearest, and HQQ, which moves zero points first; neither needs calibration.

Legend: I inputs, O outputs, G groups.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jaxllm.quant.grids import Grid, GridParams, IntGrid
from jaxllm.quant.methods.gptq import fit_groups

NORM = 0.7
"""Exponent p of the norm of errors that HQQ minimises."""
STEPS = 20
FIRST_WEIGHT, GROWTH = 10.0, 1.01
"""Weight of the quadratic term in the first step, and its growth from step to step."""


def round_to_nearest(
    weight: Float[Array, "I O"], grid: Grid, group: int | None
) -> tuple[UInt8[Array, "I O"], GridParams]:
    """Codes of the nearest values, and the parameters of every group, [G, O]."""
    size = group or weight.shape[0]
    params = fit_groups(grid, weight, size)
    return grid.encode(weight, spread(params, size, weight.shape[0])), params


@functools.partial(jax.jit, static_argnums=(1, 2))
def half_quadratic(
    weight: Float[Array, "I O"], grid: IntGrid, group: int | None
) -> tuple[UInt8[Array, "I O"], GridParams]:
    """HQQ (Badri and Shaji 2023): zero points minimise a norm of the errors with an exponent below 1.

    Half-quadratic splitting: the errors are shrunk, which ignores outliers, and each group's zero point becomes the
    mean of what is left. At the end they are rounded, since formats store integers. Scales stay as they were fitted.

    Raises:
        ValueError: the grid is symmetric, so that there is nothing to move.
    """
    if grid.symmetric:
        raise ValueError("hqq moves zero points, which a symmetric grid does not have; choose asymmetric integers.")
    inputs, outputs = weight.shape
    size = group or inputs
    count = -(-inputs // size)
    mask = (jnp.arange(size * count) < inputs).reshape(count, size, 1)
    rows = jnp.pad(weight, ((0, size * count - inputs), (0, 0))).reshape(count, size, outputs)
    params = fit_groups(grid, weight, size)
    scale, zero = params.scale[:, None], params.zero[:, None]
    counts = jnp.sum(mask, axis=1, keepdims=True)

    def codes_of(zero: Array) -> Array:
        return jnp.clip(jnp.round(rows / scale + zero), 0, 2**grid.bits - 1)

    def step(carry: tuple[Array, Array, Array, Array], _: None) -> tuple[tuple[Array, Array, Array, Array], None]:
        zero, strength, best, least = carry
        codes = codes_of(zero)
        error = rows - (codes - zero) * scale
        size_of = jnp.abs(error)
        shrunk = jnp.sign(error) * jnp.maximum(size_of - jnp.where(size_of > 0, size_of, 1) ** (NORM - 1) / strength, 0)
        moved = jnp.sum(jnp.where(mask, codes - (rows - shrunk) / scale, 0), axis=1, keepdims=True) / counts
        norm = jnp.sum(jnp.where(mask, size_of**NORM, 0), axis=1, keepdims=True)
        better = norm < least
        return (moved, strength * GROWTH, jnp.where(better, zero, best), jnp.where(better, norm, least)), None

    start = zero, jnp.asarray(FIRST_WEIGHT, weight.dtype), zero, jnp.full_like(zero, jnp.inf)
    (_, _, zero, _), _ = jax.lax.scan(step, start, None, length=STEPS + 1)
    zero = jnp.clip(jnp.round(zero), 0, 2**grid.bits - 1)
    codes = codes_of(zero).astype(jnp.uint8).reshape(-1, outputs)[:inputs]
    return codes, GridParams(params.scale, zero[:, 0])


def spread(params: GridParams, size: int, inputs: int) -> GridParams:
    """Parameters of every input, [I, O], from those of groups."""
    place = jnp.arange(inputs) // size
    return jax.tree.map(lambda p: p[place], params)
