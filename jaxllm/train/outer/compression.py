"""Compressed means: the mean of a vector over the devices along a mesh axis, of which only messages are sent.

    plain          all-reduce
    values alone   reduce-scatter and all-gather of packed integers: each device averages its part of all vectors
    top-k          all-gather of every device's message; each device adds them all up

All devices compute the mean from the same messages in the same order, so that it is bitwise equal on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.config import ConfigError, closest
from jaxllm.train.outer.int_values import VALUE_FORMATS, Compressor
from jaxllm.train.outer.top_k import TopK


@runtime_checkable
class CompressedMean(Protocol):
    """Mean over a mesh axis, inside a ``jax.shard_map`` that is manual over it."""

    def mean(self, x: Float[Array, " N"], axis: str) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
        """Mean of ``x`` over the axis, and what the other devices know of this one's ``x`` (for error feedback)."""
        ...

    def sent(self, size: int, dtype: jnp.dtype, ranks: int) -> int:
        """Bytes that one device sends for a vector of ``size`` values."""
        ...

    @property
    def loses(self) -> bool:
        """Whether values are left out, so that error feedback is needed."""
        ...

    @property
    def is_exact(self) -> bool:
        """Whether all values are sent as they are."""
        ...


@dataclass(frozen=True)
class PlainMean:
    """All-reduce of whole vectors."""

    loses = False
    is_exact = True

    def mean(self, x: Float[Array, " N"], axis: str) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
        """Mean over the axis, and ``x``."""
        return jax.lax.pmean(x, axis), x

    def sent(self, size: int, dtype: jnp.dtype, ranks: int) -> int:
        """Bytes of a ring all-reduce."""
        return 2 * size * jnp.dtype(dtype).itemsize * (ranks - 1) // ranks


@dataclass(frozen=True)
class GatheredMean:
    """All-gather of messages, for messages that cannot be added.

    Attributes:
        compressor: of each device's vector.
    """

    compressor: Compressor
    loses = True
    is_exact = False

    def mean(self, x: Float[Array, " N"], axis: str) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
        """Mean of the decoded messages, and this device's decoded message."""
        size, dtype = x.shape[0], x.dtype
        message = self.compressor.encode(x)
        messages = tuple(jax.lax.all_gather(part, axis) for part in message)

        def add(total: Array, one: tuple[Array, ...]) -> tuple[Array, None]:
            return total + self.compressor.decode(one, size, dtype), None

        total, _ = jax.lax.scan(add, jnp.zeros_like(x), messages)
        return total / jax.lax.axis_size(axis), self.compressor.decode(message, size, dtype)

    def sent(self, size: int, dtype: jnp.dtype, ranks: int) -> int:
        """Every message goes to all other devices."""
        return self.compressor.bytes(size, dtype) * (ranks - 1)


@dataclass(frozen=True)
class ScatteredMean:
    """Reduce-scatter and all-gather of messages: an all-to-all of parts, and an all-gather of their means.

    The second message is rounded as the first was; that error is the same on all devices.

    Attributes:
        compressor: of each part of a vector.
    """

    compressor: Compressor
    loses = False
    is_exact = False

    def mean(self, x: Float[Array, " N"], axis: str) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
        """Mean of the decoded parts, and this device's decoded parts."""
        size, dtype, ranks = x.shape[0], x.dtype, jax.lax.axis_size(axis)
        part = -(-size // ranks)
        parts = jnp.pad(x, (0, part * ranks - size)).reshape(ranks, part)
        message = jax.vmap(self.compressor.encode)(parts)

        def decoded(message: tuple[Array, ...]) -> Array:
            return jax.vmap(lambda *one: self.compressor.decode(one, part, dtype))(*message)

        received = decoded(tuple(jax.lax.all_to_all(one, axis, 0, 0, tiled=True) for one in message))
        mine = self.compressor.encode(received.mean(0))
        means = decoded(tuple(jax.lax.all_gather(one, axis) for one in mine))
        return means.reshape(-1)[:size], decoded(message).reshape(-1)[:size]

    def sent(self, size: int, dtype: jnp.dtype, ranks: int) -> int:
        """All parts but its own, and its own mean to all others."""
        return 2 * (ranks - 1) * self.compressor.bytes(-(-size // ranks), dtype)


def parse_compression(text: str, where: str) -> CompressedMean:
    """Compressed mean from text: "", "int8", "int2", "topk:SHARE" or "topk:SHARE,int8".

    Args:
        text: names, separated by commas.
        where: the setting, for messages.

    Raises:
        ConfigError: the text is none of these; says what is legal.
    """
    legal = f"{where}: give int8, int2, topk:SHARE, or topk:SHARE with int8 or int2, such as topk:0.02,int8"
    share: float | None = None
    values: str | None = None
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, colon, argument = word.partition(":")
        if name == "topk" and colon and share is None:
            try:
                share = float(argument)
            except ValueError:
                raise ConfigError(f"{legal}; {argument!r} is not a number.") from None
            if not 0 < share <= 1:
                raise ConfigError(f"{legal}; the share {argument} is not above 0 and at most 1.")
        elif name in VALUE_FORMATS and not colon and values is None:
            values = name
        else:
            raise ConfigError(f"{legal}; {word!r} is not legal here.{closest(name, ('topk', *VALUE_FORMATS))}")
    if share is not None:
        return GatheredMean(TopK(share, VALUE_FORMATS[values or "plain"]()))
    return PlainMean() if values in (None, "plain") else ScatteredMean(VALUE_FORMATS[values]())
