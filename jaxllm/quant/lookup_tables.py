"""Lookup tables with learned scales: every group of inputs has a table, levels of NormalFloat times a learned scale.

FLUTE (arXiv:2407.10960) multiplies with weights that are looked up in a table, and extends NormalFloat: its scale is
no longer the largest magnitude of a group but a learned parameter, so that the table of a group is
``scale * level[code]``. The paper learns scales by gradients of the loss; here they are fitted to the weights, without
calibration (this file), or to the results of the matmul (``jaxllm.quant.methods.learned_scales``).

Legend: G elements of a group, O columns of a matrix.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.quant.codebooks import CodebookGrid
from jaxllm.quant.grids import GridParams, stored_scale

CLIPS = tuple(1 - i / 16 for i in range(9))
"""Shares of a group's largest magnitude that the search for its scale begins with: 1 (NormalFloat's own) to a half."""
STEPS = 2
"""Steps from each beginning: codes of the nearest levels, then the scale of least squares for these codes."""
TABLES = {"lut4": "nf4", "lut3": "nf3"}
"""Levels by name of the format."""


@dataclass(frozen=True)
class LearnedScaleGrid(CodebookGrid):
    """Levels of a table times a scale that minimises the squared error of a group."""

    def fit(self, group: Float[Array, "... G O"]) -> GridParams:
        """Parameters of the group; the error is never above that of the scale from the largest magnitude."""
        return self.params([_fitted_scale(self, group, super().fit(group).scale)])


@functools.partial(jax.jit, static_argnums=0)
def _fitted_scale(
    grid: LearnedScaleGrid, group: Float[Array, "... G O"], first: Float[Array, "... O"]
) -> Float[Array, "... O"]:
    """The scale of the least squared error, by steps from shares of the first one; compiled once for a shape."""

    def squared(scale: Array) -> Array:
        own = grid.params([jnp.expand_dims(scale, -2)])
        return jnp.sum(jnp.square(group - grid.decode(grid.encode(group, own), own)), axis=-2)

    def least_squares(scale: Array) -> Array:
        """The best scale for the codes that the groups have with ``scale``, which stays where all are 0."""
        codes = grid.encode(group, grid.params([jnp.expand_dims(scale, -2)]))
        units = grid.decode(codes, grid.params([jnp.ones((), group.dtype)]))
        norm = jnp.sum(units * units, axis=-2)
        best = jnp.sum(units * group, axis=-2) / jnp.where(norm > 0, norm, 1)
        return stored_scale(jnp.where(best > 0, best, scale), grid.scale_dtype)

    def begin(best: tuple[Array, Array], share: Array) -> tuple[tuple[Array, Array], None]:
        scale = stored_scale(first * share, grid.scale_dtype)
        for step in range(STEPS + 1):
            found, error = best
            own = squared(scale)
            better = own < error
            best = jnp.where(better, scale, found), jnp.where(better, own, error)
            scale = least_squares(scale) if step < STEPS else scale
        return best, None

    (scale, _), _ = jax.lax.scan(begin, (first, squared(first)), jnp.asarray(CLIPS, first.dtype))
    return scale
