"""Visible tokens: an attention context with a mask of its own for every query, such as rows that branch.

Legend: B batch, S sequence, N query heads, K kv heads, H head dim of keys, V head dim of values.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.models.attention_context import AttentionParams, LayerIndex


class VisibleTokens(NamedTuple):
    """Attention context of one pass over rows whose tokens are not in one order: several tokens may follow another.

    All scores are in memory at a time: for short rows.

    Attributes:
        visible: Bool[Array, "B S S"], whether a query (second dimension) sees a token; its own is among them.
    """

    visible: Bool[Array, "B S S"]

    def attend(
        self,
        layer: LayerIndex,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K V"] | None,
        positions: Int[Array, "B S"],
        params: AttentionParams,
        sinks: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "B S N V"], VisibleTokens]:
        """Attention output; a sliding window counts positions, see ``AttentionContext``.

        Raises:
            NotImplementedError: latents in place of keys and values, as a KV cache has them.
        """
        if v is None:
            raise NotImplementedError("VisibleTokens attends to keys and values, not to latents.")
        b, s, n, h = q.shape
        dtype = jnp.promote_types(q.dtype, jnp.float32)
        visible = self.visible
        if params.window is not None:
            visible = visible & (positions[:, :, None] - positions[:, None] < params.window)
        grouped = q.reshape(b, s, k.shape[2], -1, h).astype(dtype)
        scores = jnp.einsum("bskgh,btkh->bkgst", grouped, k.astype(dtype)) * params.scale
        if params.softcap is not None:
            scores = params.softcap * jnp.tanh(scores / params.softcap)
        scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
        if sinks is not None:
            column = jnp.broadcast_to(sinks.astype(dtype).reshape(1, k.shape[2], -1, 1, 1), (*scores.shape[:-1], 1))
            scores = jnp.concatenate([scores, column], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., :s]
        out = jnp.einsum("bkgst,btkh->bskgh", weights, v.astype(dtype))
        return out.reshape(b, s, n, -1).astype(q.dtype), self
