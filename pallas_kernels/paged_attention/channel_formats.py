"""KIVI: KV cache formats with keys per channel and values per token, in four or two bits (arXiv:2402.02750).

Channels of keys have outliers that are large at every token, so a key channel has a scale and a minimum of its own for
the tokens of a page; a value has them for groups of its channels. A page is encoded as a whole, once it is behind the
latest tokens, which are in full precision (``residual_window``).

Legend: C slots of a page, W values of a slot, E bytes of a slot, H head dim of keys, V of values, G groups of a value.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.paged_attention.grouped_formats import GROUP, affine_levels, pack_bits, unpack_bits
from pallas_kernels.paged_attention.kv_formats import KV_FORMATS, KVFormat, Scales

RESIDUAL = 128
"""Latest tokens of a sequence in full precision, as in the paper."""


class KiviFormat(KVFormat):
    """``kivi4`` and ``kivi2``: keys per channel of a page, values per token.

    Args:
        bits: bits of a number.
        residual: see ``KVFormat``.
        swapped: keys per token and values per channel instead, to show what the axes are worth; never served.
    """

    quantised = True

    def __init__(self, bits: int, residual: int = RESIDUAL, swapped: bool = False):
        self.bits, self.residual, self.swapped = bits, residual, swapped
        self.values_per_element = 8 // bits

    def stored(self, dtype: DTypeLike) -> np.dtype:
        """Dtype of stored elements: bytes."""
        return jnp.dtype(jnp.uint8)

    def elements(self, parts: tuple[int, ...]) -> int:
        """Bytes of a slot: its numbers, and 4 for the scale and the minimum of each group of the value."""
        per_token = self._split(parts)[1]
        return sum(parts) * self.bits // 8 + 4 * (per_token // math.gcd(per_token, GROUP))

    def width(self, parts: tuple[int, ...], stored_width: int) -> int:
        """Values of a slot."""
        return sum(parts)

    def channels(self, parts: tuple[int, ...]) -> int:
        """Channels that have a scale and a minimum for a page, of 4 bytes together."""
        return self._split(parts)[0]

    def _split(self, parts: tuple[int, ...]) -> tuple[int, int]:
        """Sizes of the part that is encoded per channel, and of that per token."""
        key, value = parts
        return (value, key) if self.swapped else (key, value)

    def encode_page(
        self, rows: Float[Array, "*any C W"], parts: tuple[int, ...]
    ) -> tuple[UInt8[Array, "*any C E"], Int[Array, "*any 1 H"]]:
        """(bytes of the slots, scales and minima of the channels) of whole pages."""
        key, value = jnp.split(rows, [parts[0]], axis=-1)
        across, along = (value, key) if self.swapped else (key, value)
        levels, scale, least = affine_levels(across, -2, self.bits)
        packed = [pack_bits(levels, self.bits)]
        group = math.gcd(along.shape[-1], GROUP)
        levels, scales, minima = affine_levels(along.reshape(*along.shape[:-1], -1, group), -1, self.bits)
        packed.append(pack_bits(levels.reshape(along.shape), self.bits))
        pairs = jax.lax.bitcast_convert_type(jnp.concatenate([scales, minima], axis=-1), jnp.uint8)
        packed.append(pairs.reshape(*along.shape[:-1], -1))
        words = jax.lax.bitcast_convert_type(jnp.stack([scale, least], axis=-1), jnp.int32)
        return jnp.concatenate(packed, axis=-1), words

    def decode_page(
        self, data: UInt8[Array, "*any C E"], channels: Int[Array, "*any 1 H"], parts: tuple[int, ...], dtype: DTypeLike
    ) -> Float[Array, "*any C W"]:
        """Values of slots of a page, all of them or some, in ``dtype``."""
        size, other = self._split(parts)
        first, second = size * self.bits // 8, (size + other) * self.bits // 8
        pairs = jax.lax.bitcast_convert_type(channels, jnp.float16).astype(dtype)
        across = unpack_bits(data[..., :first], self.bits).astype(dtype) * pairs[..., 0] + pairs[..., 1]
        shape, groups = data.shape[:-1], other // math.gcd(other, GROUP)
        pairs = data[..., second : second + 4 * groups].reshape(*shape, groups, 2, 2)
        pairs = jax.lax.bitcast_convert_type(pairs, jnp.float16).astype(dtype)
        levels = unpack_bits(data[..., first:second], self.bits).reshape(*shape, groups, -1).astype(dtype)
        along = (levels * pairs[..., :1] + pairs[..., 1:]).reshape(*shape, other)
        return jnp.concatenate([along, across] if self.swapped else [across, along], axis=-1)

    def encode(self, rows: Array, parts: tuple[int, ...], dtype: DTypeLike) -> tuple[Array, None]:
        """Not possible: a token alone has no channels to encode along; see ``encode_page``.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("KIVI encodes whole pages: see encode_page and residual_window.")

    def decode(self, tile: Array, scales: Scales, first: object, dtype: DTypeLike) -> Array:
        """Not possible without the channels' scales; see ``decode_page``.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("KIVI decodes with the scales of a page's channels: see decode_page.")


KV_FORMATS["kivi4"] = KiviFormat(4)
KV_FORMATS["kivi2"] = KiviFormat(2)
