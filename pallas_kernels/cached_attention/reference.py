"""Reference cached attention: one softmax over the whole KV cache; defines the operation.

Legend: L layers, B batch, S new tokens, T cache slots, N query heads, K kv heads, G = N / K, H head dim.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def cached_attention_reference(
    q: Float[Array, "B S N H"],
    k_cache: Float[Array, "L B T K H"],
    v_cache: Float[Array, "L B T K H"],
    layer: Int[Array, ""],
    positions: Int[Array, "B S"],
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Array, "B S N H"]:
    """Reference attention to the KV cache: each query sees the slots ``0 .. its position`` of its row.

    Slot t holds the token at position t. Softmax in at least float32; the result has ``q.dtype``.
    """
    b, s, n, h = q.shape
    k, v = k_cache[layer], v_cache[layer]
    kv = k.shape[2]
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    grouped = q.reshape(b, s, kv, n // kv, h).astype(dtype) * (1 / math.sqrt(h) if scale is None else scale)
    scores = jnp.einsum("bskgh,btkh->bkgst", grouped, k.astype(dtype))
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    slots = jnp.arange(k.shape[1])[None, None, :]
    visible = slots <= positions[:, :, None]
    if window is not None:
        visible &= slots > positions[:, :, None] - window
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    # Slots past a row's last token may hold nan, and 0 * nan is nan.
    v = jnp.where(visible.any(axis=1)[:, :, None, None], v, 0).astype(dtype)
    return jnp.einsum("bkgst,btkh->bskgh", weights, v).reshape(q.shape).astype(q.dtype)
