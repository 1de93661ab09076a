"""Arrays by place. Explicit axes stay where they are; the leading dimensions are never split over them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def at(pool: Array, *places: Any) -> Array:
    """``pool[places]``; places may be traced."""
    for place in places:
        pool = jax.lax.dynamic_index_in_dim(pool, place, 0, keepdims=False)
    return pool


def put(pool: Array, value: Array, *places: Any) -> Array:
    """``pool`` with ``value`` at ``places``."""
    value = value[(None,) * len(places)]
    starts = [jnp.asarray(p, jnp.int32) for p in (*places, *(0,) * (pool.ndim - len(places)))]
    return jax.lax.dynamic_update_slice(pool, value, starts)


def zeros(like: Any, *leading: int) -> Array:
    """Zeros of the type of ``like``, and split as it is, with dimensions before its own."""
    spec = like.sharding.spec if like.sharding is not None else ()
    there = jax.P(*(None,) * len(leading), *spec)
    shape = (*leading, *like.shape)
    if all(part is None for part in there):
        return jnp.zeros(shape, like.dtype)
    return jnp.zeros(shape, like.dtype, out_sharding=there)


def zeros_on_host(like: Any, *leading: int) -> Array:
    """``zeros`` in the host's memory. A scalar is sent there, for the device has no room for the whole."""
    zero = jax.device_put(jnp.zeros((), like.dtype), jax.memory.Space.Host)
    spec = like.sharding.spec if like.sharding is not None else ()
    there = jax.P(*(None,) * len(leading), *spec)
    shape = (*leading, *like.shape)
    if all(part is None for part in there):
        return jnp.broadcast_to(zero, shape)
    return jnp.broadcast_to(zero, shape, out_sharding=there)


def added(sums: Any, more: Any) -> Any:
    """Sum of two trees, in the types of the first."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, more)
