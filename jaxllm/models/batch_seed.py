"""RNG seed of a batch: a hash of its tokens, from which the forward and backward pass draw random numbers.

A seed that follows from the batch needs no state: a resumed run, a recomputed block and every mesh draw alike.

Legend: B batch, S sequence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

_seed: ContextVar[Array | None] = ContextVar("batch_seed", default=None)


def batch_seed(tokens: Int[Array, "B S"]) -> UInt32[Array, ""]:
    """RNG seed of a batch, a hash of its tokens; equal on every mesh, because sums of integers do not round."""
    places = jnp.arange(tokens.shape[1], dtype=jnp.uint32) * jnp.uint32(2654435761) + jnp.uint32(1)
    return jnp.sum(tokens.astype(jnp.uint32) * places, dtype=jnp.uint32)


@contextlib.contextmanager
def with_batch_seed(tokens: Int[Array, "B S"]) -> Iterator[None]:
    """Context manager: traces the body with the batch's RNG seed."""
    token = _seed.set(batch_seed(tokens))
    try:
        yield
    finally:
        _seed.reset(token)


def current_batch_seed() -> UInt32[Array, ""] | None:
    """RNG seed of the batch that is traced; None outside of ``with_batch_seed``."""
    return _seed.get()
