"""Attention context: what a token may attend to, behind one interface for training, KV caches and serving engines.

A context is a pytree that the decoder carries through its layers. Each attention layer passes q, k, v to ``attend`` and
gets the attention output and the (possibly updated) context back. Everything that differs between training on packed
documents (``Segments``), prefill, decode and paged serving (a KV cache) is behind ``attend``. Context parallelism is
here too: ring attention, all-gathered keys and values, and the all-to-all of Ulysses.

Legend: B batch, S sequence, N query heads, K kv heads, H head dim of keys, V head dim of values.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

import sharding
from jaxllm.models.moe.router import Routing
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.ring_attention import Layout, order, places, ring_attention

LayerIndex = Int[Array, ""]
"""Index of the calling layer in the model; traced, because layers are scanned."""

Q_AXES = ("batch", "attn_seq", "attn_heads", None)
KV_AXES = ("batch", "attn_kv_seq", "attn_kv_heads", None)
TOKEN_AXES = ("batch", "attn_seq")
KV_TOKEN_AXES = ("batch", "attn_kv_seq")
SINK_AXES = ("attn_heads",)


@dataclass(frozen=True)
class AttentionParams:
    """Static parameters of one layer's attention, known when the program is traced.

    Attributes:
        scale: factor on the scores ``q @ k``.
        window: sliding window, the number of positions that a query sees, its own included; None for full causal
            attention.
        softcap: soft cap of the scores, by tanh.
        latent: absorbed multi-head latent attention: the values are the first ``latent`` elements of the keys; None:
            values are given.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    latent: int | None = None


@dataclass(frozen=True)
class KVSpec:
    """Shape of one token's KV cache entry in one layer.

    Attributes:
        kv_heads: heads of keys and values.
        key_dim: elements of a key per head.
        value_dim: elements of a value per head.
        latent: whether values are a part of the keys and are not stored again (multi-head latent attention).
        slices: slices that a latent is stored in, one on each tensor shard, each with all that is a key only
            (``MLAConfig.slices``).
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False
    slices: int = 1

    @property
    def elements(self) -> int:
        """Elements stored per token and layer, in all slices."""
        if self.latent:
            return self.value_dim + self.slices * (self.key_dim - self.value_dim)
        return self.kv_heads * (self.key_dim + self.value_dim)


@runtime_checkable
class AttentionContext(Protocol):
    """Protocol of attention contexts: a pytree with ``attend``.

    A KV cache sets ``is_kv_cache = True``; multi-head latent attention then passes it latents and no values.
    """

    def attend(
        self,
        layer: LayerIndex,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K V"] | None,
        positions: Int[Array, "B S"],
        params: AttentionParams,
        sinks: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "B S N V"], AttentionContext]:
        """Attention output of this step's queries over the keys of the context, this step's included; the new context.

        Args:
            v: None where values are a part of the keys (``params.latent``).
            sinks: attention sink of each head: a score in its softmax that has no value.
        """
        ...


@runtime_checkable
class RoutingContext(AttentionContext, Protocol):
    """Context that records the routing decisions of mixtures of experts, for losses and metrics."""

    def record_routing(self, layer: LayerIndex, routing: Routing) -> RoutingContext:
        """Context with the routing decisions of one layer added."""
        ...


@runtime_checkable
class RowSplitContext(AttentionContext, Protocol):
    """Context with arrays of tokens, which layers with a layout of their own split in another way."""

    def split_rows(self) -> RowSplitContext:
        """Context whose tokens are split over devices as the sharding rules in force split them."""
        ...


@runtime_checkable
class KVCacheContext(AttentionContext, Protocol):
    """KV cache as an attention context, with what multi-head latent attention needs of it."""

    def is_fresh_prefill(self, positions: Int[Array, "B S"]) -> Bool[Array, ""] | None:
        """Whether no sequence of this step has cached tokens (all are at their first chunk of prefill).

        None where both cases are to be computed alike.
        """
        ...

    def self_segments(self, tokens: int) -> Segments:
        """Context in which the sequences of this step, ``tokens`` per row, attend to this step's keys alone."""
        ...

    def write_latents(
        self, layer: LayerIndex, k: Float[Array, "B S K H"], positions: Int[Array, "B S"]
    ) -> KVCacheContext:
        """Writes keys that are values too (latents) to the cache, without attention."""
        ...


