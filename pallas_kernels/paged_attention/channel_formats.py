"""KIVI: KV cache formats with keys per channel and values per token, in four or two bits (arXiv:2402.02750).

Channels of keys have outliers that are large at every token, so a key channel has a scale and a minimum of its own for
the tokens of a page; a value has them for groups of its channels. A page is encoded as a whole, once it is behind the
latest tokens, which are in full precision (``residual_window``).

Legend: C slots of a page, W values of a slot, E bytes of a slot, H head dim of keys, V of values.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.paged_attention.grouped_formats import GROUP, AffineNumbers, affine_levels, pack_bits, pair_words
from pallas_kernels.paged_attention.kv_formats import KV_FORMATS, KVFormat
from pallas_kernels.paged_attention.slot_layout import ScaleGroups, SlotLayout, ValueRun, runs_of_parts

RESIDUAL = 128
"""Latest tokens of a sequence in full precision, as in the paper."""


class KiviFormat(AffineNumbers, KVFormat):
    """``kivi4`` and ``kivi2``: keys per channel of a page, values per token.

    Args:
        bits: bits of a number.
        residual: see ``KVFormat``.
        swapped: keys per token and values per channel instead, to show what the axes are worth; never served.
    """

    quantised = True
    scale_dtype = jnp.dtype(jnp.int32)

    def __init__(self, bits: int, residual: int = RESIDUAL, swapped: bool = False):
        self.bits, self.residual, self.swapped = bits, residual, swapped
        self.values_per_element = 8 // bits

    def stored(self, dtype: DTypeLike) -> np.dtype:
        """Dtype of stored elements: bytes."""
        return jnp.dtype(jnp.uint8)

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

    def layout(self, parts: tuple[int, ...]) -> SlotLayout:
        """Runs of bits of the part that is encoded per channel, then those of the other, in groups."""
        (across, along), key = self._split(parts), parts[0]
        runs, first = runs_of_parts((across, along), self.bits), 0
        if self.swapped:  # the bytes of the values are in front of those of the keys
            runs = (ValueRun(r.start - across if r.start >= across else key + r.start, *r[1:]) for r in runs)
            first = key
        group = math.gcd(along, GROUP)
        groups = ScaleGroups(0 if self.swapped else across, group, along // group, 0)
        return SlotLayout(tuple(sorted(runs)), (groups,), channels=(first, across))

    def encode_page(
        self, page: Float[Array, "*any C W"], parts: tuple[int, ...], at: object = None, turn: object = None
    ) -> dict[str, Array]:
        """Arrays of whole pages by their names in ``Slots``.

        They are data UInt8[Array, "*any C E"], scales Int[Array, "*any Z C"] with those of the groups of each token,
        and channels Int[Array, "*any 1 H"]. Neither positions nor a rotation matter.
        """
        key, value = jnp.split(page, [parts[0]], axis=-1)
        across, along = (value, key) if self.swapped else (key, value)
        levels, scale, least = affine_levels(across, -2, self.bits)
        packed, words = pack_bits(levels, self.bits), pair_words(scale, least)
        grouped = along.reshape(*along.shape[:-1], -1, math.gcd(along.shape[-1], GROUP))
        levels, scale, least = affine_levels(grouped, -1, self.bits)
        return {
            "data": jnp.concatenate([packed, pack_bits(levels.reshape(along.shape), self.bits)], axis=-1),
            "scales": jnp.swapaxes(pair_words(scale, least)[..., 0], -1, -2),
            "channels": words,
        }

    def encode(self, rows: Array, parts: tuple[int, ...], dtype: DTypeLike) -> tuple[Array, None]:
        """Not possible: a token alone has no channels to encode along; see ``encode_page``.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("KIVI encodes whole pages: see encode_page and residual_window.")


KV_FORMATS["kivi4"] = KiviFormat(4)
KV_FORMATS["kivi2"] = KiviFormat(2)
