"""A contiguous key-value cache: one slot per position, for a fixed batch of sequences.

Legend: L layers, B batch, S new tokens, T slots, N query heads, K kv heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import sharding
from jaxllm.models import DecoderConfig
from jaxllm.models.context import KV_AXES, Q_AXES, TOKEN_AXES, LayerIndex, Scoring, share_kv_heads
from pallas_kernels.cached_attention import cached_attention

CACHE_AXES = ("layers", "batch", None, "attn_kv_heads", None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseCache:
    """Keys and values of every position so far; slot t of row b holds the token at position t.

    A row's slots beyond its last token hold nothing of meaning: a query sees only slots up to its own position, and
    each is written before it is seen. So rows may have different lengths, padded on the right.

    Attributes:
        k, v: Float[Array, "L B T K H"], or shapes and shardings of them.
    """

    k: Any
    v: Any

    def attend(
        self,
        layer: LayerIndex,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K H"],
        positions: Int[Array, "B S"],
        scoring: Scoring,
    ) -> tuple[Float[Array, "B S N H"], DenseCache]:
        """Writes k, v at their positions, in place where the cache is a loop's carry, then attends."""

        def write_and_attend(
            q: Array, k: Array, v: Array, positions: Array, cache_k: Array, cache_v: Array, layer: Array
        ) -> tuple[Array, Array, Array]:
            rows = jnp.arange(q.shape[0])[:, None]
            cache_k = cache_k.at[layer, rows, positions].set(k.astype(cache_k.dtype))
            cache_v = cache_v.at[layer, rows, positions].set(v.astype(cache_v.dtype))
            out = cached_attention(
                q,
                cache_k,
                cache_v,
                layer,
                positions,
                scale=scoring.scale,
                window=scoring.window,
                softcap=scoring.softcap,
            )
            return out, cache_k, cache_v

        run = sharding.shard_map(
            write_and_attend,
            (Q_AXES, KV_AXES, KV_AXES, TOKEN_AXES, CACHE_AXES, CACHE_AXES, ()),
            (Q_AXES, CACHE_AXES, CACHE_AXES),
        )
        args = (q, share_kv_heads(k), share_kv_heads(v), positions, self.k, self.v, jnp.asarray(layer, jnp.int32))
        out, new_k, new_v = run(*args)
        return out, DenseCache(new_k, new_v)


def empty_cache(config: DecoderConfig, batch: int, slots: int) -> DenseCache:
    """A cache for ``batch`` sequences of up to ``slots`` tokens, in compute dtype, placed by the rules in force.

    Raises:
        NotImplementedError: layers differ in kv_heads or head_dim; one array cannot hold them.
    """
    shapes = {(block.attention.kv_heads, block.attention.head_dim) for block in config.blocks}
    if len(shapes) > 1:
        raise NotImplementedError(
            f"DenseCache holds one (kv_heads, head_dim) for all layers; this model has {sorted(shapes)}."
        )
    kv_heads, head_dim = shapes.pop()
    shards = sharding.axis_size("attn_kv_heads")
    if kv_heads < shards and shards % kv_heads == 0:
        kv_heads = shards  # repeated, as share_kv_heads does
    zeros = jnp.zeros((config.layers, batch, slots, kv_heads, head_dim), jnp.dtype(config.dtype))
    zeros = sharding.constrain(zeros, *CACHE_AXES, what="cache")
    return DenseCache(zeros, zeros)
