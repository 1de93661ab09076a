"""Pages: how keys and values of tokens lie in the pool that all requests share.

A pool is one array [L, P, K, C, W]: of each layer P pages, of each page K kv heads, of each head C slots for tokens.
A slot holds a token's key and behind it its value, so that one copy fetches both and narrow heads fill whole tiles.
Request r keeps its tokens in the pages that its row of a page table names: the token at position i is in slot
``i % C`` of page ``table[r, i // C]`` (arXiv:2309.06180).

Numbers may be stored in eight bits (``encoding``). Their scales are a second array [L, P, K, Z, C]: of each slot one
for the key and one for the value, beside each other for the slots of a page, so that they fill the lanes of a TPU.

Legend: L layers, P pages, K kv heads, C slots of a page, W numbers of a slot, Z parts of a slot that have a scale each,
T tokens, H head dim of keys, V of values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.paged_attention.encoding import ENCODINGS, SCALE, SCALED, bits, numbers, quantised

NARROWER = ("int4", "int2")
"""Encodings that are to come."""


class Slots(NamedTuple):
    """What slots hold, of a step's tokens or of a whole pool.

    Attributes:
        numbers: [T, K, W] or [L, P, K, C, W].
        scales: [T, K, Z] or [L, P, K, Z, C], float32; None where the encoding has none.
    """

    numbers: Any
    scales: Any = None


@dataclass(frozen=True)
class PageFormat:
    """What a slot holds.

    Attributes:
        kv_heads: K.
        key_dim: H.
        value_dim: V. Of a latent at most H.
        latent: the values are the first V numbers of the keys and are not stored again, as in multi-head latent
            attention with absorbed projections (arXiv:2405.04434): K = 1, V = 512 and H = 512 + 64.
        encoding: "plain": numbers as they are, in the dtype of the pool; "int8" or "fp8" (float8_e4m3fn): in eight
            bits, with a scale of each token and head for its key and one for its value; of a latent one for what is a
            value too, and one for the rest, which is rotated. Others: see ``ENCODINGS``.
        multiple: W is rounded up to one of it, with zeros. A TPU kernel takes multiples of 128, the width of its tiles,
            to which memory would be filled up anyway.

    Raises:
        NotImplementedError: an encoding of fewer than eight bits.
        ValueError: sizes that make no slot, an encoding that nobody knows.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False
    encoding: str = "plain"
    multiple: int = 1

    def __post_init__(self) -> None:
        legal = ("plain", *ENCODINGS)
        if self.encoding in NARROWER:
            raise NotImplementedError(f"PageFormat: pages in {self.encoding} are not supported yet; use {legal[1]!r}.")
        if self.encoding not in legal:
            raise ValueError(f"PageFormat: no encoding {self.encoding!r}; choose of {legal}.")
        if min(self.kv_heads, self.key_dim, self.value_dim, self.multiple) < 1:
            raise ValueError(f"PageFormat: kv_heads, key_dim, value_dim and multiple must be positive in {self}.")
        if self.latent and self.value_dim > self.key_dim:
            raise ValueError(
                f"PageFormat: values of a latent are the first numbers of its key: value_dim = {self.value_dim} "
                f"must not exceed key_dim = {self.key_dim}."
            )

    @property
    def width(self) -> int:
        """W."""
        used = self.key_dim if self.latent else self.key_dim + self.value_dim
        return -(-used // self.multiple) * self.multiple

    @property
    def value_start(self) -> int:
        """Where in a slot the value begins."""
        return 0 if self.latent else self.key_dim

    @property
    def parts(self) -> tuple[int, ...]:
        """Numbers of a slot that share a scale, in their order; none where there are no scales."""
        if self.encoding not in SCALED:
            return ()
        sizes = (self.value_dim, self.key_dim - self.value_dim) if self.latent else (self.key_dim, self.value_dim)
        return tuple(size for size in sizes if size)

    def stored(self, dtype: DTypeLike) -> np.dtype:
        """The dtype of the numbers of a pool that is to hold ``dtype``."""
        return jnp.dtype(dtype) if self.encoding == "plain" else ENCODINGS[self.encoding].stored

    def slot_bytes(self, dtype: DTypeLike) -> int:
        """Bytes of a token in one layer and kv head, its scales included, of such a pool."""
        return self.width * self.stored(dtype).itemsize + len(self.parts) * SCALE.itemsize

    def pack(self, k: Float[Array, "T K H"], v: Float[Array, "T K V"] | None, dtype: DTypeLike) -> Slots:
        """Slots of tokens, as a pool for ``dtype`` holds them."""
        rows = k if v is None else jnp.concatenate([k, v], axis=-1)
        scales = None
        if self.parts:
            ends = np.cumsum(self.parts)[:-1]
            found = [quantised(part, ENCODINGS[self.encoding]) for part in jnp.split(rows, ends, axis=-1)]
            rows = jnp.concatenate([part for part, _ in found], axis=-1)
            scales = jnp.stack([scale for _, scale in found], axis=-1)
        rows = jnp.pad(rows, ((0, 0), (0, 0), (0, self.width - rows.shape[-1])))
        plain = self.encoding == "plain"
        return Slots(rows.astype(dtype) if plain else bits(rows, ENCODINGS[self.encoding]), scales)

    def unpack(self, held: Slots, dtype: DTypeLike) -> Float[Array, "*any C W"]:
        """Slots [*any, C, W] of pages, with scales [*any, Z, C], as numbers of ``dtype``."""
        if self.encoding == "plain":
            return held.numbers.astype(dtype)
        rows = numbers(held.numbers, ENCODINGS[self.encoding], dtype)
        if not self.parts:
            return rows
        scales = held.scales.astype(dtype)
        first = jnp.arange(self.width) < self.parts[0]
        return rows * jnp.where(first, scales[..., 0, :, None], scales[..., -1, :, None])

    def keys(self, rows: Float[Array, "*any W"]) -> Float[Array, "*any H"]:
        """The keys of slots."""
        return rows[..., : self.key_dim]

    def values(self, rows: Float[Array, "*any W"]) -> Float[Array, "*any V"]:
        """The values of slots."""
        return rows[..., self.value_start : self.value_start + self.value_dim]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagePool:
    """The pages of all layers: a pytree, to be carried through a scan over layers and donated to a step.

    Attributes:
        rows: Shaped[Array, "L P K C W"], or a shape or sharding of it.
        format: what a slot holds.
        scales: Float[Array, "L P K Z C"] of an encoding that has them, or a shape or sharding of it.
    """

    rows: Any
    format: PageFormat = field(metadata={"static": True})
    scales: Any = None

    @classmethod
    def zeros(cls, format: PageFormat, *, layers: int, pages: int, page_size: int, dtype: DTypeLike) -> PagePool:
        """A pool that holds nothing yet."""
        held = empty_slots(format, layers=layers, pages=pages, page_size=page_size, dtype=dtype)
        return cls(held.numbers, format, held.scales)

    @property
    def slots(self) -> Slots:
        """What it holds, without the format."""
        return Slots(self.rows, self.scales)

    @property
    def page_size(self) -> int:
        """C."""
        return self.rows.shape[3]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return self.rows.shape[2] * self.format.slot_bytes(self.rows.dtype)


def empty_slots(format: PageFormat, *, layers: int, pages: int, page_size: int, dtype: DTypeLike) -> Slots:
    """The slots of a pool that holds nothing yet."""
    sizes = layers, pages, format.kv_heads
    rows = jnp.zeros((*sizes, page_size, format.width), format.stored(dtype))
    return Slots(rows, jnp.zeros((*sizes, len(format.parts), page_size), SCALE) if format.parts else None)
