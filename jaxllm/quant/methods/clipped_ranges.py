"""Clipped ranges: every group's range is shrunk by the factor that leaves the least squared error of the results.

The largest elements of a group are then clipped, which costs less than the wider steps that they would ask of all
others. Of results the inputs' magnitudes are known and their correlations are left to GPTQ: an element's error counts
by its input's mean square (the clipping of OmniQuant, arXiv:2308.13137, by search instead of gradients).

Legend: I inputs, O outputs, G groups.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.quant.grids import Grid, GridParams
from jaxllm.quant.methods.gptq import fit_groups
from jaxllm.quant.methods.nearest import spread

LEAST, STEPS = 0.5, 20
"""Smallest factor that is tried, and the number of factors from it to 1."""


@functools.partial(jax.jit, static_argnums=(2, 3))
def clipped_ranges(weight: Float[Array, "I O"], power: Float[Array, " I"], grid: Grid, group: int | None) -> GridParams:
    """Parameters of every group, [G, O]; no group's weighted error is above that of the grid's own parameters.

    Args:
        power: mean square of each input; its scale does not matter.
        group: inputs that share parameters; None: all.
    """
    inputs, outputs = weight.shape
    size = group or inputs
    count = -(-inputs // size)

    def error_of(params: GridParams) -> Float[Array, "G O"]:
        own = spread(params, size, inputs)
        off = weight - grid.decode(grid.encode(weight, own), own)
        padded = jnp.pad(power[:, None] * off * off, ((0, size * count - inputs), (0, 0)))
        return jnp.sum(padded.reshape(count, size, outputs), axis=1)

    def step(carry: tuple[GridParams, Array], factor: Array) -> tuple[tuple[GridParams, Array], None]:
        best, least = carry
        params = fit_groups(grid, factor * weight, size)
        error = error_of(params)
        better = error < least
        return (
            jax.tree.map(lambda new, old: jnp.where(better, new, old), params, best),
            jnp.minimum(error, least),
        ), None

    whole = fit_groups(grid, weight, size)
    factors = jnp.linspace(1, LEAST, STEPS, dtype=weight.dtype)[1:]
    (params, _), _ = jax.lax.scan(step, (whole, error_of(whole)), factors)
    return params
