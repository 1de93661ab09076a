"""KV cache formats of four bits with scales for groups of channels, which are stored in the slot itself.

Packed bytes of a part (a key, or a value) are followed by the scales of its groups, so that a slot is one row of bytes
and needs no second array. A group is of at most 32 consecutive channels, a block of 16.

Legend: N values of a part, E bytes of a part, G groups of a part.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped, UInt8

from pallas_kernels.paged_attention.kv_formats import KV_FORMATS, SCALE, KVFormat, Scales

GROUP = 32
"""Most channels of a group of ``int4``, and of the values in ``kivi4`` and ``kivi2``."""
BLOCK = 16
"""Most channels of a block of ``bfp4``."""
LARGEST = float(np.finfo(np.float16).max)


def pack_bits(levels: Shaped[Array, "*any N"], bits: int) -> UInt8[Array, "*any E"]:
    """Packs numbers of a few bits into bytes; consecutive runs of the numbers share bytes, so that none is interleaved.

    The number of values must be a multiple of ``8 / bits``.
    """
    runs = jnp.split(levels.astype(jnp.uint8), 8 // bits, axis=-1)
    packed = runs[0]
    for place, run in enumerate(runs[1:], 1):
        packed = packed | (run << (bits * place))
    return packed


def unpack_bits(packed: UInt8[Array, "*any E"], bits: int) -> UInt8[Array, "*any N"]:
    """Numbers that ``pack_bits`` has packed."""
    runs = [(packed >> (bits * place)) & (2**bits - 1) for place in range(8 // bits)]
    return jnp.concatenate(runs, axis=-1)


def affine_levels(
    x: Float[Array, "*any"], axis: int, bits: int
) -> tuple[UInt8[Array, "*any"], Float[Array, "..."], Float[Array, "..."]]:
    """(levels, scales, minima) of values along an axis, which is 1 in the latter, float16.

    A value is its level times the scale, plus the minimum.

    The scale is of the stored minimum, so that its rounding costs half a unit of the last place and no more. Values
    beyond the range of float16 are clipped; one that is not finite makes its minimum or scale not finite.
    """
    x = x.astype(jnp.promote_types(x.dtype, SCALE))
    least = _as_float16(jnp.min(x, axis, keepdims=True))
    scale = _as_float16((jnp.max(x, axis, keepdims=True) - least.astype(x.dtype)) / (2**bits - 1))
    safe = jnp.where(scale == 0, 1, scale).astype(x.dtype)
    levels = jnp.clip(jnp.round((x - least.astype(x.dtype)) / safe), 0, 2**bits - 1)
    return jnp.where(jnp.isfinite(levels), levels, 0).astype(jnp.uint8), scale, least


def _as_float16(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -LARGEST, LARGEST), x).astype(jnp.float16)


class GroupedFormat(KVFormat):
    """KV cache format of four bits whose scales are in the slot, behind the numbers of their part."""

    values_per_element = 2
    quantised = True

    def stored(self, dtype: DTypeLike) -> np.dtype:
        """Dtype of stored elements: bytes."""
        return jnp.dtype(jnp.uint8)

    def elements(self, parts: tuple[int, ...]) -> int:
        """Bytes of a slot."""
        return sum(map(self.part_bytes, parts))

    def width(self, parts: tuple[int, ...], stored_width: int) -> int:
        """Values of a slot."""
        return sum(parts)

    def encode(
        self, rows: Float[Array, "*any N"], parts: tuple[int, ...], dtype: DTypeLike
    ) -> tuple[UInt8[Array, "*any E"], None]:
        """(bytes, no scales)."""
        found = jnp.split(rows, np.cumsum(parts)[:-1], axis=-1)
        return jnp.concatenate([self.encode_part(part) for part in found], axis=-1), None

    def unpack(
        self, data: UInt8[Array, "*any E"], scales: Scales, parts: tuple[int, ...], dtype: DTypeLike
    ) -> Float[Array, "*any N"]:
        """Values of slots, in ``dtype``; bytes behind the last part are padding."""
        starts = np.cumsum([0, *map(self.part_bytes, parts)])
        found = [
            self.decode_part(data[..., start:stop], size, dtype)
            for size, start, stop in zip(parts, starts[:-1], starts[1:], strict=True)
        ]
        return jnp.concatenate(found, axis=-1)

    def part_bytes(self, size: int) -> int:
        """Bytes of a part of so many values."""
        raise NotImplementedError

    def encode_part(self, x: Float[Array, "*any N"]) -> UInt8[Array, "*any E"]:
        """Bytes of a part."""
        raise NotImplementedError

    def decode_part(self, data: UInt8[Array, "*any E"], size: int, dtype: DTypeLike) -> Float[Array, "*any N"]:
        """Values of a part."""
        raise NotImplementedError


class Int4Format(GroupedFormat):
    """``int4``: 16 levels from the least to the largest of a group of up to 32 channels: 5 bits a value."""

    def part_bytes(self, size: int) -> int:
        """Bytes of a part: half a byte for a value, 4 for the scale and the minimum of a group."""
        return size // 2 + 4 * (size // math.gcd(size, GROUP))

    def encode_part(self, x: Float[Array, "*any N"]) -> UInt8[Array, "*any E"]:
        """Bytes of a part."""
        group = math.gcd(x.shape[-1], GROUP)
        levels, scale, least = affine_levels(x.reshape(*x.shape[:-1], -1, group), -1, 4)
        pairs = jnp.concatenate([scale, least], axis=-1)  # *any G 2
        held = jax.lax.bitcast_convert_type(pairs, jnp.uint8)
        return jnp.concatenate([pack_bits(levels.reshape(x.shape), 4), held.reshape(*x.shape[:-1], -1)], axis=-1)

    def decode_part(self, data: UInt8[Array, "*any E"], size: int, dtype: DTypeLike) -> Float[Array, "*any N"]:
        """Values of a part."""
        shape, groups = data.shape[:-1], size // math.gcd(size, GROUP)
        pairs = jax.lax.bitcast_convert_type(data[..., size // 2 :].reshape(*shape, groups, 2, 2), jnp.float16)
        pairs = pairs.astype(dtype)
        levels = unpack_bits(data[..., : size // 2], 4).reshape(*shape, groups, -1).astype(dtype)
        return (levels * pairs[..., :1] + pairs[..., 1:]).reshape(*shape, size)


class BlockFloatFormat(GroupedFormat):
    """``bfp4``: block floating point: four-bit mantissas and one exponent for up to 16 channels: 4.5 bits a value.

    A block loses its small values to its largest one. The engine therefore reorders the channels of keys and values at
    load, so that large ones share blocks (arXiv:2403.20137), see ``jaxllm.models.channel_order``.
    """

    orders_channels = True

    def part_bytes(self, size: int) -> int:
        """Bytes of a part: half a byte for a value, one for the exponent of a block."""
        return size // 2 + size // math.gcd(size, BLOCK)

    def encode_part(self, x: Float[Array, "*any N"]) -> UInt8[Array, "*any E"]:
        """Bytes of a part."""
        x = x.astype(jnp.promote_types(x.dtype, SCALE))
        blocks = x.reshape(*x.shape[:-1], -1, math.gcd(x.shape[-1], BLOCK))
        most = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
        # The largest magnitude is below 8 steps; of mantissas, 7 is the largest.
        exponent = jnp.clip(jnp.frexp(most)[1] - 3, -126, 127)
        mantissas = jnp.clip(jnp.round(jnp.ldexp(blocks, -exponent)), -7, 7)
        mantissas = jnp.where(jnp.isfinite(mantissas), mantissas, 0).astype(jnp.int32) & 15
        packed = pack_bits(mantissas.reshape(x.shape), 4)
        return jnp.concatenate([packed, (exponent[..., 0] & 255).astype(jnp.uint8)], axis=-1)

    def decode_part(self, data: UInt8[Array, "*any E"], size: int, dtype: DTypeLike) -> Float[Array, "*any N"]:
        """Values of a part."""
        shape, blocks = data.shape[:-1], size // math.gcd(size, BLOCK)
        exponent = jax.lax.bitcast_convert_type(data[..., size // 2 : size // 2 + blocks], jnp.int8).astype(jnp.int32)
        mantissas = unpack_bits(data[..., : size // 2], 4).astype(jnp.int32)
        mantissas = (mantissas - 16 * (mantissas > 7)).reshape(*shape, blocks, -1)
        return jnp.ldexp(mantissas.astype(dtype), exponent[..., None]).reshape(*shape, size)


KV_FORMATS["int4"] = Int4Format()
KV_FORMATS["bfp4"] = BlockFloatFormat()
