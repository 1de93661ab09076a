"""Quantised expert weights as published (FP8, MXFP4), kept packed in memory and dequantised at the matmul.

A ``PackedExperts`` takes the place of an array in a parameter tree, and a scan over layers slices it like an array. The
formats are those of ``jaxllm.hub.quantised_checkpoints``; the dequantised values are bit-identical.

Legend: E experts, A rows and B columns of an expert's matrix, M token rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

import sharding
from pallas_kernels.grouped_matmul import grouped_matmul
from sharding import LogicalAxes

E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
DEQUANTISED_BYTES = 2**29
"""Bytes of matrices that are dequantised at a time."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=["block"])
@dataclass(frozen=True)
class PackedExperts:
    """Packed matrices of experts; both arrays have the same leading dimensions (layers, experts).

    Attributes:
        values: float8 [..., A, B]; or bytes [..., A / 2, B] of two e2m1 values each, row 2 i in the low nibble and
            row 2 i + 1 in the high one.
        scales: scale of each block: float32 for float8, the byte of a power of two (e8m0) for e2m1.
        block: rows and columns of a block; the last block may be smaller.
    """

    values: Any
    scales: Any
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dequantised matrices."""
        *lead, rows, columns = self.values.shape
        return (*lead, rows * (2 if self.values.dtype == jnp.uint8 else 1), columns)

    def gather(self, dtype: DTypeLike, axes: LogicalAxes, unreduced_grad: bool) -> PackedExperts:
        """The packed matrices for use, as they are stored."""
        return self

    def dense(self, dtype: DTypeLike) -> Float[Array, "*lead A B"]:
        """Dequantised matrices."""
        return self.dequantise(dtype)

    def project(self, x: Array, out: LogicalAxes, contract: int) -> Array:
        """Matmul with the dequantised matrix."""
        return sharding.project(x, self.dequantise(x.dtype), out, contract=contract)

    def grouped_matmul(self, rows: Float[Array, "M A"], sizes: Int[Array, " E"]) -> Float[Array, "M B"]:
        """Grouped matmul, see ``packed_grouped_matmul``."""
        return packed_grouped_matmul(rows, self, sizes)

    def dequantise(self, dtype: DTypeLike) -> Float[Array, "*lead A B"]:
        """Dequantised matrices: value times scale in float32, rounded to ``dtype``."""
        rows, columns = self.shape[-2:]
        if self.values.dtype == jnp.uint8:
            halves = jnp.stack([self.values & 15, self.values >> 4], axis=-2)
            values = jnp.asarray(E2M1, jnp.float32)[halves.reshape(*self.shape)]
            # Bits of the float32 power of two; exponent 0 stands for half of the smallest normal float32.
            bits = self.scales.astype(jnp.uint32) << 23
            scales = jax.lax.bitcast_convert_type(jnp.where(bits == 0, jnp.uint32(1 << 22), bits), jnp.float32)
        else:
            values, scales = self.values.astype(jnp.float32), self.scales
        scales = jnp.repeat(jnp.repeat(scales, self.block[0], axis=-2), self.block[1], axis=-1)
        return (values * scales[..., :rows, :columns]).astype(dtype)


def packed_grouped_matmul(lhs: Float[Array, "M A"], rhs: PackedExperts, sizes: Int[Array, " E"]) -> Float[Array, "M B"]:
    """``grouped_matmul`` with matrices that are dequantised a few experts at a time, and only for experts with rows.

    At a time: as many experts as fit ``DEQUANTISED_BYTES``; one if there are fewer rows than experts (decode).
    """
    experts, rows, columns = rhs.shape
    most = max(1, DEQUANTISED_BYTES // (rows * columns * lhs.dtype.itemsize)) if lhs.shape[0] > experts else 1
    chunk = max(n for n in range(1, min(experts, most) + 1) if experts % n == 0)
    starts = jnp.cumsum(sizes) - sizes

    def some(i: Array, out: Array) -> Array:
        def part(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, i * chunk, chunk)

        own, start = part(sizes), starts[i * chunk]

        def product(out: Array) -> Array:
            matrices = PackedExperts(part(rhs.values), part(rhs.scales), rhs.block).dequantise(lhs.dtype)
            return out + jnp.roll(grouped_matmul(jnp.roll(lhs, -start, axis=0), matrices, own), start, axis=0)

        return jax.lax.cond(jnp.any(own > 0), product, lambda out: out, out)

    out = jnp.broadcast_to(jnp.zeros_like(lhs[:, :1]), (lhs.shape[0], columns))
    return jax.lax.fori_loop(0, experts // chunk, some, out)


def has_packed(params: Any) -> bool:
    """Whether a parameter tree contains packed matrices."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, PackedExperts))
    return any(isinstance(leaf, PackedExperts) for leaf in leaves)
