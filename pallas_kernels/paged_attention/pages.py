"""Paged KV cache: page pool layout and page format.

A pool is one array [L, P, K, C, W]: layers, pages, kv heads, slots for tokens, elements of a slot. A slot holds a
token's key followed by its value, so that one copy fetches both and narrow heads fill whole tiles. Request r keeps its
tokens in the pages in its row of the page table: the token at position i is in slot ``i % C`` of page ``table[r, i //
C]`` (arXiv:2309.06180).

The elements may be quantised (``encoding``, a row of ``kv_formats``). Their scales are a second array [L, P, K, Z,
C]: those of the key and of the value of each slot, with the slots of a page contiguous, so that they fill the lanes of
a TPU.

Where a retention rule drops tokens (``retention``), a slot's index does not determine its token's position. A third
array [L, P, K, 1, C] then has the position of the token in each slot, -1 for none, for each kv head by itself. Where
the rule chooses by scores, a fourth array of that shape has the score of each slot's entry.

Legend: L layers, P pages, K kv heads, C slots of a page, W elements of a slot, Z scales of a slot, T tokens, H head dim
of keys, V of values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.kv_formats import SCALE, KVFormat, kv_format
from pallas_kernels.paged_attention.slot_layout import SlotLayout, ValueRun

HOST_MEMORY = "pinned_host"
"""Memory kind of arrays in host memory that a program reads."""


class Slots(NamedTuple):
    """Contents of slots: those of a step's tokens, or of a whole pool.

    Attributes:
        data: elements, [T, K, W] or [L, P, K, C, W]; in host memory where the format says so.
        scales: [T, K, Z] or [L, P, K, Z, C], words of scales, float32 or int32; None where the encoding has none.
        positions: of a pool with a retention rule, int32 [L, P, K, 1, C]: position of each slot's token, or -1.
        channels: of a pool whose pages are encoded as a whole, int32 [L, P, K, 1, H]: words of a page, such as scale
            and minimum of each channel, two float16 each.
        recent: of such a pool, [L, S, K, B, W]: ring buffers of sequences, see ``residual_window``; not in pages.
        scores: of a pool with a retention rule that chooses by scores, float32 [L, P, K, 1, C]: score of each slot's
            entry, see ``ScoreRule``; of a step's tokens, [T, K] or None for zeros.
        keys, factors: of a pool with low-rank keys, [L, P, K, R, H] and [L, P, 1, C, Z]: the rows of a page, and the
            coefficients of its tokens, see ``shadow_format``.
    """

    data: Any
    scales: Any = None
    positions: Any = None
    channels: Any = None
    recent: Any = None
    scores: Any = None
    keys: Any = None
    factors: Any = None

    def in_pages(self) -> Slots:
        """The arrays that pages have a part in."""
        return self._replace(recent=None)


@dataclass(frozen=True)
class PageFormat:
    """Format of a slot of the paged KV cache.

    Attributes:
        kv_heads: K.
        key_dim: H.
        value_dim: V; for a latent at most H.
        latent: the values are the first V elements of the keys and are not stored again, as in multi-head latent
            attention (MLA) with absorbed projections (arXiv:2405.04434): K = 1, V = 512 and H = 512 + 64.
        encoding: name of a row of ``KV_FORMATS``: "plain": elements in the dtype of the pool; "int8" or "fp8"
            (float8_e4m3fn): eight bits, with one scale per token and head for the key and one for the value; for a
            latent, one for the part that is also the value, and one for the rest, which has RoPE.
        multiple: stored elements of a slot are padded with zeros to a multiple of it. A TPU kernel needs multiples of
            128, the width of its tiles, to which memory would be padded anyway.

    Raises:
        ValueError: the sizes or the encoding are not legal.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False
    encoding: str = "plain"
    multiple: int = 1

    def __post_init__(self) -> None:
        if min(self.kv_heads, self.key_dim, self.value_dim, self.multiple) < 1:
            raise ValueError(f"PageFormat: kv_heads, key_dim, value_dim and multiple must be positive in {self}.")
        if self.latent and self.value_dim > self.key_dim:
            raise ValueError(
                f"PageFormat: the values of a latent are the first elements of its key: value_dim = {self.value_dim} "
                f"must not exceed key_dim = {self.key_dim}."
            )
        per = self.kv_format.values_per_element
        if self.latent and self.kv_format.residual:
            raise ValueError(
                f"PageFormat: {self.encoding!r} encodes keys and values along different axes, and a latent is both: "
                "choose int8, fp8, int4 or bfp4."
            )
        if any(part % per for part in self._parts):
            raise ValueError(
                f"PageFormat: an element of {self.encoding!r} holds {per} values: key_dim = {self.key_dim} and "
                f"value_dim = {self.value_dim} must be multiples of {per}; choose another encoding."
            )

    @property
    def kv_format(self) -> KVFormat:
        """Encoder and decoder of the elements."""
        return kv_format(self.encoding)

    @property
    def width(self) -> int:
        """Values of a slot, padding included (W)."""
        return self.kv_format.width(self._parts, self.stored_width)

    @property
    def stored_width(self) -> int:
        """Stored elements of a slot, padding included."""
        used = self.kv_format.elements(self._parts)
        return -(-used // self.multiple) * self.multiple

    @property
    def value_start(self) -> int:
        """Offset of the value in a slot."""
        return 0 if self.latent else self.key_dim

    @property
    def _parts(self) -> tuple[int, ...]:
        """Numbers of consecutive values that are encoded together, in the order of the slot."""
        sizes = (self.value_dim, self.key_dim - self.value_dim) if self.latent else (self.key_dim, self.value_dim)
        return tuple(size for size in sizes if size)

    @property
    def value_parts(self) -> tuple[int, ...]:
        """Numbers of consecutive values that are encoded together, in the order of the slot."""
        return self._parts

    @property
    def channels(self) -> int:
        """Words of a page, such as those of its channels' scales; 0 unless it is encoded as a whole.

        Those of channels are padded as slots are.
        """
        if not (found := self.kv_format).residual:
            return 0
        words = found.channels(self._parts)  # pyright: ignore[reportAttributeAccessIssue]
        return words if self.layout is None else -(-words // self.multiple) * self.multiple

    @property
    def layout(self) -> SlotLayout | None:
        """Layout of a slot; None where kernels do not read it."""
        if self.encoding == "plain":
            return SlotLayout((ValueRun(0, self.width, 0),))
        return self.kv_format.layout(self._parts)

    @property
    def parts(self) -> tuple[int, ...]:
        """Numbers of consecutive values that share scales, in the order of the slot; empty without scales."""
        return self._parts if self.kv_format.scales else ()

    @property
    def scales(self) -> int:
        """Words of scales of a slot (Z); where slots are padded, a power of two up to 8, or a multiple of 8.

        Those are the rows of tiles of a TPU's memory: XLA would lay other numbers out in another way than kernels read.
        """
        rows = self.kv_format.scale_rows(self._parts)
        if self.multiple == 1 or rows < 2:
            return rows
        return -(-rows // 8) * 8 if rows > 8 else 1 << (rows - 1).bit_length()

    def stored(self, dtype: DTypeLike) -> np.dtype:
        """Dtype of the stored elements of a pool for values of ``dtype``."""
        return self.kv_format.stored(dtype)

    def slot_bytes(self, dtype: DTypeLike) -> int:
        """Bytes of a token in one layer and kv head, scales included, in a pool for values of ``dtype``."""
        return self.stored_width * self.stored(dtype).itemsize + self.scales * SCALE.itemsize

    def page_bytes(self, page_size: int, dtype: DTypeLike) -> int:
        """Bytes of a page in one layer and kv head, scales included, in a pool for values of ``dtype``."""
        return page_size * self.slot_bytes(dtype) + 4 * self.channels

    def device_page_bytes(self, page_size: int, dtype: DTypeLike) -> int:
        """Bytes of a page in one layer, all kv heads, on the device."""
        found = self.kv_format
        if not found.on_host:
            return self.kv_heads * self.page_bytes(page_size, dtype)
        elements = found.device_elements(page_size, self.kv_heads, self._parts)  # pyright: ignore[reportAttributeAccessIssue]
        return elements * self.stored(dtype).itemsize + 4 * self.kv_heads * self.channels

    def host_page_bytes(self, page_size: int, dtype: DTypeLike) -> int:
        """Bytes of a page in one layer, all kv heads, in host memory."""
        return self.kv_heads * page_size * self.slot_bytes(dtype) if self.kv_format.on_host else 0

    def pack(self, k: Float[Array, "T K H"], v: Float[Array, "T K V"] | None, dtype: DTypeLike) -> Slots:
        """Slots of tokens, encoded as in a pool for values of ``dtype``; not encoded where that is done by page."""
        rows = k if v is None else jnp.concatenate([k, v], axis=-1)
        if self.kv_format.residual:
            return Slots(rows)  # encoded later, with the other tokens of their page
        rows, scales = self.kv_format.encode(rows, self._parts, dtype)
        rows = _padded(rows, self.stored_width, -1)
        return Slots(rows, scales if scales is None else _padded(scales, self.scales, -1))

    def encode_page(self, page: Float[Array, "K C W"], at: Int[Array, " C"], turn: Any) -> Slots:
        """Arrays of a page that is encoded as a whole, of the tokens at these positions; see ``residual_window``."""
        parts = self.kv_format.encode_page(page, self._parts, at, turn)  # pyright: ignore[reportAttributeAccessIssue]
        found = Slots(**parts)
        if found.scales is not None:
            found = found._replace(scales=_padded(found.scales, self.scales, -2))
        return found._replace(
            data=_padded(found.data, self.stored_width, -1), channels=_padded(found.channels, self.channels, -1)
        )

    def unpack(self, held: Slots, dtype: DTypeLike) -> Float[Array, "*any C W"]:
        """Slots [*any, C, M] of pages, with scales [*any, Z, C] and channels [*any, 1, H], decoded to ``dtype``."""
        return self.kv_format.unpack(held.data, held.scales, self._parts, dtype, held.channels)

    def keys(self, rows: Float[Array, "*any W"]) -> Float[Array, "*any H"]:
        """Keys of slots."""
        return rows[..., : self.key_dim]

    def values(self, rows: Float[Array, "*any W"]) -> Float[Array, "*any V"]:
        """Values of slots."""
        return rows[..., self.value_start : self.value_start + self.value_dim]


def _padded(x: Array, size: int, axis: int) -> Array:
    """An array with zeros behind it along an axis, up to a size."""
    missing = size - x.shape[axis]
    widths = [(0, missing if axis % x.ndim == i else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths) if missing else x


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagePool:
    """Page pool of all layers: a pytree that a scan over layers carries and a step donates.

    Attributes:
        rows: Shaped[Array, "L P K C M"], or its shape or sharding.
        format: format of a slot.
        scales: Shaped[Array, "L P K Z C"] where the encoding has scales, or its shape or sharding.
        positions: Int[Array, "L P K 1 C"] where a retention rule drops tokens, or its shape or sharding.
        channels, recent: where pages are encoded as a whole, see ``Slots``, or their shapes or shardings.
        scores: where a retention rule chooses by scores, see ``Slots``, or its shape or sharding.
        keys, factors: where keys have a low rank, see ``Slots``, or their shapes or shardings.
    """

    rows: Any
    format: PageFormat = field(metadata={"static": True})
    scales: Any = None
    positions: Any = None
    channels: Any = None
    recent: Any = None
    scores: Any = None
    keys: Any = None
    factors: Any = None

    @classmethod
    def zeros(
        cls,
        format: PageFormat,
        *,
        layers: int,
        pages: int,
        page_size: int,
        dtype: DTypeLike,
        positions: bool = False,
        sequences: int = 0,
        scores: bool = False,
    ) -> PagePool:
        """Empty pool.

        Args:
            format: format of a slot.
            layers, pages, page_size: L, P, C.
            dtype: dtype of the values.
            positions: for a retention rule.
            sequences: number of ring buffers, if pages are encoded as a whole.
            scores: for a retention rule that chooses by scores.
        """
        held = empty_slots(
            format, layers=layers, pages=pages, page_size=page_size, dtype=dtype, positions=positions,
            sequences=sequences, scores=scores,
        )  # fmt: skip
        return cls(held.data, format, *held[1:])

    @property
    def slots(self) -> Slots:
        """Contents of the pool, without the format."""
        return Slots(
            self.rows, self.scales, self.positions, self.channels, self.recent, self.scores, self.keys, self.factors
        )

    @property
    def page_size(self) -> int:
        """Slots of a page (C)."""
        return self.rows.shape[3]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer, all kv heads."""
        return self.rows.shape[2] * self.format.slot_bytes(self.rows.dtype)


def empty_slots(
    format: PageFormat,
    *,
    layers: int,
    pages: int,
    page_size: int,
    dtype: DTypeLike,
    positions: bool = False,
    sequences: int = 0,
    scores: bool = False,
) -> Slots:
    """Contents of an empty pool, see ``PagePool.zeros``; ring buffers have elements of ``dtype``."""
    sizes = layers, pages, format.kv_heads
    rows = jnp.zeros((*sizes, page_size, format.stored_width), format.stored(dtype))
    words = format.kv_format.scale_dtype
    scales = jnp.zeros((*sizes, format.scales, page_size), words) if format.scales else None
    at = jnp.full((*sizes, 1, page_size), -1, jnp.int32) if positions else None
    if not format.kv_format.residual:
        score = jnp.zeros((*sizes, 1, page_size), jnp.float32) if scores else None
        return Slots(rows, scales, at, scores=score)
    channels = jnp.zeros((*sizes, 1, format.channels), jnp.int32)
    places = ring_places(format.kv_format, page_size)
    recent = jnp.zeros((layers, sequences, format.kv_heads, places, format.width), dtype)
    keys = factors = None
    if format.kv_format.chunk:
        count, rank = format.kv_format.rows(page_size), format.kv_format.rank  # pyright: ignore[reportAttributeAccessIssue]
        keys = jnp.zeros((*sizes, count, format.key_dim), dtype)
        factors = jnp.zeros((layers, pages, 1, page_size, rank), dtype)
    return Slots(rows, scales, at, channels, recent, keys=keys, factors=factors)


def ring_places(form: KVFormat, page_size: int) -> int:
    """Places of a ring buffer: the window, the page that is leaving it, and as many draft tokens as a page has.

    A format of chosen chunks is served without drafts.
    """
    if form.chunk:
        return form.residual + page_size
    return -(-form.residual // page_size) * page_size + 2 * page_size


def fetched(x: Array, start: tuple[Array, ...], sizes: tuple[int, ...]) -> Array:
    """Slice of an array, on the device; copied there if the array is in host memory."""
    found = jax.lax.dynamic_slice(x, start, sizes)
    return jax.device_put(found, jax.memory.Space.Device) if on_host(x) else found


def stored(x: Array, part: Array, start: tuple[Array, ...]) -> Array:
    """Array with a slice replaced by an array on the device; copied to host memory if the array is there."""
    part = jax.device_put(part, jax.memory.Space.Host) if on_host(x) else part
    return jax.lax.dynamic_update_slice(x, part, start)


def host_sharding(device: jax.Device) -> jax.NamedSharding:
    """Sharding of arrays in host memory that programs of a device read.

    It is over a mesh of that device, because a type says where an array is only with a mesh.
    """
    mesh = jax.sharding.Mesh([device], ("host",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.NamedSharding(mesh, jax.P(), memory_kind=HOST_MEMORY)


def on_host(x: Array) -> bool:
    """Whether an array is in host memory (``pinned_host``)."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host
