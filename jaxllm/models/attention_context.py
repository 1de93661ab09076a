"""What a token may attend to: the seam between the architecture and training, caches and engines.

A context is a pytree. The decoder carries it through its layers; each attention layer hands it q, k, v and gets the
attended values and the (perhaps updated) context back. Everything that differs between training on packed documents,
prefill, decode and paged serving lives behind ``attend``.

Legend: B batch, S sequence, N query heads, K kv heads, H head dim of keys, V of values.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

import sharding
from jaxllm.models.moe.router import Routing
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.ring_attention import Layout, order, places, ring_attention

LayerIndex = Int[Array, ""]
"""Which layer of the model is asking; traced, since layers are scanned."""

Q_AXES = ("batch", "attn_seq", "attn_heads", None)
KV_AXES = ("batch", "attn_kv_seq", "attn_kv_heads", None)
TOKEN_AXES = ("batch", "attn_seq")
KV_TOKEN_AXES = ("batch", "attn_kv_seq")
SINK_AXES = ("attn_heads",)


@dataclass(frozen=True)
class AttentionParams:
    """How one layer scores keys; known when the program is traced.

    Attributes:
        scale: of the products of queries and keys.
        window: how many positions a query sees, its own included; None for all before it.
        softcap: bound of the scores, by tanh.
        latent: the values are this many numbers, the first of the keys; None: they are given.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    latent: int | None = None


@dataclass(frozen=True)
class KVSpec:
    """What a cache holds of a token in one layer: so many heads of keys and of values.

    Attributes:
        latent: the values are a part of the keys, and not held again.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False

    @property
    def elements(self) -> int:
        """In all."""
        return self.kv_heads * (self.key_dim if self.latent else self.key_dim + self.value_dim)


@runtime_checkable
class AttentionContext(Protocol):
    """A pytree with ``attend``.

    One that keeps keys says so by ``is_kv_cache = True``: multi-head latent attention then hands it latents, and no values.
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
        """Attends this step's queries to what this context holds, this step's keys included.

        Args:
            v: None where ``params.latent`` says what values are.
            sinks: a score that each head always sees and that has no value.
        """
        ...


@runtime_checkable
class RoutingContext(AttentionContext, Protocol):
    """A context that wants to know what mixtures of experts choose."""

    def record_routing(self, layer: LayerIndex, routing: Routing) -> RoutingContext:
        """Hears what a layer's router made of its tokens."""
        ...


@runtime_checkable
class KVCacheContext(AttentionContext, Protocol):
    """A context that keeps keys, and knows when a step's tokens need none but their own."""

    def is_fresh_prefill(self, positions: Int[Array, "B S"]) -> Bool[Array, ""] | None:
        """Whether every sequence of this step begins in it; None where that is not to make a difference."""
        ...

    def self_segments(self, tokens: int) -> Segments:
        """The step's sequences, of ``tokens`` in a row, as documents that attend to themselves alone."""
        ...

    def write_latents(
        self, layer: LayerIndex, k: Float[Array, "B S K H"], positions: Int[Array, "B S"]
    ) -> KVCacheContext:
        """Holds keys that are values as well, and attends to nothing."""
        ...


@functools.partial(jax.tree_util.register_dataclass, data_fields=["segment_ids"], meta_fields=["layout"])
@dataclass(frozen=True)
class Segments:
    """The tokens of this call, causally, each document of a packed row on its own.

    Attributes:
        segment_ids: document number of each token, 0 for padding; None when every row is one document.
        layout: which tokens a shard holds where the sequence is split over devices.
    """

    segment_ids: Int[Array, "B S"] | None = None
    layout: Layout = "contiguous"

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
        """Causal attention within each segment; ``layer`` makes no difference here."""
        rule = {"scale": params.scale, "window": params.window, "softcap": params.softcap}
        split, kv_split = sharding.axis_names("attn_seq"), sharding.axis_names("attn_kv_seq")

        def local(
            q: Array, k: Array, v: Array, segments: Array | None, kv_segments: Array | None, sinks: Array | None
        ) -> Array:
            # Causal by place in the row: the same as by position within a document, and what lies above the
            # diagonal is then known before the program runs.
            if kv_split:
                return ring_attention(
                    q, k, v, axis=split[0], layout=self.layout, segment_ids=segments, sinks=sinks, **rule
                )
            if split:
                rule.update(_places(self.layout, split[0], q.shape[1], q.shape[0]))
            return flash_attention(q, k, v, q_segment_ids=segments, kv_segment_ids=kv_segments, sinks=sinks, **rule)

        axes = (Q_AXES, KV_AXES, KV_AXES, TOKEN_AXES, KV_TOKEN_AXES, SINK_AXES)
        attend = sharding.shard_map(local, axes, Q_AXES)
        return attend(q, replicate_kv_heads(k), replicate_kv_heads(v), self.segment_ids, self.segment_ids, sinks), self


def _places(layout: Layout, axis: str, size: int, rows: int) -> dict[str, Int[Array, "..."]]:
    """Places in the row of a shard's queries and of all keys, one after another as the shards hold them."""
    shards = jax.lax.axis_size(axis)
    here = places(layout, jax.lax.axis_index(axis), shards, size)
    everywhere = jnp.asarray(order(layout, shards, shards * size))
    return {
        "q_positions": jnp.broadcast_to(here, (rows, size)),
        "kv_positions": jnp.broadcast_to(everywhere, (rows, shards * size)),
    }


def replicate_kv_heads(x: Float[Array, "B S K H"]) -> Float[Array, "B S K2 H"]:
    """Repeats kv heads up to the number of shards of attention's heads, so that each holds the one its queries need.

    Unchanged where there are at least as many kv heads as shards.
    """
    shards = sharding.axis_size("attn_kv_heads")
    b, s, k, h = x.shape
    if k >= shards or shards % k:
        return x  # divisible already, or refused by the rules with a message
    if not {*sharding.axis_names("seq")} & {*sharding.axis_names("attn_kv_heads")}:
        # What is gathered is gathered before it is more. XLA would also send it around to gather it after.
        x = sharding.constrain(x, "batch", "attn_kv_seq", None, None)
    return jnp.broadcast_to(x[:, :, :, None], (b, s, k, shards // k, h)).reshape(b, s, shards, h)
