"""Attention context of a chunk of tokens in training: its queries see the keys of the row up to the chunk.

The keys and values of a row are in a cache, which the chunks of its forward pass fill from first to last. The backward
pass reads them there again, so that no chunk saves keys and values of its own (FlexLLM, arXiv:2402.18789).

Legend: R rows, S tokens of a row, T tokens of a chunk, N query heads, K kv heads, H head dim of keys, V of values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxllm.models.attention_context import AttentionParams, LayerIndex
from pallas_kernels.flash_attention import RESIDUALS, flash_attention

Cache = tuple[Array, Array]
"""Keys [R S K H] and values [R S K V] of the rows in one layer."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["caches", "start", "segment_ids", "keys", "values"],
    meta_fields=[],
)
@dataclass(frozen=True)
class ChunkContext:
    """Attention context of one chunk in a group of consecutive layers.

    Attributes:
        caches: keys and values of the rows up to this chunk, for each layer of the group in order.
        start: index in the row of the chunk's first token.
        segment_ids: document number of each token of the rows, 0 for padding.
        keys, values: of this chunk, for the layers that were computed so far: [R T K H] and [R T K V] each.
    """

    caches: tuple[Cache, ...]
    start: Int[Array, ""]
    segment_ids: Int[Array, "R S"]
    keys: tuple[Array, ...] = ()
    values: tuple[Array, ...] = ()

    def attend(
        self,
        layer: LayerIndex,
        q: Float[Array, "R T N H"],
        k: Float[Array, "R T K H"],
        v: Float[Array, "R T K V"],
        positions: Int[Array, "R T"],
        params: AttentionParams,
        sinks: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "R T N V"], ChunkContext]:
        """Causal attention of the chunk's queries in their documents; layers are counted by the calls of ``attend``."""
        cache = self.caches[len(self.keys)]
        out = _attention(params, checkpoint_name(q, RESIDUALS[0]), k, v, cache, self.start, self.segment_ids, sinks)
        added = replace(self, keys=(*self.keys, k), values=(*self.values, v))
        return checkpoint_name(out, RESIDUALS[3]), added


@functools.partial(jax.tree_util.register_dataclass, data_fields=["keys", "values"], meta_fields=[])
@dataclass(frozen=True)
class RecordedShapes:
    """Attention context that attends to nothing and keeps keys and values, to find their shapes.

    Attributes:
        keys, values: as of ``ChunkContext``.
    """

    keys: tuple[Array, ...] = ()
    values: tuple[Array, ...] = ()

    def attend(
        self,
        layer: LayerIndex,
        q: Float[Array, "R T N H"],
        k: Float[Array, "R T K H"],
        v: Float[Array, "R T K V"],
        positions: Int[Array, "R T"],
        params: AttentionParams,
        sinks: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "R T N V"], RecordedShapes]:
        """Zeros of the output's shape."""
        out = jnp.zeros((*q.shape[:3], v.shape[-1]), q.dtype)
        return out, RecordedShapes((*self.keys, k), (*self.values, v))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    params: AttentionParams,
    q: Array,
    k: Array,
    v: Array,
    cache: Cache,
    start: Array,
    segment_ids: Array,
    sinks: Array | None,
) -> Array:
    """Attention of a chunk, whose keys and values are put into the cache first.

    Its backward pass saves neither keys nor values: it reads them in the cache that it is given, which must hold the
    chunk by then. ``jaxllm.posttrain.coserve.chunked_gradients`` alone uses it, and gives it such a cache.
    """
    keys, values = put_chunk(cache, (k, v), start)
    return _attend(params, q, keys, values, start, segment_ids, sinks)


def _attention_forward(
    params: AttentionParams,
    q: Array,
    k: Array,
    v: Array,
    cache: Cache,
    start: Array,
    segment_ids: Array,
    sinks: Array | None,
) -> tuple[Any, tuple]:
    out = _attention(params, q, k, v, cache, start, segment_ids, sinks)
    return out, (q, cache, start, segment_ids, sinks)


def _attention_backward(params: AttentionParams, residuals: tuple, out: Array) -> tuple:
    q, cache, start, segment_ids, sinks = residuals
    tokens = q.shape[1]
    _, pullback = jax.vjp(
        lambda q, keys, values: _attend(params, q, keys, values, start, segment_ids, sinks), q, *cache
    )
    of_q, *of_cache = pullback(out)
    own = [jax.lax.dynamic_slice_in_dim(x, start, tokens, 1) for x in of_cache]
    # What the cache held before the chunk: its gradient is that of the former chunks' keys and values.
    former = put_chunk(of_cache, [jnp.zeros_like(x) for x in own], start)
    return of_q, *own, tuple(former), *(_no_cotangent(x) for x in (start, segment_ids)), _zeros(sinks)


_attention.defvjp(_attention_forward, _attention_backward)


def put_chunk(cache: Sequence[Array], chunk: Sequence[Array], start: Array) -> tuple[Array, ...]:
    """Arrays of whole rows with those of a chunk at ``start``, along axis 1."""
    return tuple(
        jax.lax.dynamic_update_slice_in_dim(whole, part.astype(whole.dtype), start, 1)
        for whole, part in zip(cache, chunk, strict=True)
    )


def _attend(
    params: AttentionParams, q: Array, keys: Array, values: Array, start: Array, segment_ids: Array, sinks: Array | None
) -> Array:
    rows, tokens, row = q.shape[0], q.shape[1], keys.shape[1]
    places = jnp.arange(row, dtype=jnp.int32)
    return flash_attention(
        q,
        keys,
        values,
        sinks=sinks,
        q_positions=jnp.broadcast_to(start + places[:tokens], (rows, tokens)),
        kv_positions=jnp.broadcast_to(places, (rows, row)),
        q_segment_ids=jax.lax.dynamic_slice_in_dim(segment_ids, start, tokens, 1),
        kv_segment_ids=segment_ids,
        scale=params.scale,
        window=params.window,
        softcap=params.softcap,
    )


def _no_cotangent(x: Array) -> np.ndarray:
    """Cotangent of integers."""
    return np.zeros(x.shape, jax.dtypes.float0)


def _zeros(x: Array | None) -> Array | None:
    """Cotangent of frozen parameters, which nobody asks for."""
    return None if x is None else jnp.zeros_like(x)
