"""Paged KV cache: page pool layout and page format.

A pool is one array [L, P, K, C, W]: layers, pages, kv heads, slots for tokens, elements of a slot. A slot holds a
token's key followed by its value, so that one copy fetches both and narrow heads fill whole tiles. Request r keeps its
tokens in the pages in its row of the page table: the token at position i is in slot ``i % C`` of page ``table[r, i //
C]`` (arXiv:2309.06180).

The elements may be quantised to eight bits (``encoding``). Their scales are a second array [L, P, K, Z, C]: one for
the key and one for the value of each slot, with the slots of a page contiguous, so that they fill the lanes of a TPU.

Legend: L layers, P pages, K kv heads, C slots of a page, W elements of a slot, Z parts of a slot that have a scale
each, T tokens, H head dim of keys, V of values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.paged_attention.encoding import ENCODINGS, SCALE, SCALED, from_bits, quantise, to_bits

UNSUPPORTED = ("int4", "int2")
"""Encodings that are reserved but not supported yet."""


class Slots(NamedTuple):
    """Contents of slots: those of a step's tokens, or of a whole pool.

    Attributes:
        data: elements, [T, K, W] or [L, P, K, C, W].
        scales: [T, K, Z] or [L, P, K, Z, C], float32; None where the encoding has none.
    """

    data: Any
    scales: Any = None


@dataclass(frozen=True)
class PageFormat:
    """Format of a slot of the paged KV cache.

    Attributes:
        kv_heads: K.
        key_dim: H.
        value_dim: V; for a latent at most H.
        latent: the values are the first V elements of the keys and are not stored again, as in multi-head latent
            attention (MLA) with absorbed projections (arXiv:2405.04434): K = 1, V = 512 and H = 512 + 64.
        encoding: "plain": elements in the dtype of the pool; "int8" or "fp8" (float8_e4m3fn): eight bits, with one
            scale per token and head for the key and one for the value; for a latent, one for the part that is also the
            value, and one for the rest, which has RoPE. Others: see ``ENCODINGS``.
        multiple: W is padded with zeros to a multiple of it. A TPU kernel needs multiples of 128, the width of its
            tiles, to which memory would be padded anyway.

    Raises:
        NotImplementedError: the encoding has fewer than eight bits.
        ValueError: the sizes or the encoding are not legal.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False
    encoding: str = "plain"
    multiple: int = 1

    def __post_init__(self) -> None:
        legal = ("plain", *ENCODINGS)
        if self.encoding in UNSUPPORTED:
            raise NotImplementedError(
                f"PageFormat: pages in {self.encoding} are not supported yet; use encoding {legal[1]!r}."
            )
        if self.encoding not in legal:
            raise ValueError(f"PageFormat: no encoding {self.encoding!r}; choose one of {legal}.")
        if min(self.kv_heads, self.key_dim, self.value_dim, self.multiple) < 1:
            raise ValueError(f"PageFormat: kv_heads, key_dim, value_dim and multiple must be positive in {self}.")
        if self.latent and self.value_dim > self.key_dim:
            raise ValueError(
                f"PageFormat: the values of a latent are the first elements of its key: value_dim = {self.value_dim} "
                f"must not exceed key_dim = {self.key_dim}."
            )

    @property
    def width(self) -> int:
        """Elements of a slot, padding included (W)."""
        used = self.key_dim if self.latent else self.key_dim + self.value_dim
        return -(-used // self.multiple) * self.multiple

    @property
    def value_start(self) -> int:
        """Offset of the value in a slot."""
        return 0 if self.latent else self.key_dim

    @property
    def parts(self) -> tuple[int, ...]:
        """Numbers of consecutive elements that share a scale, in the order of the slot; empty without scales."""
        if self.encoding not in SCALED:
            return ()
        sizes = (self.value_dim, self.key_dim - self.value_dim) if self.latent else (self.key_dim, self.value_dim)
        return tuple(size for size in sizes if size)

    def stored(self, dtype: DTypeLike) -> np.dtype:
        """Dtype of the stored elements of a pool for values of ``dtype``."""
        return jnp.dtype(dtype) if self.encoding == "plain" else ENCODINGS[self.encoding].stored

    def slot_bytes(self, dtype: DTypeLike) -> int:
        """Bytes of a token in one layer and kv head, scales included, in a pool for values of ``dtype``."""
        return self.width * self.stored(dtype).itemsize + len(self.parts) * SCALE.itemsize

    def pack(self, k: Float[Array, "T K H"], v: Float[Array, "T K V"] | None, dtype: DTypeLike) -> Slots:
        """Slots of tokens, encoded as in a pool for values of ``dtype``."""
        rows = k if v is None else jnp.concatenate([k, v], axis=-1)
        scales = None
        if self.parts:
            ends = np.cumsum(self.parts)[:-1]
            found = [quantise(part, ENCODINGS[self.encoding]) for part in jnp.split(rows, ends, axis=-1)]
            rows = jnp.concatenate([part for part, _ in found], axis=-1)
            scales = jnp.stack([scale for _, scale in found], axis=-1)
        rows = jnp.pad(rows, ((0, 0), (0, 0), (0, self.width - rows.shape[-1])))
        plain = self.encoding == "plain"
        return Slots(rows.astype(dtype) if plain else to_bits(rows, ENCODINGS[self.encoding]), scales)

    def unpack(self, held: Slots, dtype: DTypeLike) -> Float[Array, "*any C W"]:
        """Slots [*any, C, W] of pages, with scales [*any, Z, C], dequantised to ``dtype``."""
        if self.encoding == "plain":
            return held.data.astype(dtype)
        rows = from_bits(held.data, ENCODINGS[self.encoding], dtype)
        if not self.parts:
            return rows
        scales = held.scales.astype(dtype)
        first = jnp.arange(self.width) < self.parts[0]
        return rows * jnp.where(first, scales[..., 0, :, None], scales[..., -1, :, None])

    def keys(self, rows: Float[Array, "*any W"]) -> Float[Array, "*any H"]:
        """Keys of slots."""
        return rows[..., : self.key_dim]

    def values(self, rows: Float[Array, "*any W"]) -> Float[Array, "*any V"]:
        """Values of slots."""
        return rows[..., self.value_start : self.value_start + self.value_dim]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagePool:
    """Page pool of all layers: a pytree that a scan over layers carries and a step donates.

    Attributes:
        rows: Shaped[Array, "L P K C W"], or its shape or sharding.
        format: format of a slot.
        scales: Float[Array, "L P K Z C"] where the encoding has scales, or its shape or sharding.
    """

    rows: Any
    format: PageFormat = field(metadata={"static": True})
    scales: Any = None

    @classmethod
    def zeros(cls, format: PageFormat, *, layers: int, pages: int, page_size: int, dtype: DTypeLike) -> PagePool:
        """Empty pool."""
        held = empty_slots(format, layers=layers, pages=pages, page_size=page_size, dtype=dtype)
        return cls(held.data, format, held.scales)

    @property
    def slots(self) -> Slots:
        """Contents of the pool, without the format."""
        return Slots(self.rows, self.scales)

    @property
    def page_size(self) -> int:
        """Slots of a page (C)."""
        return self.rows.shape[3]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer, all kv heads."""
        return self.rows.shape[2] * self.format.slot_bytes(self.rows.dtype)


def empty_slots(format: PageFormat, *, layers: int, pages: int, page_size: int, dtype: DTypeLike) -> Slots:
    """Contents of an empty pool."""
    sizes = layers, pages, format.kv_heads
    rows = jnp.zeros((*sizes, page_size, format.width), format.stored(dtype))
    return Slots(rows, jnp.zeros((*sizes, len(format.parts), page_size), SCALE) if format.parts else None)
