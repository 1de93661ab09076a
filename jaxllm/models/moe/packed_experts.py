"""Experts' matrices as they are published, in few bits with scales, dequantised where they are multiplied.

A ``PackedExperts`` stands in a tree of parameters where an array would, and is sliced by a scan over layers as an array is.
Its formats are those of ``jaxllm.hub.quantised_checkpoints``; the numbers it stands for are the same to the bit.

Legend: E experts, A rows and B columns of an expert's matrix, M rows that are multiplied.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul import grouped_matmul

E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
PLAIN_BYTES = 2**29
"""Of matrices that are dequantised at once."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=["block"])
@dataclass(frozen=True)
class PackedExperts:
    """Matrices of experts, packed; leading dimensions (layers, experts) are those of both arrays.

    Attributes:
        values: float8 [..., A, B]; or bytes [..., A / 2, B] of two e2m1 numbers each, rows 2 i in the low halves and
            2 i + 1 in the high ones.
        scales: of each block: float32 for float8, the byte of a power of two (e8m0) for e2m1.
        block: rows and columns of a block; the last may be cut short.
    """

    values: Any
    scales: Any
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrices."""
        *lead, rows, columns = self.values.shape
        return (*lead, rows * (2 if self.values.dtype == jnp.uint8 else 1), columns)

    def plain(self, dtype: DTypeLike) -> Float[Array, "*lead A B"]:
        """The numbers: float32 products of a value and its scale, rounded to ``dtype``."""
        rows, columns = self.shape[-2:]
        if self.values.dtype == jnp.uint8:
            halves = jnp.stack([self.values & 15, self.values >> 4], axis=-2)
            values = jnp.asarray(E2M1, jnp.float32)[halves.reshape(*self.shape)]
            # The bits of a float32 power of two; the least of them is half of the smallest normal number.
            bits = self.scales.astype(jnp.uint32) << 23
            scales = jax.lax.bitcast_convert_type(jnp.where(bits == 0, jnp.uint32(1 << 22), bits), jnp.float32)
        else:
            values, scales = self.values.astype(jnp.float32), self.scales
        scales = jnp.repeat(jnp.repeat(scales, self.block[0], axis=-2), self.block[1], axis=-1)
        return (values * scales[..., :rows, :columns]).astype(dtype)


def packed_grouped_matmul(lhs: Float[Array, "M A"], rhs: PackedExperts, sizes: Int[Array, " E"]) -> Float[Array, "M B"]:
    """``grouped_matmul`` with matrices that are dequantised a few experts at a time, and only where there are rows.

    So many at a time as ``PLAIN_BYTES`` hold; where there are fewer rows than experts, as in decoding, one.
    """
    experts, rows, columns = rhs.shape
    most = max(1, PLAIN_BYTES // (rows * columns * lhs.dtype.itemsize)) if lhs.shape[0] > experts else 1
    chunk = max(n for n in range(1, min(experts, most) + 1) if experts % n == 0)
    starts = jnp.cumsum(sizes) - sizes

    def some(i: Array, out: Array) -> Array:
        def part(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, i * chunk, chunk)

        own, start = part(sizes), starts[i * chunk]

        def product(out: Array) -> Array:
            matrices = PackedExperts(part(rhs.values), part(rhs.scales), rhs.block).plain(lhs.dtype)
            return out + jnp.roll(grouped_matmul(jnp.roll(lhs, -start, axis=0), matrices, own), start, axis=0)

        return jax.lax.cond(jnp.any(own > 0), product, lambda out: out, out)

    out = jnp.broadcast_to(jnp.zeros_like(lhs[:, :1]), (lhs.shape[0], columns))
    return jax.lax.fori_loop(0, experts // chunk, some, out)


def has_packed(params: Any) -> bool:
    """Whether a tree of parameters holds packed matrices."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, PackedExperts))
    return any(isinstance(leaf, PackedExperts) for leaf in leaves)
