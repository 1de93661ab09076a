"""Top-k compressor: of each chunk of a vector, the values of largest magnitude and their places.

As in SparseLoCo (arXiv:2508.15706): chunks keep the places short (two bytes), and spread what is sent over the tensor.

Legend: N values, C chunks, K values sent of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.train.outer.int_values import Compressor, Message, PlainValues

CHUNK = 4096
"""Values of a chunk; places in it are 16-bit integers."""


@dataclass(frozen=True)
class TopK:
    """Largest values of each chunk, in a value format of their own.

    Attributes:
        share: part of the values that is sent, above 0 and at most 1; at least one value of each chunk.
        values: format of the values that are sent.
    """

    share: float
    values: Compressor = field(default_factory=PlainValues)

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"topk: share = {self.share}; give a number above 0 and at most 1, such as topk:0.02.")

    def counts(self, size: int) -> tuple[int, int, int]:
        """Chunks of a vector, values of each, and values sent of each."""
        chunk = min(CHUNK, max(1, size))
        return -(-size // chunk), chunk, max(1, round(self.share * chunk))

    def encode(self, x: Float[Array, " N"]) -> Message:
        """16-bit places [C K], and the message of the values."""
        chunks, chunk, k = self.counts(x.shape[0])
        rows = jnp.pad(x, (0, chunks * chunk - x.shape[0])).reshape(chunks, chunk)
        _, places = jax.lax.top_k(jnp.abs(rows), k)
        found = jnp.take_along_axis(rows, places, axis=1)
        return places.astype(jnp.uint16), *self.values.encode(found.reshape(-1))

    def decode(self, message: Message, size: int, dtype: jnp.dtype) -> Float[Array, " N"]:
        """Vector of the values at their places, and zeros."""
        chunks, chunk, k = self.counts(size)
        found = self.values.decode(message[1:], chunks * k, dtype).reshape(chunks, k)
        rows = jnp.zeros((chunks, chunk), dtype)
        places = message[0].astype(jnp.int32)
        return jnp.put_along_axis(rows, places, found, axis=1, inplace=False).reshape(-1)[:size]

    def bytes(self, size: int, dtype: jnp.dtype) -> int:
        """Two bytes for each place, and those of the values."""
        chunks, _, k = self.counts(size)
        return chunks * k * 2 + self.values.bytes(chunks * k, dtype)
