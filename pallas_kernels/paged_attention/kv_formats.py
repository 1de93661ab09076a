"""KV cache formats: how the elements of a slot are stored in a page, in one open table of encoders and decoders.

A format packs the values of a token's key, or of its value, into stored elements, with as many scales as it says. A
new format is one class and one row of ``KV_FORMATS``: with ``encode`` and ``decode`` plain JAX reads it, and with a
``layout`` of its slots the Pallas kernels do too. A token's stored bits depend on that token alone, so they are the
same whichever chunk, page or neighbours it comes with.

Legend: N values that share scales, M stored elements, Z scales, C slots of a tile, W values of a slot, H channels.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.paged_attention.slot_layout import Factors, SlotLayout, ValueRun, groups_of_parts, unpack_slots

SCALE = jnp.dtype(jnp.float32)
"""Dtype of the scales, where a format has one in each word."""
Scales = Any
"""Scales of a tile of slots: Shaped[Array, "*any Z C"], or None."""


class KVFormat:
    """Plain KV cache format: elements in the dtype of the pool; the base class of all others.

    Attributes:
        scales: scales of a key and of a value each, 0 for none.
        values_per_element: values that one stored element holds; it divides the head dims.
        quantised: values that are read differ from those that were written.
        residual: the latest tokens of a sequence that are kept in full precision, in an array of their own; a page is
            encoded as a whole once it is behind them, see ``residual_window``. 0: each token is encoded by itself.
        orders_channels: the engine reorders the channels of keys and values in the weights, by size.
        chunk: tokens of a chunk, of which a query reads those that it chooses, see ``chosen_chunks``; 0: it reads all.
        on_host: the elements of slots are in host memory; attention fetches what it needs of them.
        page_size: positions of a page that the commands choose for this format; None: as for any.
        scale_dtype: dtype of the words of scales, of 4 bytes.
    """

    scales: int = 0
    values_per_element: int = 1
    quantised: bool = False
    residual: int = 0
    orders_channels: bool = False
    chunk: int = 0
    on_host: bool = False
    page_size: int | None = None
    scale_dtype: np.dtype = SCALE

    def scale_rows(self, parts: tuple[int, ...]) -> int:
        """Words of scales of a slot (Z); ``parts`` as in ``encode``."""
        found = self.layout(parts)
        return len(parts) * self.scales if found is None else found.words

    def layout(self, parts: tuple[int, ...]) -> SlotLayout | None:
        """Layout of a slot, by which kernels decode it; the format is a ``SlotDecoder`` then. None: see ``decode``."""
        del parts
        return None

    def elements(self, parts: tuple[int, ...]) -> int:
        """Stored elements of a slot, without padding; ``parts`` as in ``encode``."""
        return sum(parts) // self.values_per_element

    def width(self, parts: tuple[int, ...], stored_width: int) -> int:
        """Values that ``unpack`` gives of a slot of so many stored elements."""
        return stored_width * self.values_per_element

    def stored(self, dtype: DTypeLike) -> np.dtype:
        """Dtype of stored elements in a pool for values of ``dtype``."""
        return jnp.dtype(dtype)

    def encode(
        self, rows: Float[Array, "*any N"], parts: tuple[int, ...], dtype: DTypeLike
    ) -> tuple[Shaped[Array, "*any M"], Float[Array, "*any Z"] | None]:
        """(stored elements, scales) of slots.

        Args:
            rows: values of the slots.
            parts: numbers of consecutive values that share scales: those of the key, and those of the value.
            dtype: dtype of the values that the pool is for.
        """
        del parts
        return rows.astype(self.stored(dtype)), None

    def decode(
        self, tile: Shaped[Array, "*any C M"], scales: Scales, first: int, dtype: DTypeLike
    ) -> Float[Array, "*any C W"]:
        """Values of a tile of slots, in ``dtype``, for a format without a layout.

        Args:
            tile: stored elements of the slots.
            scales: scales of the first ``first`` values of each slot, followed by those of the rest, if there are any.
            first: number of values that the first scales are of.
            dtype: dtype of the result.
        """
        del scales, first
        return tile.astype(dtype)

    def unpack(
        self,
        data: Shaped[Array, "*any C M"],
        scales: Scales,
        parts: tuple[int, ...],
        dtype: DTypeLike,
        channels: Int[Array, "*any 1 H"] | None = None,
    ) -> Float[Array, "*any C W"]:
        """Values of slots, in ``dtype``; ``channels``: words of their page, where it has some."""
        if (layout := self.layout(parts)) is None:
            return self.decode(data, scales, parts[0], dtype)
        return unpack_slots(self, layout, data, scales, channels, dtype)  # pyright: ignore[reportArgumentType]


class BitsFormat(KVFormat):
    """KV cache format whose elements are the bits of a narrow dtype, stored as integers.

    Compilers move integers unchanged. With narrow floats they may not: XLA on CPU scatters bfloat16, and reads pages
    of it, through a float32 copy of the pool.

    Args:
        kind: dtype that the bits represent.
        stored: integer dtype of the pool.
    """

    def __init__(self, kind: DTypeLike, stored: DTypeLike):
        self.kind, self.integer = jnp.dtype(kind), jnp.dtype(stored)

    def stored(self, dtype: DTypeLike) -> np.dtype:
        """Dtype of stored elements: the integer."""
        return self.integer

    def encode(
        self, rows: Float[Array, "*any N"], parts: tuple[int, ...], dtype: DTypeLike
    ) -> tuple[Int[Array, "*any N"], Float[Array, "*any Z"] | None]:
        """(bits, no scales)."""
        return jax.lax.bitcast_convert_type(rows.astype(self.kind), self.integer), None

    def decode(
        self, tile: Int[Array, "*any C M"], scales: Scales, first: int, dtype: DTypeLike
    ) -> Float[Array, "*any C M"]:
        """Values of a tile of slots, in ``dtype``."""
        return jax.lax.bitcast_convert_type(tile, self.kind).astype(dtype)


class ScaledFormat(KVFormat):
    """KV cache format of quantised elements with one scale per key and one per value.

    A scale is the largest magnitude divided by the largest value of the elements' dtype.

    Args:
        kind, stored: see ``BitsFormat``.
        most: largest magnitude of ``kind``.
    """

    scales = 1
    quantised = True

    def __init__(self, kind: DTypeLike, stored: DTypeLike, most: float):
        self.kind, self.integer, self.most = jnp.dtype(kind), jnp.dtype(stored), most

    def stored(self, dtype: DTypeLike) -> np.dtype:
        """Dtype of stored elements: the integer."""
        return self.integer

    def encode(
        self, rows: Float[Array, "*any N"], parts: tuple[int, ...], dtype: DTypeLike
    ) -> tuple[Int[Array, "*any N"], Float[Array, "*any Z"]]:
        """(bits, scales), computed in at least float32.

        Zeros have scale 0; a value that is not finite makes its scale not finite.
        """
        found = [self._quantise(part) for part in jnp.split(rows, np.cumsum(parts)[:-1], axis=-1)]
        numbers = jnp.concatenate([part for part, _ in found], axis=-1)
        bits = jax.lax.bitcast_convert_type(numbers.astype(self.kind), self.integer)
        return bits, jnp.stack([scale for _, scale in found], axis=-1)

    def _quantise(self, x: Float[Array, "*any N"]) -> tuple[Float[Array, "*any N"], Float[Array, "*any"]]:
        """(quantised values before the cast, scale)."""
        x = x.astype(jnp.promote_types(x.dtype, SCALE))
        scale = (jnp.max(jnp.abs(x), axis=-1) / self.most).astype(SCALE)
        numbers = x / jnp.where(scale == 0.0, 1.0, scale)[..., None].astype(x.dtype)
        if jnp.issubdtype(self.kind, jnp.integer):
            numbers = jnp.round(numbers)
        # Where the scale was rounded down, the largest magnitude is slightly above the format's maximum.
        return jnp.clip(numbers, -self.most, self.most), scale

    def layout(self, parts: tuple[int, ...]) -> SlotLayout:
        """A byte for each value, in their order; one scale for each part."""
        return SlotLayout((ValueRun(0, sum(parts), 0),), groups_of_parts(tuple((size, size) for size in parts)))

    def width(self, parts: tuple[int, ...], stored_width: int) -> int:
        """Values of a slot."""
        return sum(parts)

    def numbers(self, elements: Shaped[Array, "*any"], place: int, dtype: DTypeLike) -> Float[Array, "*any"]:
        """Numbers before scaling."""
        return jax.lax.bitcast_convert_type(elements, self.kind).astype(dtype)

    def factors(self, words: Float[Array, "*any"], place: Any, dtype: DTypeLike) -> Factors:
        """The scale."""
        return (words.astype(dtype),)

    def values(self, numbers: Array, factors: Factors) -> Array:
        """Numbers times their scale."""
        return numbers * factors[0]


def scaled(values: Float[Array, "*any C W"], scales: Float[Array, "*any Z C"], first: int) -> Float[Array, "*any C W"]:
    """Values of slots times the first scale, or from value ``first`` on times the last one."""
    scales = scales.astype(values.dtype)
    is_first = jnp.arange(values.shape[-1]) < first
    return values * jnp.where(is_first, scales[..., 0, :, None], scales[..., -1, :, None])


KV_FORMATS: dict[str, KVFormat] = {
    "plain": KVFormat(),
    "bits of bfloat16": BitsFormat(jnp.bfloat16, jnp.int16),
    "int8": ScaledFormat(jnp.int8, jnp.int8, 127.0),
    "fp8": ScaledFormat(jnp.float8_e4m3fn, jnp.int8, 448.0),
}
"""KV cache formats by name, with those of ``grouped_formats`` and ``channel_formats``; the error of x at scale s is
at most s / 2 in int8, and max(|x| / 16, s / 1024) in fp8. ``EngineConfig.kv_dtype`` names a quantised one.
"""


def kv_format(name: str) -> KVFormat:
    """KV cache format by its name, with sizes behind a colon where its row reads them with ``of``.

    Raises:
        ValueError: there is no such row, or the sizes are not legal; says what is.
    """
    name, colon, sizes = name.partition(":")
    if name not in KV_FORMATS:
        raise ValueError(f"PageFormat: no encoding {name!r}; choose one of {tuple(KV_FORMATS)}, or add a row.")
    row = KV_FORMATS[name]
    if not colon:
        return row
    if not hasattr(row, "of"):
        raise ValueError(f"kv_dtype = '{name}:{sizes}': the format {name!r} has no sizes to give.")
    return row.of(sizes)  # pyright: ignore[reportAttributeAccessIssue]


def quantised_formats() -> tuple[str, ...]:
    """Names of the formats whose values that are read differ from those that were written."""
    return tuple(name for name, row in KV_FORMATS.items() if row.quantised)


def is_quantised(name: str) -> bool:
    """Whether this is such a format, with or without sizes behind a colon."""
    return name.partition(":")[0] in quantised_formats()
