"""Dense KV cache: contiguous, one slot per position, for a fixed batch of sequences.

Legend: L layers, B batch, S new tokens, T slots, N query heads, K kv heads, H head dim of keys, V of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

import sharding
from jaxllm.models import DecoderConfig, Segments
from jaxllm.models.attention_context import (
    KV_AXES,
    Q_AXES,
    SINK_AXES,
    TOKEN_AXES,
    AttentionParams,
    LayerIndex,
    replicate_kv_heads,
)
from pallas_kernels.cached_attention import cached_attention

CACHE_AXES = ("layers", "batch", None, "attn_kv_heads", None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseCache:
    """Dense KV cache: keys and values of every position so far; slot t of row b holds the token at position t.

    Slots after a row's last token are undefined: a query attends only to slots up to its own position, and each of
    those is written first. So rows may have different lengths, padded on the right.

    Attributes:
        k, v: Float[Array, "L B T K H"], or their shapes and shardings. v is None if values are a part of the keys
            (``AttentionParams.latent``).
    """

    k: Any
    v: Any
    is_kv_cache: ClassVar[bool] = True

    def is_fresh_prefill(self, positions: Int[Array, "B S"]) -> Bool[Array, ""]:
        """Whether the tokens are the first of their rows."""
        return jnp.all(positions == jnp.arange(positions.shape[1]))

    def self_segments(self, tokens: int) -> Segments:
        """Segments of the batch: each row is a document."""
        return Segments()

    def write_latents(self, layer: LayerIndex, k: Float[Array, "B S K H"], positions: Int[Array, "B S"]) -> DenseCache:
        """Writes MLA latents (k) at their positions."""

        def write(layer: Array, positions: Array, k: Array, cache_k: Array) -> Array:
            with jax.named_scope("kv_write"):
                return cache_k.at[layer, jnp.arange(k.shape[0])[:, None], positions].set(k.astype(cache_k.dtype))

        run = sharding.shard_map(write, ((), TOKEN_AXES, KV_AXES, CACHE_AXES), CACHE_AXES)
        return DenseCache(run(jnp.asarray(layer, jnp.int32), positions, replicate_kv_heads(k), self.k), None)

    def attend(
        self,
        layer: LayerIndex,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K V"] | None,
        positions: Int[Array, "B S"],
        params: AttentionParams,
        sinks: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "B S N V"], DenseCache]:
        """Writes k, v at their positions, in place if the cache is a loop's carry, then attends."""

        def write_and_attend(
            layer: Array,
            positions: Array,
            q: Array,
            sinks: Array | None,
            k: Array,
            cache_k: Array,
            v: Array | None = None,
            cache_v: Array | None = None,
        ) -> tuple[Array, ...]:
            with jax.named_scope("kv_write"):
                rows = jnp.arange(q.shape[0])[:, None]
                cache_k = cache_k.at[layer, rows, positions].set(k.astype(cache_k.dtype))
                if v is not None and cache_v is not None:
                    cache_v = cache_v.at[layer, rows, positions].set(v.astype(cache_v.dtype))
            out = cached_attention(
                q,
                cache_k,
                cache_v,
                layer,
                positions,
                scale=params.scale,
                window=params.window,
                softcap=params.softcap,
                sinks=sinks,
                value_dim=params.latent,
            )
            return (out, cache_k) if cache_v is None else (out, cache_k, cache_v)

        count = 1 if v is None else 2
        run = sharding.shard_map(
            write_and_attend,
            ((), TOKEN_AXES, Q_AXES, SINK_AXES, *(KV_AXES, CACHE_AXES) * count),
            (Q_AXES, *(CACHE_AXES,) * count),
        )
        held = (replicate_kv_heads(k), self.k, *(() if v is None else (replicate_kv_heads(v), self.v)))
        out, new_k, *new_v = run(jnp.asarray(layer, jnp.int32), positions, q, sinks, *held)
        return out, DenseCache(new_k, new_v[0] if new_v else None)


def empty_cache(config: DecoderConfig, batch: int, slots: int) -> DenseCache:
    """Empty dense KV cache for ``batch`` sequences of up to ``slots`` tokens, in compute dtype, sharded by the rules.

    Raises:
        NotImplementedError: layers differ in kv_heads or head_dim; one array cannot hold them.
    """
    shapes = {block.attention.kv_spec for block in config.blocks}
    if len(shapes) > 1:
        listed = ", ".join(sorted(map(str, shapes)))
        raise NotImplementedError(f"DenseCache holds one (kv_heads, head_dim) for all layers; this model has {listed}.")
    shape = shapes.pop()
    kv_heads = shape.kv_heads
    shards = sharding.axis_size("attn_kv_heads")
    if kv_heads < shards and shards % kv_heads == 0:
        kv_heads = shards  # repeated, as replicate_kv_heads does

    def zeros(dim: int) -> Array:
        empty = jnp.zeros((config.layers, batch, slots, kv_heads, dim), jnp.dtype(config.dtype))
        return sharding.constrain(empty, *CACHE_AXES, what="cache")

    return DenseCache(zeros(shape.key_dim), None if shape.latent else zeros(shape.value_dim))
