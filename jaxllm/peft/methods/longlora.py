"""LongLoRA: fine-tuning on longer texts with shifted sparse attention (arXiv:2309.12307).

While it trains, a token attends within its group of tokens; for every other head the groups are shifted by half of a
group, so that neighbours exchange information. Evaluation and serving attend to everything. Norms and the token
embedding are trained besides the factors. The first and the last half of a row's shifted groups stand alone: in the
code of the paper they share one group, in which the beginning sees the end.

Legend: B batch, S sequence, N query heads, K kv heads, H head dim, V head dim of values, G tokens of a group.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
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
from jaxllm.models.functional import DeclaredParam, LinearShape
from jaxllm.peft.adapter_method import AdapterConfig, AdapterMethod, declare_factors, lora_scale
from jaxllm.peft.low_rank_factors import LoraWeight
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.ring_attention import Layout

SHARE = 4
"""Groups of a row by default: a group has a quarter of the sequence, as in the paper."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["segment_ids"], meta_fields=["layout", "group"])
@dataclass(frozen=True)
class ShiftedGroups:
    """Context of training in which a token attends within its group, see ``jaxllm.models.attention_context``.

    Attributes:
        segment_ids: document number of each token, 0 for padding; None when every row is one document.
        layout: as in ``Segments``; the sequence is not split over devices.
        group: tokens of a group; 0 for a quarter of the sequence.
    """

    segment_ids: Int[Array, "B S"] | None = None
    layout: Layout = "contiguous"
    group: int = 0

    def attend(
        self,
        layer: LayerIndex,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K V"],
        positions: Int[Array, "B S"],
        params: AttentionParams,
        sinks: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "B S N V"], ShiftedGroups]:
        """Causal attention within each group and segment; odd heads have shifted groups.

        Raises:
            ValueError: groups do not divide the sequence; there is one head, or devices share the heads and each has an
                odd number of them.
        """
        length, all_heads = q.shape[1:3]
        size = self.group or length // SHARE
        if size < 2 or size % 2 or length % size:
            legal = [n for n in range(2, length + 1, 2) if length % n == 0]
            raise ValueError(
                f"longlora: groups of {size} tokens in rows of {length}; legal adapter.group: {legal[:20]}."
            )
        rule = {"scale": params.scale, "window": params.window, "softcap": params.softcap}

        def local(
            q: Array, k: Array, v: Array, segments: Array | None, kv_segments: Array | None, sinks: Array | None
        ) -> Array:
            heads = q.shape[2]
            # Where heads are split, a device with an odd number of them would shift other heads than one device does.
            if heads < 2 or (heads % 2 and heads != all_heads):
                raise ValueError(
                    f"longlora: a device has {heads} of {all_heads} heads, of which every other one is shifted; give "
                    "each device an even number."
                )
            k, v = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (k, v))
            segments = jnp.ones(q.shape[:2], jnp.int32) if segments is None else segments
            halves = []
            for shifted in (0, 1):
                split = functools.partial(_grouped, size=size, shift=shifted * size // 2)
                ids = split(segments)
                own = (split(x[:, :, shifted::2]) for x in (q, k, v))
                out = flash_attention(
                    *own,
                    q_segment_ids=ids,
                    kv_segment_ids=ids,
                    sinks=None if sinks is None else sinks[shifted::2],
                    **rule,
                )
                halves.append(_ungrouped(out, q.shape[0], length, shifted * size // 2))
            if heads % 2 == 0:
                return jnp.stack(halves, axis=3).reshape(*q.shape[:3], v.shape[-1])
            order = np.argsort(np.r_[0:heads:2, 1:heads:2])
            return jnp.concatenate(halves, axis=2)[:, :, order]

        axes = (Q_AXES, KV_AXES, KV_AXES, TOKEN_AXES, KV_TOKEN_AXES, SINK_AXES)
        attend = sharding.shard_map(local, axes, Q_AXES)
        return attend(q, replicate_kv_heads(k), replicate_kv_heads(v), self.segment_ids, self.segment_ids, sinks), self


def _grouped(x: Array, size: int, shift: int) -> Array:
    """Rows of groups from rows of tokens: ``[B, S, ...] -> [B S / G, G, ...]``, padded by ``shift`` on both sides."""
    if shift:
        x = jnp.pad(x, [(0, 0), (shift, shift)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(-1, size, *x.shape[2:])


def _ungrouped(x: Array, rows: int, length: int, shift: int) -> Array:
    """Inverse of ``_grouped``."""
    return x.reshape(rows, -1, *x.shape[2:])[:, shift : shift + length]


def _declare(config: AdapterConfig, base: DeclaredParam, linear: LinearShape) -> LoraWeight:
    return LoraWeight(base, declare_factors(config, linear, lora_scale(config)))


LONGLORA = AdapterMethod(
    _declare,
    experts=True,
    trained=("adapter", "embedding/table", "*norm*"),
    context=lambda config: functools.partial(ShiftedGroups, group=config.group),
    fields=("rank", "alpha", "targets", "group"),
)