@runtime_checkable
class LatentSlicesContext(KVCacheContext, Protocol):
    """KV cache whose latents may be stored in slices (TPLA), see ``MLAConfig.slices``."""

    def attend_slices(
        self,
        layer: LayerIndex,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B S 1 H"],
        factors: Float[Array, " I"],
        params: AttentionParams,
    ) -> tuple[Float[Array, "B S N C"], LatentSlicesContext]:
        """Attention output over latents, as ``attend``, of generated tokens slice by slice; the new context.

        Args:
            factors: factor of each slice on its part of the scores.
        """
        ...


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["segment_ids", "ring"], meta_fields=["layout", "ring_sizes"]
)
@dataclass(frozen=True)
class Segments:
    """Context of training: causal attention within each document of a packed row (sequence packing).

    Attributes:
        segment_ids: document number of each token, 0 for padding; None when every row is one document.
        layout: assignment of tokens to shards where the sequence is split over devices (context parallelism).
        ring: index of the ring size in use, where documents lie in slots (``jaxllm.data.context_by_need``): a
            document is then split over one ring at most, and its positions, not a layout, say what is visible.
        ring_sizes: the ring sizes that there are.
    """

    segment_ids: Int[Array, "B S"] | None = None
    layout: Layout = "contiguous"
    ring: Int[Array, ""] | None = None
    ring_sizes: tuple[int, ...] = ()

    def split_rows(self) -> Segments:
        """Context whose tokens are split over devices as the sharding rules in force split them."""
        ids = self.segment_ids
        return self if ids is None else replace(self, segment_ids=sharding.constrain(ids, "batch", "seq"))

    def attend(
        self,
        layer: LayerIndex,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K V"],
        positions: Int[Array, "B S"],
        params: AttentionParams,
        sinks: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "B S N V"], Segments]:
        """Causal attention within each segment; ``layer`` is not used.

        Flash attention per shard. Where keys stay split over the sequence, ring attention; where they are all-gathered,
        flash attention with the positions of the layout.
        """
        rule = {"scale": params.scale, "window": params.window, "softcap": params.softcap}
        split, kv_split = sharding.axis_names("attn_seq"), sharding.axis_names("attn_kv_seq")

        def local(
            q: Array,
            k: Array,
            v: Array,
            segments: Array | None,
            kv_segments: Array | None,
            sinks: Array | None,
            positions: Array | None,
            ring: Array | None,
        ) -> Array:
            # The causal mask is by index in the row, which is equal to the mask by position within a document, and
            # makes the blocks above the diagonal known when the program is traced.
            if kv_split:
                rule.update({"axis": split[0], "segment_ids": segments, "sinks": sinks})
                if ring is None:
                    return ring_attention(q, k, v, layout=self.layout, **rule)
                rule.update({"positions": positions, "ring_sizes": self.ring_sizes, "ring": ring})
                return ring_attention(q, k, v, layout=None, **rule)
            if split:
                rule.update(_places(self.layout, split[0], q.shape[1], q.shape[0]))
            return flash_attention(q, k, v, q_segment_ids=segments, kv_segment_ids=kv_segments, sinks=sinks, **rule)

        axes = (Q_AXES, KV_AXES, KV_AXES, TOKEN_AXES, KV_TOKEN_AXES, SINK_AXES, TOKEN_AXES, ())
        attend = sharding.shard_map(local, axes, Q_AXES)
        k, v, places = replicate_kv_heads(k), replicate_kv_heads(v), None if self.ring is None else positions
        return attend(q, k, v, self.segment_ids, self.segment_ids, sinks, places, self.ring), self


def _places(layout: Layout, axis: str, size: int, rows: int) -> dict[str, Int[Array, "..."]]:
    """Indices in the row of a shard's queries and of all keys, in the order in which the shards hold them."""
    shards = jax.lax.axis_size(axis)
    here = places(layout, jax.lax.axis_index(axis), shards, size)
    everywhere = jnp.asarray(order(layout, shards, shards * size))
    return {
        "q_positions": jnp.broadcast_to(here, (rows, size)),
        "kv_positions": jnp.broadcast_to(everywhere, (rows, shards * size)),
    }


def replicate_kv_heads(x: Float[Array, "B S K H"]) -> Float[Array, "B S K2 H"]:
    """Repeats kv heads up to the number of head shards, so that each shard has the kv head of its queries (GQA).

    Unchanged where there are at least as many kv heads as shards.
    """
    shards = sharding.axis_size("attn_kv_heads")
    b, s, k, h = x.shape
    if k >= shards or shards % k:
        return x  # divisible already, or the sharding rules raise an error
    if not {*sharding.axis_names("seq")} & {*sharding.axis_names("attn_kv_heads")}:
        # All-gather the heads before they are repeated: XLA would otherwise also move the repeated ones.
        x = sharding.constrain(x, "batch", "attn_kv_seq", None, None)
    repeated = jnp.broadcast_to(x[:, :, :, None], (b, s, k, shards // k, h)).reshape(b, s, shards, h)
    if k < sharding.axis_size("act_kv_heads") < shards:
        # Split over tensor here: XLA cannot invert this slice and the all-to-all of Ulysses in one step.
        repeated = sharding.constrain(repeated, "batch", "seq", "act_kv_heads", None)
    return repeated
