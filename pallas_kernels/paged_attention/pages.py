"""Pages: how keys and values of tokens lie in the pool that all requests share.

A pool is one array [L, P, K, C, W]: of each layer P pages, of each page K kv heads, of each head C slots for tokens.
A slot holds a token's key and behind it its value, so that one copy fetches both and narrow heads fill whole tiles.
Request r keeps its tokens in the pages that its row of a page table names: the token at position i is in slot
``i % C`` of page ``table[r, i // C]`` (arXiv:2309.06180).

Legend: L layers, P pages, K kv heads, C slots of a page, W numbers of a slot, T tokens, H head dim of keys, V of
values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

QUANTISED = ("int8", "fp8", "int4", "int2")
"""Encodings that are to come: rows of fewer bits, and their scales beside them in the pool."""


@dataclass(frozen=True)
class PageFormat:
    """What a slot holds.

    Attributes:
        kv_heads: K.
        key_dim: H.
        value_dim: V. Of a latent at most H.
        latent: the values are the first V numbers of the keys and are not stored again, as in multi-head latent
            attention with absorbed projections (arXiv:2405.04434): K = 1, V = 512 and H = 512 + 64.
        encoding: "plain": numbers as they are, in the dtype of the pool.
        multiple: W is rounded up to one of it, with zeros. A TPU kernel takes multiples of 128, the width of its tiles,
            to which memory would be filled up anyway.

    Raises:
        NotImplementedError: a quantised encoding.
        ValueError: sizes that make no slot, an encoding that nobody knows.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False
    encoding: str = "plain"
    multiple: int = 1

    def __post_init__(self) -> None:
        if self.encoding in QUANTISED:
            raise NotImplementedError(f"PageFormat: pages in {self.encoding} are not supported yet; use 'plain'.")
        if self.encoding != "plain":
            raise ValueError(f"PageFormat: no encoding {self.encoding!r}; there is 'plain'.")
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

    def pack(
        self, k: Float[Array, "T K H"], v: Float[Array, "T K V"] | None, dtype: DTypeLike
    ) -> Float[Array, "T K W"]:
        """Slots of tokens, in the dtype of a pool."""
        slots = k if v is None else jnp.concatenate([k, v], axis=-1)
        return jnp.pad(slots, ((0, 0), (0, 0), (0, self.width - slots.shape[-1]))).astype(dtype)

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
        rows: Float[Array, "L P K C W"], or a shape or sharding of it.
        format: what a slot holds.
    """

    rows: Any
    format: PageFormat = field(metadata={"static": True})

    @classmethod
    def zeros(cls, format: PageFormat, *, layers: int, pages: int, page_size: int, dtype: DTypeLike) -> PagePool:
        """A pool that holds nothing yet."""
        return cls(jnp.zeros((layers, pages, format.kv_heads, page_size, format.width), dtype), format)

    @property
    def page_size(self) -> int:
        """C."""
        return self.rows.shape[3]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return self.rows.shape[2] * self.rows.shape[4] * self.rows.dtype.itemsize
