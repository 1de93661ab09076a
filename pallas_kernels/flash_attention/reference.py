"""Reference attention: causal GQA in one softmax over all scores; defines the operation.

Legend: B batch, S queries, T keys, N query heads, K kv heads, G = N / K, H head dim of keys, V of values.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def attention_reference(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K V"],
    sinks: Float[Array, " N"] | None,
    *,
    q_positions: Int[Array, "B S"] | None,
    kv_positions: Int[Array, "B T"] | None,
    q_segment_ids: Int[Array, "B S"] | None,
    kv_segment_ids: Int[Array, "B T"] | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Float[Array, "B S N V"], Float[Array, "B S N"]]:
    """Reference attention: (output, logsumexp); all scores are materialised, in at least float32. See
    ``flash_attention``.
    """
    b, s, n, h = q.shape
    t, kv = k.shape[1:3]
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    if q_positions is None or kv_positions is None:
        q_positions, kv_positions = jnp.arange(s)[None], jnp.arange(t)[None]
    visible = kv_positions[:, None, :] <= q_positions[:, :, None]
    if window is not None:
        visible = visible & (kv_positions[:, None, :] > q_positions[:, :, None] - window)
    if q_segment_ids is not None and kv_segment_ids is not None:
        q_segments, kv_segments = q_segment_ids[:, :, None], kv_segment_ids[:, None, :]
        visible = visible & (q_segments == kv_segments) & (q_segments != 0)
    visible = visible[:, None, None]  # B K G S T

    grouped = q.reshape(b, s, kv, n // kv, h).astype(dtype)
    scores = jnp.einsum("bskgh,btkh->bkgst", grouped, k.astype(dtype)) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    # In a row that sees nothing, both branches of every where stay finite, so its gradient is zero and not nan.
    top = jnp.max(jnp.where(visible, scores, -jnp.inf), axis=-1, keepdims=True)
    sink = None if sinks is None else sinks.astype(dtype).reshape(1, kv, -1, 1, 1)
    if sink is not None:
        top = jnp.maximum(top, sink)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(jnp.where(visible, scores - top, -jnp.inf))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink - top)
    safe = jnp.where(total == 0.0, 1.0, total)
    lse = jnp.where(total == 0.0, -jnp.inf, top + jnp.log(safe))[..., 0]  # B K G S
    out = jnp.einsum("bkgst,btkh->bskgh", weights / safe, v.astype(dtype))
    return out.reshape(b, s, n, -1).astype(q.dtype), lse.transpose(0, 3, 1, 2).reshape(b, s, n)
