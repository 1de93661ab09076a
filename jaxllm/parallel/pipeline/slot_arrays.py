"""Slot arrays: pools of buffers whose leading dimensions are slots, which are never split over a mesh axis."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def read_slot(pool: Array, *slots: Any) -> Array:
    """Value of a slot, ``pool[slots]``; slot indices may be traced."""
    for slot in slots:
        pool = jax.lax.dynamic_index_in_dim(pool, slot, 0, keepdims=False)
    return pool


def write_slot(pool: Array, value: Array, *slots: Any) -> Array:
    """Pool with ``value`` in a slot; slot indices may be traced."""
    value = value[(None,) * len(slots)]
    starts = [jnp.asarray(p, jnp.int32) for p in (*slots, *(0,) * (pool.ndim - len(slots)))]
    return jax.lax.dynamic_update_slice(pool, value, starts)


def zeros(like: Any, *leading: int) -> Array:
    """Zeros with the dtype and sharding of ``like``, with ``leading`` dimensions before its own."""
    spec = like.sharding.spec if like.sharding is not None else ()
    there = jax.P(*(None,) * len(leading), *spec)
    shape = (*leading, *like.shape)
    if all(part is None for part in there):
        return jnp.zeros(shape, like.dtype)
    return jnp.zeros(shape, like.dtype, out_sharding=there)


def zeros_on_host(like: Any, *leading: int) -> Array:
    """``zeros`` in host memory, broadcast there from a scalar, because the device has no room for the whole."""
    zero = jax.device_put(jnp.zeros((), like.dtype), jax.memory.Space.Host)
    spec = like.sharding.spec if like.sharding is not None else ()
    there = jax.P(*(None,) * len(leading), *spec)
    shape = (*leading, *like.shape)
    if all(part is None for part in there):
        return jnp.broadcast_to(zero, shape)
    return jnp.broadcast_to(zero, shape, out_sharding=there)


def add_trees(sums: Any, more: Any) -> Any:
    """Sum of two trees, in the dtypes of the first."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, more)
