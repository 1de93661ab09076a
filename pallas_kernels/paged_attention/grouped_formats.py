"""KV cache formats of four bits with scales for groups of channels.

The bytes of a slot are its values' alone, half a byte each, so that a head dim of 128 fills the 128 lanes of a TPU's
memory. Scales are words of 4 bytes, see ``Slots.scales``. A group is of at most 32 consecutive channels, a block of 16.

Legend: N values of a part, E bytes of a part, G groups of a part, Z words of a slot.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped, UInt8

from pallas_kernels.paged_attention.kv_formats import KV_FORMATS, SCALE, KVFormat
from pallas_kernels.paged_attention.slot_layout import Factors, SlotLayout, groups_of_parts, half_floats, runs_of_parts

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


def bits_at(packed: Shaped[Array, "*any"], place: int, bits: int) -> Shaped[Array, "*any"]:
    """Numbers of a few bits from bit ``place`` of integers on, in their dtype."""
    return (packed >> place) & (2**bits - 1)


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


def pair_words(scale: Float[Array, "*any"], least: Float[Array, "*any"]) -> Int[Array, "*any"]:
    """Words of a scale and a minimum, float16 both."""
    return jax.lax.bitcast_convert_type(jnp.stack([scale, least], axis=-1), jnp.int32)


class AffineNumbers:
    """Decoder of levels that are multiplied by a scale, to which a minimum is added: words of ``pair_words``."""

    bits: int

    def numbers(self, elements: Shaped[Array, "*any"], place: int, dtype: DTypeLike) -> Float[Array, "*any"]:
        """Levels."""
        return bits_at(elements, place, self.bits).astype(dtype)

    def factors(self, words: Int[Array, "*any"], place: Any, dtype: DTypeLike) -> Factors:
        """(scale, minimum)."""
        return half_floats(words).astype(dtype), half_floats(words >> 16).astype(dtype)

    def values(self, numbers: Array, factors: Factors) -> Array:
        """Levels times the scale, and the minimum."""
        return numbers * factors[0] + factors[1]


class GroupedFormat(KVFormat):
    """KV cache format of four bits with scales for groups of consecutive values.

    Attributes:
        most: most values of a group; their number is that or its greatest common divisor with those of a part.
        per_word: scales in a word.
    """

    values_per_element = 2
    quantised = True
    scale_dtype = jnp.dtype(jnp.int32)
    most: int
    per_word: int

    def stored(self, dtype: DTypeLike) -> np.dtype:
        """Dtype of stored elements: bytes."""
        return jnp.dtype(jnp.uint8)

    def width(self, parts: tuple[int, ...], stored_width: int) -> int:
        """Values of a slot."""
        return sum(parts)

    def layout(self, parts: tuple[int, ...]) -> SlotLayout:
        """Two runs for each part, of the lower and of the upper halves of its bytes."""
        sizes = tuple((size, math.gcd(size, self.most)) for size in parts)
        return SlotLayout(runs_of_parts(parts, 4), groups_of_parts(sizes, self.per_word), self.per_word)

    def encode(
        self, rows: Float[Array, "*any N"], parts: tuple[int, ...], dtype: DTypeLike
    ) -> tuple[UInt8[Array, "*any E"], Int[Array, "*any Z"]]:
        """(bytes, words of scales)."""
        found = []
        for x in jnp.split(rows, np.cumsum(parts)[:-1], axis=-1):
            levels, words = self.encode_groups(x.reshape(*x.shape[:-1], -1, math.gcd(x.shape[-1], self.most)))
            found.append((pack_bits(levels.reshape(x.shape), 4), words))
        data, words = zip(*found, strict=True)
        return jnp.concatenate(data, axis=-1), jnp.concatenate(words, axis=-1)

    def encode_groups(self, x: Float[Array, "*any G N"]) -> tuple[Shaped[Array, "*any G N"], Int[Array, "*any Z"]]:
        """(numbers of four bits, words) of the groups of a part."""
        raise NotImplementedError


class Int4Format(AffineNumbers, GroupedFormat):
    """``int4``: 16 levels from the least to the largest of a group of up to 32 channels: 5 bits a value."""

    bits, most, per_word = 4, GROUP, 1

    def encode_groups(self, x: Float[Array, "*any G N"]) -> tuple[UInt8[Array, "*any G N"], Int[Array, "*any G"]]:
        """(levels, scales and minima) of the groups of a part."""
        levels, scale, least = affine_levels(x, -1, 4)
        return levels, pair_words(scale[..., 0], least[..., 0])


class BlockFloatFormat(GroupedFormat):
    """``bfp4``: block floating point: four-bit mantissas and one exponent for up to 16 channels: 4.5 bits a value.

    A word has four exponents of a part. A block loses its small values to its largest one. The engine therefore
    reorders the channels of keys and values at load, so that large ones share blocks (arXiv:2403.20137), see
    ``jaxllm.models.channel_order``.
    """

    most, per_word = BLOCK, 4
    orders_channels = True

    def encode_groups(self, x: Float[Array, "*any G N"]) -> tuple[Int[Array, "*any G N"], Int[Array, "*any Z"]]:
        """(mantissas, exponents) of the blocks of a part."""
        x = x.astype(jnp.promote_types(x.dtype, SCALE))
        most = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
        # The largest magnitude is below 8 steps; of mantissas, 7 is the largest.
        exponent = jnp.clip(jnp.frexp(most)[1] - 3, -126, 127)
        mantissas = jnp.clip(jnp.round(jnp.ldexp(x, -exponent)), -7, 7)
        mantissas = jnp.where(jnp.isfinite(mantissas), mantissas, 0).astype(jnp.int32) & 15
        held = (exponent[..., 0] & 255).astype(jnp.uint8)
        held = jnp.pad(held, (*[(0, 0)] * (held.ndim - 1), (0, -held.shape[-1] % self.per_word)))
        return mantissas, jax.lax.bitcast_convert_type(held.reshape(*held.shape[:-1], -1, self.per_word), jnp.int32)

    def numbers(self, elements: Shaped[Array, "*any"], place: int, dtype: DTypeLike) -> Float[Array, "*any"]:
        """Mantissas."""
        found = bits_at(elements, place, 4).astype(jnp.int32)
        return jnp.where(found > 7, found - 16, found).astype(dtype)

    def factors(self, words: Int[Array, "*any"], place: Any, dtype: DTypeLike) -> Factors:
        """The power of two of the exponent, of which the bits of a float32 are made."""
        exponent = (words >> (8 * place)) & 255
        exponent = jnp.where(exponent > 127, exponent - 256, exponent)
        return (jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32).astype(dtype),)

    def values(self, numbers: Array, factors: Factors) -> Array:
        """Mantissas times the power of two."""
        return numbers * factors[0]


KV_FORMATS["int4"] = Int4Format()
KV_FORMATS["bfp4"] = BlockFloatFormat()
