"""Grouped matmul in plain JAX, group by group in blocks of rows, for any backend.

A group's matrix is read once. Its rows are taken a block at a time; what a group's last block computes beyond its end
is discarded, so the overhead is at most E blocks.

Legend: M rows, E groups, R rows of a block, K columns of a row, N columns of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

MIN_BLOCK = 16
MAX_BLOCK = 256


@jax.custom_vjp
def grouped_matmul_xla(
    lhs: Float[Array, "M K"], rhs: Float[Array, "E K N"], group_sizes: Int[Array, " E"]
) -> Float[Array, "M N"]:
    """Grouped matmul in plain JAX; see ``grouped_matmul``."""
    return _rows_by_matrices("rk,kn->rn", lhs, rhs, group_sizes, rhs.shape[2])


def _forward(lhs: Array, rhs: Array, group_sizes: Array) -> tuple[Array, Any]:
    return grouped_matmul_xla(lhs, rhs, group_sizes), (lhs, rhs, group_sizes)


def _backward(residuals: Any, d_out: Array) -> tuple[Array, Array, None]:
    lhs, rhs, group_sizes = residuals
    d_lhs = _rows_by_matrices("rn,kn->rk", d_out, rhs, group_sizes, rhs.shape[1])
    return d_lhs.astype(lhs.dtype), _rows_by_rows(lhs, d_out, group_sizes).astype(rhs.dtype), None


grouped_matmul_xla.defvjp(_forward, _backward)


def block_rows(rows: int, groups: int) -> int:
    """Block size: a power of two near half a group's mean size. Larger blocks waste FLOPs, smaller ones are
    memory-bound.
    """
    block = MIN_BLOCK
    while block * 2 <= min(MAX_BLOCK, rows // (2 * groups)):
        block *= 2
    return block


def _rows_by_matrices(equation: str, rows: Array, matrices: Array, group_sizes: Array, columns: int) -> Array:
    """Each row times its group's matrix: Float[M columns]."""
    size = block_rows(len(rows), len(matrices))
    dtype = jnp.promote_types(rows.dtype, jnp.float32)
    padded = _pad(rows, size)
    out = _zeros(rows, (len(padded), columns), dtype)

    def block(out: Array, start: Array, inside: Array, matrix: Array) -> Array:
        part = jax.lax.dynamic_slice_in_dim(padded, start, size)
        product = jnp.einsum(equation, part, matrix, preferred_element_type=dtype)
        # Rows beyond the group's end belong to another group, which is computed before or after.
        kept = jax.lax.dynamic_slice_in_dim(out, start, size)
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(inside[:, None], product, kept), start, 0)

    out = _over_blocks(block, out, group_sizes, size, lambda group: matrices[group])
    return out[: len(rows)].astype(rows.dtype)


def _rows_by_rows(lhs: Array, d_out: Array, group_sizes: Array) -> Float[Array, "E K N"]:
    """Weight gradient: for each group the sum over its rows of ``lhs[m]^T d_out[m]``."""
    size = block_rows(len(lhs), len(group_sizes))
    dtype = jnp.promote_types(lhs.dtype, jnp.float32)
    lhs, d_out = _pad(lhs, size), _pad(d_out, size)
    shape = (len(group_sizes), lhs.shape[1], d_out.shape[1])
    total = _zeros(lhs, shape, dtype)

    def block(total: Array, start: Array, inside: Array, group: Array) -> Array:
        # Mask both operands: 0 * nan is nan.
        rows, part = (jnp.where(inside[:, None], jax.lax.dynamic_slice_in_dim(x, start, size), 0) for x in (lhs, d_out))
        product = jnp.einsum("kr,rn->kn", rows.T, part, preferred_element_type=dtype)
        return total.at[group].add(product)

    return _over_blocks(block, total, group_sizes, size, lambda group: group)


def _over_blocks(
    block: Callable[[Array, Array, Array, Array], Array],
    carry: Array,
    group_sizes: Array,
    size: int,
    of_group: Callable[[Array], Array],
) -> Array:
    """Folds ``block(carry, first row, mask of the group's rows, of_group(group))`` over all blocks of all groups."""
    ends = jnp.cumsum(group_sizes)

    def group(index: Array, carry: Array) -> Array:
        end, count = ends[index], group_sizes[index]
        own = of_group(index)

        def one(i: Array, carry: Array) -> Array:
            start = end - count + i * size
            return block(carry, start, start + jnp.arange(size) < end, own)

        return jax.lax.fori_loop(0, (count + size - 1) // size, one, carry)

    return jax.lax.fori_loop(0, len(group_sizes), group, carry)


def _zeros(like: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Zeros for a loop's carry, varying over the same mesh axes as ``like``."""
    zero = jnp.zeros_like(like[:1, :1], dtype)
    return jnp.broadcast_to(zero.reshape((1,) * len(shape)), shape)


def _pad(rows: Array, size: int) -> Array:
    """``rows`` padded so that the last block can read beyond the end."""
    return jnp.pad(rows, ((0, size), (0, 0)))
