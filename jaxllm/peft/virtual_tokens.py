"""Virtual tokens: places at the start of each packed row that all documents of the row attend to.

Their keys and values are those of a prefix (``jaxllm.peft.methods.prefix``), or follow from learned embeddings
(``jaxllm.peft.methods.prompt``). A row holds them once, however many documents it has: each document sees them before
its own tokens, and the others not at all. Positions of documents are counted from the end of the virtual tokens.

Legend: B batch, S sequence, P virtual tokens, N query heads, K kv heads, H head dim, V head dim of values.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import sharding
from jaxllm.models.attention_context import (
    KV_AXES,
    KV_TOKEN_AXES,
    Q_AXES,
    SINK_AXES,
    TOKEN_AXES,
    AttentionParams,
    LayerIndex,
    replicate_kv_heads,
)
from pallas_kernels.flash_attention import flash_attention, flash_attention_and_lse
from pallas_kernels.ring_attention import Layout


@functools.partial(jax.tree_util.register_dataclass, data_fields=["segment_ids"], meta_fields=["layout", "tokens"])
@dataclass(frozen=True)
class VirtualTokens:
    """Context in which a token attends to the virtual tokens of its row and to its document, see
    ``jaxllm.models.attention_context``.

    Attributes:
        segment_ids: document number of each token, 0 for padding and virtual tokens; None: one document a row.
        layout: as in ``Segments``; the sequence is not split over devices.
        tokens: number of virtual tokens.
    """

    segment_ids: Int[Array, "B S"] | None = None
    layout: Layout = "contiguous"
    tokens: int = 1

    def attend(
        self,
        layer: LayerIndex,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K V"],
        positions: Int[Array, "B S"],
        params: AttentionParams,
        sinks: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "B S N V"], VirtualTokens]:
        """Causal attention within the virtual tokens, and of each document to these and to itself.

        The two parts of a document's softmax are joined by their logsumexp; a sliding window counts positions, those
        of virtual tokens included.
        """
        first = self.tokens
        rule = {"scale": params.scale, "softcap": params.softcap}

        def local(
            q: Array,
            k: Array,
            v: Array,
            segments: Array | None,
            kv_segments: Array | None,
            places: Array,
            sinks: Array | None,
        ) -> Array:
            virtual = flash_attention(
                q[:, :first], k[:, :first], v[:, :first], sinks=sinks, **rule, window=params.window
            )
            own, lse = flash_attention_and_lse(
                q[:, first:],
                k[:, first:],
                v[:, first:],
                q_segment_ids=None if segments is None else segments[:, first:],
                kv_segment_ids=None if kv_segments is None else kv_segments[:, first:],
                sinks=sinks,
                window=params.window,
                **rule,
            )
            before = jnp.broadcast_to(jnp.arange(first, dtype=places.dtype), (q.shape[0], first))
            shared, shared_lse = flash_attention_and_lse(
                q[:, first:],
                k[:, :first],
                v[:, :first],
                q_positions=places[:, first:],
                kv_positions=before,
                window=params.window,
                **rule,
            )
            return jnp.concatenate([virtual, joined(own, lse, shared, shared_lse)], axis=1)

        axes = (Q_AXES, KV_AXES, KV_AXES, TOKEN_AXES, KV_TOKEN_AXES, TOKEN_AXES, SINK_AXES)
        attend = sharding.shard_map(local, axes, Q_AXES)
        ids = self.segment_ids
        return attend(q, replicate_kv_heads(k), replicate_kv_heads(v), ids, ids, positions, sinks), self


def joined(
    one: Float[Array, "B S N V"],
    one_lse: Float[Array, "B S N"],
    other: Float[Array, "B S N V"],
    other_lse: Float[Array, "B S N"],
) -> Float[Array, "B S N V"]:
    """Attention over two sets of keys from the outputs and logsumexps over each; a set that is not seen counts nothing.

    The first set or the second may be unseen (a logsumexp of minus infinity), not both.
    """
    share = jax.nn.sigmoid(_seen(one_lse) - _seen(other_lse))[..., None].astype(one.dtype)
    return share * one + (1 - share) * other


def _seen(lse: Array) -> Array:
    """Logsumexp without infinities, whose differences have no gradient."""
    return jnp.maximum(lse, -1e30)
