"""Cached attention in plain JAX: online softmax over chunks of cache slots, up to the longest row.

Each chunk is read from the stacked cache by its offset, so a layer's slice of the cache is never copied: temporary
memory does not grow with the cache, and work follows the tokens held (for a sliding window, those inside it) rather
than the slots reserved. Online softmax: arXiv:1805.02867.

Legend: L layers, B batch, S new tokens, T cache slots, C chunk, N query heads, K kv heads, G = N / K, H head dim of
keys, V of values.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def cached_attention(
    q: Float[Array, "B S N H"],
    k_cache: Float[Array, "L B T K H"],
    v_cache: Float[Array, "L B T K V"] | None,
    layer: Int[Array, ""],
    positions: Int[Array, "B S"],
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    value_dim: int | None = None,
    chunk: int = 256,
) -> Float[Array, "B S N V"]:
    """Attention to the KV cache: each query sees the slots ``0 .. its position`` of its row; slot t holds position t.

    Slots beyond a row's last position may hold anything, nan included.

    Args:
        q: queries, after RoPE.
        k_cache, v_cache: stacked KV cache of all layers, with this step's tokens already written.
        layer: index of the layer in the stack.
        positions: position of each query, >= 0 and < T.
        scale, window, softcap, sinks: as in ``flash_attention``.
        value_dim: head dim of values when v_cache is None (MLA): the values are then the first ``value_dim`` elements
            of the keys.
        chunk: slots read at a time; the last chunk overlaps its neighbour when T is not a multiple.

    Returns:
        Attention output in ``q.dtype``; softmax in at least float32.
    """
    b, s, n, h = q.shape
    slots, kv = k_cache.shape[2:4]
    chunk = min(chunk, slots)
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    grouped = q.reshape(b, s, kv, n // kv, h).astype(dtype) * (1 / math.sqrt(h) if scale is None else scale)
    read_scores, read_values = (_scores_in_place, _values_in_place) if s == 1 else (_scores, _values)
    reach = jnp.max(positions) + 1
    row_last = jnp.max(positions, axis=1, keepdims=True)  # B 1
    offsets = jnp.arange(chunk)

    def read(cache: Array, start: Array) -> Float[Array, "B C K _"]:
        zero, size = jnp.zeros_like(start), (1, b, chunk, kv, cache.shape[-1])
        return jax.lax.dynamic_slice(cache, (layer.astype(start.dtype), zero, start, zero, zero), size)[0].astype(dtype)

    def body(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, out = carry
        first = i * chunk
        # The last chunk is shifted back to end at the last slot; the slots it shares with its neighbour are masked.
        start = jnp.minimum(first, slots - chunk)
        slot = start + offsets
        visible = (slot <= positions[:, :, None]) & (slot >= first)  # B S C
        if window is not None:
            visible &= slot > positions[:, :, None] - window
        keys = read(k_cache, start)
        scores = read_scores(grouped, keys)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(visible[:, :, None, None], scores, -jnp.inf)
        # The running maximum starts at half the mask value, so masked scores get weight exp(mask / 2) = 0.
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.exp(scores - new_top[..., None])
        keep = jnp.exp(top - new_top)
        total = total * keep + weights.sum(-1)
        # Slots past a row's last token may hold nan, and 0 * nan is nan.
        values = keys[..., :value_dim] if v_cache is None else read(v_cache, start)
        values = jnp.where((slot <= row_last)[:, :, None, None], values, 0.0)
        return new_top, total, out * keep[..., None] + read_values(weights, values)

    zero = jnp.zeros_like(grouped[..., 0])  # varies over the same mesh axes as grouped inside a manual shard_map
    v = v_cache.shape[-1] if v_cache is not None else value_dim or h
    top, total = zero + 0.5 * float(jnp.finfo(dtype).min), zero
    if sinks is not None:
        top, total = zero + sinks.astype(dtype).reshape(kv, n // kv), zero + 1.0
    start = (top, total, jnp.broadcast_to(zero[..., None], (*zero.shape, v)))
    begin = 0 if window is None else jnp.maximum(jnp.min(positions) - window + 1, 0) // chunk
    _, total, out = jax.lax.fori_loop(begin, (reach + chunk - 1) // chunk, body, start)
    return (out / total[..., None]).reshape(b, s, n, v).astype(q.dtype)


def _scores(q: Float[Array, "B S K G H"], k: Float[Array, "B C K H"]) -> Float[Array, "B S K G C"]:
    return jnp.einsum("bskgh,bckh->bskgc", q, k)


def _values(weights: Float[Array, "B S K G C"], v: Float[Array, "B C K V"]) -> Float[Array, "B S K G V"]:
    return jnp.einsum("bskgc,bckh->bskgh", weights, v)


# Decode (one query per row) is memory-bound. A batched matmul per kv head would first transpose the chunk to B K C H;
# as a multiply and a reduction, XLA reads the cache in place.


def _scores_in_place(q: Float[Array, "B 1 K G H"], k: Float[Array, "B C K H"]) -> Float[Array, "B 1 K G C"]:
    scores = jnp.sum(q * k[:, :, :, None], axis=-1)  # B C K G
    return scores.transpose(0, 2, 3, 1)[:, None]


def _values_in_place(weights: Float[Array, "B 1 K G C"], v: Float[Array, "B C K V"]) -> Float[Array, "B 1 K G V"]:
    by_slot = weights[:, 0].transpose(0, 3, 1, 2)  # B C K G
    return jnp.sum(by_slot[..., None] * v[:, :, :, None], axis=1)[:, None]
