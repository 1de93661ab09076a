"""Tile schedule of the grouped matmul kernels, and the custom VJP that they share.

Rows are cut into tiles regardless of groups. A step is one tile with one group that has rows in it, so a tile in which
a group ends is visited again for the next group; each step writes only its group's rows.

Legend: M rows, E groups, K columns of a row, N columns of the result, S steps at most.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class TileSteps(NamedTuple):
    """Steps in the order of their tiles, which is that of their groups; those after the last one repeat it.

    Attributes:
        group: group of a step; E for the rows after the last group.
        tile: row tile of a step.
        ends: group boundaries: rows ``ends[e]`` to ``ends[e + 1]`` are group e's, and those of E are the rest.
        count: number of steps.
    """

    group: Int[Array, " S"]
    tile: Int[Array, " S"]
    ends: Int[Array, " E+2"]
    count: Int[Array, "1"]

    @classmethod
    def of(cls, group_sizes: Array, m: int, rows: int, *, every_group: bool = False) -> TileSteps:
        """Steps of M rows, ``rows`` a tile: they cover every row or, with ``every_group``, every group and no other
        rows.
        """
        tiles, groups = -(-m // rows), group_sizes.shape[0]
        inner = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), m)
        last = inner[-1:] if every_group else jnp.full_like(inner[-1:], m)
        ends = jnp.concatenate([jnp.zeros_like(inner[:1]), inner, last])
        start, stop = ends[:-1], ends[1:]
        first = jnp.minimum(start // rows, tiles - 1)
        needed = jnp.where(stop > start, (stop - 1) // rows - first + 1, 0)
        if every_group:
            needed = needed.at[:-1].set(jnp.maximum(needed[:-1], 1))
        total = jnp.cumsum(needed)
        most = tiles + (groups if every_group else min(groups, m))
        step = jnp.minimum(jnp.arange(most, dtype=jnp.int32), total[-1] - 1)
        group = jnp.sum(total[None] <= step[:, None], axis=1, dtype=jnp.int32)
        tile = first[group] + step - (total - needed)[group]
        return cls(group, tile.astype(jnp.int32), ends, total[-1:])


@runtime_checkable
class GroupedMatmulKernels(Protocol):
    """Interface of a platform's kernels."""

    def matmul(self, rows: Array, matrices: Array, group_sizes: Array, transposed: bool) -> Float[Array, "M N"]:
        """Each row times its group's matrix, or that matrix transposed; zeros after the last group."""
        ...

    def outer(self, lhs: Array, d_out: Array, group_sizes: Array) -> Float[Array, "E K N"]:
        """Weight gradient: for each group the sum over its rows of ``lhs[m]^T d_out[m]``; zeros for an empty group."""
        ...


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply(
    kernels: GroupedMatmulKernels, lhs: Float[Array, "M K"], rhs: Float[Array, "E K N"], group_sizes: Int[Array, " E"]
) -> Float[Array, "M N"]:
    """Grouped matmul by a platform's kernels, differentiable."""
    return kernels.matmul(lhs, rhs, group_sizes, False)


def _forward(kernels: GroupedMatmulKernels, lhs: Array, rhs: Array, group_sizes: Array) -> tuple[Array, Any]:
    return kernels.matmul(lhs, rhs, group_sizes, False), (lhs, rhs, group_sizes)


def _backward(kernels: GroupedMatmulKernels, residuals: Any, d_out: Array) -> tuple[Array, Array, None]:
    lhs, rhs, group_sizes = residuals
    return kernels.matmul(d_out, rhs, group_sizes, True), kernels.outer(lhs, d_out, group_sizes), None


multiply.defvjp(_forward, _backward)
