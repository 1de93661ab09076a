"""Learned scales: codes of the nearest values, and scales that minimise the squared error of the matmul's results.

For results ``x w`` with inputs of the Gram matrix H, and w rounded to ``q = sum_g s_g u_g`` (u_g the values of group
g's codes with the scale 1), the best scales solve ``(u^T H u) s = u^T H w``, one system of G equations for each column.
The scales change the codes, whose nearest values change the scales: a few steps, of which the best is kept. With the
levels of NormalFloat these are FLUTE's learned scales (arXiv:2407.10960), by least squares instead of gradients.

Legend: I inputs, O outputs, G groups.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jaxllm.quant.grids import Grid, GridParams, stored_scale
from jaxllm.quant.methods.nearest import round_to_nearest, spread

STEPS = 4
DAMPING = 1e-3
"""Part of the mean of the Gram matrix's diagonal that is added to the diagonal: with few rows it is singular."""


@functools.partial(jax.jit, static_argnums=(2, 3))
def learned_scales(
    weight: Float[Array, "I O"], gram: Float[Array, "I I"], grid: Grid, group: int | None
) -> tuple[UInt8[Array, "I O"], GridParams]:
    """Codes, and the parameters of every group, [G, O]; no column's error is above that of the grid's own scales.

    Args:
        gram: sum of the outer products of the inputs with themselves; its scale does not matter.

    Raises:
        ValueError: the grid has zero points or scales that are powers of two.
    """
    if grid.stored != 1 or grid.name == "mxfp4":
        raise ValueError(f"learned_scales wants free scales and no zero points; {grid.name} is another grid.")
    inputs = weight.shape[0]
    size = group or inputs
    gram = gram + jnp.eye(inputs, dtype=gram.dtype) * DAMPING * jnp.mean(jnp.diag(gram))

    def error_of(codes: Array, scale: Array) -> Array:
        off = weight - grid.decode(codes, spread(grid.params([scale]), size, inputs))
        return jnp.sum(off * (gram @ off), axis=0)

    def solved(codes: Array, scale: Array) -> Array:
        return solved_scales(weight, gram, grid, size, codes, scale)

    def step(carry: tuple[Array, Array, Array, Array], _: None) -> tuple[tuple[Array, Array, Array, Array], None]:
        scale, best_codes, best, least = carry
        codes = grid.encode(weight, spread(grid.params([scale]), size, inputs))
        # Scales that fit these codes, and the codes that fit them: the first has the least error for the codes.
        scale = solved(codes, scale)
        error = error_of(codes, scale)
        better = error < least
        return (
            scale,
            jnp.where(better, codes, best_codes),
            jnp.where(better, scale, best),
            jnp.where(better, error, least),
        ), None

    codes, params = round_to_nearest(weight, grid, group)
    start = params.scale, codes, params.scale, error_of(codes, params.scale)
    (_, codes, scale, _), _ = jax.lax.scan(step, start, None, length=STEPS)
    return codes, grid.params([scale])


def solved_scales(
    weight: Float[Array, "I O"],
    gram: Float[Array, "I I"],
    grid: Grid,
    size: int,
    codes: UInt8[Array, "I O"],
    scale: Float[Array, "G O"],
) -> Float[Array, "G O"]:
    """Scales of groups of ``size`` inputs that minimise the squared error of the results for given codes.

    Args:
        gram: damped, so that it is not singular.
        scale: what stays where the solution is not positive.
    """
    inputs, count = len(weight), len(scale)
    extra = size * count - inputs
    units = jnp.pad(grid.decode(codes, grid.params([jnp.ones((), weight.dtype)])), ((0, extra), (0, 0)))
    gram, weight = jnp.pad(gram, (0, extra)), jnp.pad(weight, ((0, extra), (0, 0)))

    def by_group(x: Array) -> Array:
        return jnp.sum((units * x).reshape(count, size, -1), axis=1)

    def row(g: Array) -> Array:
        columns = jax.lax.dynamic_slice_in_dim(gram, g * size, size, axis=1)
        return by_group(columns @ jax.lax.dynamic_slice_in_dim(units, g * size, size))

    right, system = by_group(gram @ weight), jax.lax.map(row, jnp.arange(count))  # [G, O], [G, G, O]
    empty = jnp.diagonal(system).T == 0
    system = jnp.moveaxis(system, -1, 0) + jax.vmap(jnp.diag)(jnp.where(empty, 1, 0).T.astype(system.dtype))
    found = jnp.linalg.solve(system, right.T[..., None])[..., 0].T
    return stored_scale(jnp.where((found > 0) & ~empty, found, scale), getattr(grid, "scale_dtype", "float32"))


@functools.partial(jax.jit, static_argnums=(2, 3))
def refitted_scales(
    weight: Float[Array, "I O"],
    gram: Float[Array, "I I"],
    grid: Grid,
    size: int,
    codes: UInt8[Array, "I O"],
    params: GridParams,
) -> GridParams:
    """Parameters with ``solved_scales`` in the columns whose error they lower."""
    gram = gram + jnp.eye(len(weight), dtype=gram.dtype) * DAMPING * jnp.mean(jnp.diag(gram))
    solved = grid.params([solved_scales(weight, gram, grid, size, codes, params.scale)])

    def error_of(own: GridParams) -> Array:
        off = weight - grid.decode(codes, spread(own, size, len(weight)))
        return jnp.sum(off * (gram @ off), axis=0)

    better = error_of(solved) < error_of(params)
    return jax.tree.map(lambda new, old: jnp.where(better, new, old), solved, params)
