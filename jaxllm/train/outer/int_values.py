"""Value formats of compressed messages: how numbers are packed into integers for a collective.

    plain   as they are
    int8    one byte each, and a float32 scale for each block of 256 (8-bit approximations, arXiv:1511.04561)
    int2    two bits each, four in a byte: the sign, and which of a block's two magnitudes (as SparseLoCo's 2 bits)

Legend: N values, K blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float

Message = tuple[Array, ...]
"""Arrays of one message, as a collective sends them."""
BLOCK = 256
"""Values that share one scale."""


@runtime_checkable
class Compressor(Protocol):
    """Compressor of a vector: a pair of encode and decode, without state."""

    def encode(self, x: Float[Array, " N"]) -> Message:
        """Message of a vector; its arrays are what is sent."""
        ...

    def decode(self, message: Message, size: int, dtype: jnp.dtype) -> Float[Array, " N"]:
        """Vector of ``size`` values that a message stands for."""
        ...

    def bytes(self, size: int, dtype: jnp.dtype) -> int:
        """Bytes of the message of a vector of ``size`` values."""
        ...


@dataclass(frozen=True)
class PlainValues:
    """Values as they are."""

    def encode(self, x: Float[Array, " N"]) -> Message:
        """The vector itself."""
        return (x,)

    def decode(self, message: Message, size: int, dtype: jnp.dtype) -> Float[Array, " N"]:
        """The vector itself."""
        return message[0][:size].astype(dtype)

    def bytes(self, size: int, dtype: jnp.dtype) -> int:
        """Bytes of the vector."""
        return size * jnp.dtype(dtype).itemsize


@dataclass(frozen=True)
class Int8Blocks:
    """Blocks of signed bytes, scaled so that the largest magnitude of a block is 127.

    Attributes:
        block: values that share one float32 scale. The error of a value is at most half a step: its block's largest
            magnitude / 254.
    """

    block: int = BLOCK

    def encode(self, x: Float[Array, " N"]) -> Message:
        """Bytes, and a scale for each block; the last block is filled up with zeros."""
        blocks = _blocks(x, self.block)
        scale = (jnp.abs(blocks).max(1) / 127).astype(jnp.float32)
        steps = blocks / jnp.where(scale > 0, scale, 1).astype(x.dtype)[:, None]
        return jnp.clip(jnp.round(steps), -127, 127).astype(jnp.int8).reshape(-1), scale

    def decode(self, message: Message, size: int, dtype: jnp.dtype) -> Float[Array, " N"]:
        """Bytes times scales."""
        codes, scale = message
        return (codes.reshape(-1, self.block).astype(dtype) * scale.astype(dtype)[:, None]).reshape(-1)[:size]

    def bytes(self, size: int, dtype: jnp.dtype) -> int:
        """One byte each, in whole blocks, and 4 for each block."""
        return -(-size // self.block) * (self.block + 4)


@dataclass(frozen=True)
class Int2Blocks:
    """Blocks of 2-bit codes: a sign, and one bit for a magnitude below or above the mean magnitude of the block.

    The two magnitudes that they stand for are the means of those below and of those above, so that a block's sum of
    magnitudes is kept.

    Attributes:
        block: values that share two float32 magnitudes; a multiple of 4.
    """

    block: int = BLOCK

    def __post_init__(self) -> None:
        if self.block % 4:
            raise ValueError(f"int2: a block of {self.block} values; four codes are one byte, so give a multiple of 4.")

    def encode(self, x: Float[Array, " N"]) -> Message:
        """Bytes of four codes, and [K 2] magnitudes."""
        blocks = _blocks(x, self.block)
        magnitude = jnp.abs(blocks)
        # Zeros are fill, or stand for values that are not sent: they must not pull the magnitudes down.
        some = magnitude > 0
        mean = magnitude.sum(1, keepdims=True) / jnp.maximum(some.sum(1, keepdims=True), 1)
        high = magnitude > mean
        means = [jnp.where(on, magnitude, 0).sum(1) / jnp.maximum(on.sum(1), 1) for on in (some & ~high, high)]
        codes = ((blocks < 0).astype(jnp.uint8) << 1 | high.astype(jnp.uint8)).reshape(-1, 4)
        shifts = jnp.arange(0, 8, 2, dtype=jnp.uint8)
        packed = (codes << shifts).sum(1, dtype=jnp.uint8)
        return packed, jnp.stack(means, axis=1).astype(jnp.float32)

    def decode(self, message: Message, size: int, dtype: jnp.dtype) -> Float[Array, " N"]:
        """Signs times magnitudes."""
        packed, means = message
        codes = (packed[:, None] >> jnp.arange(0, 8, 2, dtype=jnp.uint8)) & 3
        codes = codes.reshape(-1, self.block)
        magnitude = jnp.where(codes & 1 == 1, means[:, 1:], means[:, :1]).astype(dtype)
        return jnp.where(codes & 2 == 2, -magnitude, magnitude).reshape(-1)[:size]

    def bytes(self, size: int, dtype: jnp.dtype) -> int:
        """A quarter of a byte each, in whole blocks, and 8 for each block."""
        return -(-size // self.block) * (self.block // 4 + 8)


def _blocks(x: Float[Array, " N"], block: int) -> Float[Array, "K B"]:
    return jnp.pad(x, (0, -x.shape[0] % block)).reshape(-1, block)


VALUE_FORMATS: dict[str, type[PlainValues] | type[Int8Blocks] | type[Int2Blocks]] = {
    "plain": PlainValues,
    "int8": Int8Blocks,
    "int2": Int2Blocks,
}
"""Value formats by name."""
