"""Retaining heads: small networks that score the entries of a KV cache by their query, key and value (Locret).

A head of each layer reads a token's queries, keys and values of all heads and predicts, for each kv head, the largest
attention score that a later query will give the token's key: a causal importance score (arXiv:2410.01805, section 3.2).

Legend: L layers, B batch, S sequence, N query heads, K kv heads, H head dim, D = N H + 2 K H, R hidden units.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.models.attention_context import AttentionParams, LayerIndex, Segments
from jaxllm.models.decoder import DecoderConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RetainingHeads:
    """Retaining heads of all layers.

    Attributes:
        up, up_bias: Float[Array, "L D R"] and Float[Array, "L R"].
        down, down_bias: Float[Array, "L R K"] and Float[Array, "L K"].
    """

    up: Any
    up_bias: Any
    down: Any
    down_bias: Any

    def score(
        self,
        layer: LayerIndex,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K H"],
    ) -> Float[Array, "B S K"]:
        """Causal importance score of each token in a layer, by kv head; queries and keys are those after RoPE."""
        b, s = q.shape[:2]
        x = jnp.concatenate([one.reshape(b, s, -1) for one in (q, k, v)], axis=-1)
        hidden = jax.nn.silu(x @ self.up[layer].astype(x.dtype) + self.up_bias[layer].astype(x.dtype))
        return hidden @ self.down[layer].astype(x.dtype) + self.down_bias[layer].astype(x.dtype)


def input_dim(config: DecoderConfig) -> int:
    """Numbers that a retaining head reads of a token (D).

    Raises:
        ValueError: the model has layers of several kinds, or without queries, keys and values of their own.
    """
    specs = {(block.attention.kv_spec, getattr(block.attention, "heads", 0)) for block in config.blocks}
    (spec, heads), *others = specs
    if others or spec.latent or spec.key_dim != spec.value_dim:
        raise ValueError(
            "retaining heads are for models whose layers all have grouped-query attention of the same sizes; use corm "
            "or pyramid."
        )
    return (heads + 2 * spec.kv_heads) * spec.key_dim


def new_heads(config: DecoderConfig, hidden: int, seed: int) -> RetainingHeads:
    """Untrained retaining heads with so many hidden units, in float32."""
    wide, kv = input_dim(config), config.blocks[0].attention.kv_spec.kv_heads
    up = jax.random.normal(jax.random.key(seed), (config.layers, wide, hidden)) / np.sqrt(wide)
    zeros = jnp.zeros((config.layers, hidden))
    return RetainingHeads(up, zeros, jnp.zeros((config.layers, hidden, kv)), jnp.zeros((config.layers, kv)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadTraining:
    """Attention context of the heads' training: the model runs as ever, and each layer adds to the loss.

    The label of a token is the largest score (before the softmax) that a later query of its kv head's query heads gives
    its key; near queries do not count, because recent entries stay in any case. The loss is the smooth L1 distance from
    it, and ``smoothing`` times the square of the difference of neighbouring tokens' scores.

    Attributes:
        heads: retaining heads; gradients reach these alone.
        loss: Float[Array, ""], sum over the layers so far.
        segments: documents of the rows.
        smoothing: weight of the second term; static.
        distance: tokens from which on a query is a later one; static.
    """

    heads: RetainingHeads
    loss: Any
    segments: Segments
    smoothing: float = field(metadata={"static": True})
    distance: int = field(metadata={"static": True})

    def attend(
        self,
        layer: LayerIndex,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K H"],
        positions: Int[Array, "B S"],
        params: AttentionParams,
        sinks: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "B S N H"], HeadTraining]:
        """Attention output of ``Segments``; the context with the layer's loss added."""
        out, _ = self.segments.attend(layer, q, k, v, positions, params, sinks)
        q, k, v = map(jax.lax.stop_gradient, (q, k, v))
        wanted = importance(q, k, params.scale, self.distance, self.segments.segment_ids)
        loss = self.loss + head_loss(self.heads.score(layer, q, k, v), wanted, self.smoothing)
        return out, HeadTraining(self.heads, loss, self.segments, self.smoothing, self.distance)


def importance(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    scale: float,
    distance: int = 1,
    segments: Int[Array, "B S"] | None = None,
) -> Float[Array, "B S K"]:
    """Largest score of each key by a query of its document at least ``distance`` tokens later; -inf without one."""
    b, s, _, h = q.shape
    scores = jnp.einsum("btkgh,bskh->bkgts", q.reshape(b, s, k.shape[2], -1, h), k) * scale
    later = jnp.arange(s)[:, None] - jnp.arange(s) >= distance
    if segments is not None:
        alike = (segments[:, :, None] == segments[:, None]) & (segments[:, None] > 0)
        later = (later & alike)[:, None, None]
    return jnp.max(jnp.where(later, scores, -jnp.inf), axis=(2, 3)).swapaxes(1, 2)


def head_loss(scores: Float[Array, "B S K"], wanted: Float[Array, "B S K"], smoothing: float) -> Float[Array, ""]:
    """Loss of a layer's scores, see ``HeadTraining``: a mean over the tokens that have a label."""
    there = wanted > -jnp.inf
    apart = jnp.abs(jnp.where(there, scores - wanted, 0.0))
    regression = jnp.where(apart < 1.0, 0.5 * apart * apart, apart - 0.5)
    steps = jnp.where(there[:, 1:] & there[:, :-1], scores[:, 1:] - scores[:, :-1], 0.0)
    return (jnp.sum(regression) + smoothing * jnp.sum(steps * steps)) / jnp.maximum(1, jnp.sum(there))
