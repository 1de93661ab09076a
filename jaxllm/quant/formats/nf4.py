"""NF4: 4-bit NormalFloat with double-quantised scales, the format of QLoRA's frozen base (arXiv:2305.14314).

A value is one of 16 levels, which are equally likely under a normal distribution, times the largest magnitude of its
block of 64 along the axis. These scales are quantised again: e4m3 values of blocks of 256 scales, which lie along the
last dimension, times a float32 scale, plus the block's mean (so that they are centred). A block of scales is stored as
its bytes, followed by those of its scale and its mean. A parameter takes 4 + 8 / 64 + 64 / (64 * 256) = 4.129 bits.

Two values share a byte: of neighbours along the axis, the first is in the low nibble.

Legend: n size of the last dimension, c scales in a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from jaxllm.quant.formats.mxfp4 import joined_inputs, nibble_terms
from pallas_kernels.packed_matmul import PackedCodes
from pallas_kernels.packed_matmul.scales import block_values
from sharding import LogicalAxes

LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Levels of NF4 (appendix E of the paper)."""
CODES = PackedCodes(4, LEVELS)
BLOCK = 64
"""Values that share a scale."""
SCALES = 256
"""Scales that share a scale and a mean, at most: the largest power of two that divides the last dimension."""


@dataclass(frozen=True)
class NF4:
    """NF4 along one axis, which is not the last.

    Attributes:
        axis: dimension that values share scales along, counted from the end.
        scales: scales in a block; None for ``block_of_scales`` of the last dimension of what is packed.
    """

    axis: int = -2
    scales: int | None = None

    def __str__(self) -> str:
        return "nf4"

    def shape(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the dense weight."""
        axis = self.axis % len(values)
        return (*values[:axis], 2 * values[axis], *values[axis + 1 :])

    def pack(self, weight: Float[Array, "..."]) -> tuple[UInt8[Array, "..."], UInt8[Array, "..."]]:
        """Values and scales; a value is rounded to the nearest level, and to the lower one in the middle of two.

        Raises:
            ValueError: the axis is no multiple of 64, or the last dimension none of ``scales``.
        """
        count = block_of_scales(weight.shape[-1]) if self.scales is None else self.scales
        if weight.shape[-1] % count:
            raise ValueError(f"nf4: {count} scales share a scale, but {weight.shape[-1]} is no multiple of {count}.")
        axis = self.axis % weight.ndim
        if weight.shape[axis] % BLOCK:
            raise ValueError(f"nf4: {BLOCK} values share a scale, but {weight.shape[axis]} is no multiple of {BLOCK}.")
        x = weight.astype(jnp.float32)
        blocks = x.reshape(*x.shape[:axis], -1, BLOCK, *x.shape[axis + 1 :])
        scales = jnp.max(jnp.abs(blocks), axis=axis + 1)
        units = blocks / jnp.expand_dims(jnp.where(scales > 0, scales, 1), axis + 1)
        levels = jnp.asarray(LEVELS, jnp.float32)
        codes = jnp.searchsorted((levels[1:] + levels[:-1]) / 2, units, side="left").astype(jnp.uint8)
        pairs = codes.reshape(*x.shape[:axis], -1, 2, *x.shape[axis + 1 :])
        first, second = (jax.lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in range(2))
        return first | (second << 4), _packed_scales(scales, count)

    def unpack(self, values: UInt8[Array, "..."], scales: UInt8[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
        """Dense weight: level times scale in float32, or in ``dtype`` where that is wider, rounded to ``dtype``."""
        axis = self.axis % values.ndim
        codes = jnp.stack([values & 15, values >> 4], axis=axis + 1).reshape(self.shape(values.shape))
        wide = jnp.promote_types(jnp.float32, dtype)
        found = jnp.repeat(block_values(scales, values.shape[-1], wide), BLOCK, axis=axis)
        return (jnp.asarray(LEVELS, wide)[codes] * found).astype(dtype)

    def terms(
        self, x: Float[Array, "... I"], values: UInt8[Array, "..."], scales: UInt8[Array, "..."]
    ) -> list[tuple[Float[Array, "..."], Float[Array, "..."]]]:
        """The matmul as a sum over both nibbles, whose weights XLA unpacks within it."""
        wide = jnp.promote_types(jnp.float32, x.dtype)
        return nibble_terms(x, values, block_values(scales, values.shape[-1], wide), CODES, self.axis)

    def kernel_terms(
        self, x: Float[Array, "... I"], values: UInt8[Array, "..."], scales: UInt8[Array, "..."]
    ) -> tuple[Array, Array, PackedCodes, list[tuple[Array, Array]]]:
        """Operands of ``packed_matmul``, which decodes the scales."""
        return *joined_inputs(values, scales, self.axis), CODES, []

    def scale_axes(self, axes: LogicalAxes) -> LogicalAxes:
        """Logical axes of the scales: those of the weight."""
        return axes


def block_of_scales(size: int, devices: int = 1) -> int:
    """Scales in a block: the largest power of two up to 256 that divides each of ``devices`` shards of ``size``."""
    shard = size // devices if size % devices == 0 else size
    return next(count for count in (2**i for i in range(SCALES.bit_length() - 1, -1, -1)) if shard % count == 0)


def _packed_scales(scales: Float[Array, "*lead n"], count: int) -> UInt8[Array, "*lead m"]:
    """Double-quantised scales: of each block, e4m3 values, then the bytes of its scale and its mean."""
    size = scales.shape[-1]
    blocks = scales.reshape(*scales.shape[:-1], size // count, count)
    mean = jnp.mean(blocks, axis=-1, keepdims=True)
    largest = jnp.max(jnp.abs(blocks - mean), axis=-1, keepdims=True)
    unit = jnp.where(largest > 0, largest, 1) * (1 / float(jnp.finfo(jnp.float8_e4m3fn).max))
    rounded = ((blocks - mean) / unit).astype(jnp.float8_e4m3fn)
    parts = (rounded[..., None, :], unit, mean)
    in_bytes = [jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(*mean.shape[:-1], -1) for x in parts]
    return jnp.concatenate(in_bytes, axis=-1).reshape(*scales.shape[:-1], -1)
