"""Offloaded step: the engine's step with prefill as programs of two parts, cut at the attention of every layer.

    devices of the weights        begin -> turn -> ... -> turn -> end
                                      |    ^  |          ^
                                 q, k, v   |  v          | attention output
    devices of the pages          pages, attend -> ... -> attend

``begin`` looks tokens up and computes what the first layer's attention needs; ``turn`` goes from one layer's attention
to the next one's; ``end`` goes from the last one's to the sampled tokens (Lamina, arXiv:2405.01814). Each part reads
the step's packed inputs itself. In halves, each program is run for one half of the rows while the other part's devices
have the other half.

Legend: B replicas (1), T rows of the flat batch, H rows of a half, R slots, D embed, N query heads, V head dim of
values.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import sharding
from jaxllm.infer.attention_pool.attention_seam import AttentionCall, after_attention, attention_call
from jaxllm.infer.attention_pool.pool_devices import PoolDevices, cut_heads
from jaxllm.infer.runner import logits_processors
from jaxllm.infer.runner.page_programs import Pools
from jaxllm.infer.runner.paged_cache import HEADS, KV_HEADS, PagedCache
from jaxllm.infer.runner.step.engine_step import EngineStep, StepBatch
from jaxllm.infer.runner.step.step_halves import halved_rows
from jaxllm.models.attention_context import SINK_AXES, AttentionParams
from jaxllm.models.layers.residual_stream import GatedStream, LayerStream, plain_of

Q_SENT = (None, None, "attn_heads", None)
KV_SENT = (None, None, "attn_kv_heads", None)
CALL_AXES = (Q_SENT, KV_SENT, KV_SENT, SINK_AXES)
"""Logical axes of the arrays of an ``AttentionCall`` on their way."""
Pieces = tuple[Any, ...]
"""Pieces of the arrays of an ``AttentionCall``, see ``cut_heads``; None of those that there are not."""
Kind = tuple[int, int]
"""Segment of a layer, and its block in the group that the segment repeats: layers of one kind share programs."""


class RowSet(NamedTuple):
    """Rows of a step that go through the layers together: all of them, or a half.

    Attributes:
        stream: residual stream, a ``LayerStream``.
        positions: positions of the tokens, Int[Array, "B H"].
    """

    stream: Any
    positions: Any


@dataclass(frozen=True, eq=False)
class WeightStep:
    """Programs of the devices with the weights, as pure functions.

    Attributes:
        step: the whole step, of a shape with prefill.
        sender, receiver: devices of these programs, and of attention.
    """

    step: EngineStep
    sender: PoolDevices
    receiver: PoolDevices

    def begin(
        self, kind: Kind, ends: Any, weights: Any, last: Int[Array, "B R"], packed: Int[Array, "B elements"]
    ) -> tuple[tuple[tuple[Any, ...], ...], tuple[Pieces, ...]]:
        """Looks the tokens up, and computes the first layer up to its attention.

        Args:
            kind: of the first layer.
            ends: parameters outside of blocks.
            weights: parameters of the first layer.

        Returns:
            fields of the ``RowSet`` of each half (or of all rows), and what its attention needs.
        """
        model = self.step.model
        with sharding.use_rules(model.rules):
            batch = self.step.flat_batch(packed, last)
            hidden = model.embed(ends, batch.tokens, batch.positions)
            rows = [RowSet(hidden, batch.positions)]
            if self.step.shape.halves:
                middle, _ = _halves(batch)
                cut = functools.partial(_cut, size=-(-batch.tokens.shape[1] // 2))
                each = sharding.per_shard(cut, "batch")
                rows = [RowSet(*one) for one in zip(each(hidden, middle), each(batch.positions, middle), strict=True)]
            rows = [one._replace(stream=model.stream(one.stream)) for one in rows]
            first = jnp.int32(0)
            return tuple(map(tuple, rows)), tuple(self._sent(self._call(kind, weights, one, first)) for one in rows)

    def turn(
        self,
        kinds: tuple[Kind, Kind],
        weights: Any,
        following: Any,
        rows: tuple[Any, ...],
        attended: Float[Array, "B H N V"],
        number: Int[Array, ""],
    ) -> tuple[LayerStream, Pieces]:
        """Goes from the attention of layer ``number`` to that of the next one.

        Args:
            kinds: of both layers.
            weights, following: their parameters.
            rows: fields of a ``RowSet``.
            attended: attention output of the first one.

        Returns:
            the residual stream before the second one, and what its attention needs.
        """
        with sharding.use_rules(self.step.model.rules):
            stream = self._after(kinds[0], weights, rows, attended, number)
            one = RowSet(*rows)._replace(stream=stream)
            return stream, self._sent(self._call(kinds[1], following, one, number + 1))

    def end(
        self,
        kind: Kind,
        ends: Any,
        weights: Any,
        rows: tuple[tuple[Any, ...], ...],
        attended: tuple[Array, ...],
        number: Int[Array, ""],
        last: Int[Array, "B R"],
        packed: Int[Array, "B elements"],
        state: tuple[Array, ...] | None = None,
        masks: Array | None = None,
    ) -> tuple[Any, ...]:
        """Goes from the attention of the last layer to the sampled tokens; see ``EngineStep`` for the results.

        Args:
            rows, attended: of each half, or of all rows.
        """
        slots = None if state is None else logits_processors.LogitsState(*state)
        with sharding.use_rules(self.step.model.rules):
            streams = [
                plain_of(self._after(kind, weights, own, out, number)) for own, out in zip(rows, attended, strict=True)
            ]
            hidden = streams[0]
            if self.step.shape.halves:
                middle, _ = _halves(self.step.flat_batch(packed, last))
                join = functools.partial(_joined, tokens=self.step.shape.tokens)
                hidden = sharding.per_shard(join, "batch")(*streams, middle)
            hidden = sharding.constrain(hidden, "batch", "residual_seq", "act_embed")
            last, out, slots, _ = self.step.sample_rows(ends, hidden, last, packed, slots, masks, {})
            outputs = last, sharding.constrain(out, None, None)
        return outputs if slots is None else (*outputs, tuple(slots))

    def call(self, kind: Kind, weights: Any, rows: tuple[Any, ...]) -> AttentionCall:
        """Call of the attention of a layer of this kind, whole; to be traced for its shapes."""
        with sharding.use_rules(self.step.model.rules):
            return self._call(kind, weights, RowSet(*rows), jnp.int32(0))

    def _call(self, kind: Kind, weights: Any, rows: RowSet, number: Any) -> AttentionCall:
        return attention_call(self._block(kind, weights, rows.stream, number), rows.stream, rows.positions, number)

    def _after(self, kind: Kind, weights: Any, rows: tuple[Any, ...], attended: Array, number: Any) -> LayerStream:
        one = RowSet(*rows)
        block = self._block(kind, weights, one.stream, number)
        return after_attention(block, one.stream, one.positions, number, attended)

    def _block(self, kind: Kind, weights: Any, stream: LayerStream, number: Any) -> Any:
        return self.step.model.block(*kind, weights, number, gated=isinstance(stream, GatedStream))

    def _sent(self, call: AttentionCall) -> Pieces:
        return tuple(
            None if x is None else cut_heads(x, self.sender, self.receiver, *axes)
            for x, axes in zip(call.arrays, CALL_AXES, strict=True)
        )


@dataclass(frozen=True, eq=False)
class AttentionStep:
    """Programs of the devices with the pages, as pure functions.

    Attributes:
        step: the whole step, with the sharding rules of these devices.
        sender, receiver: devices of these programs, and of the weights.
    """

    step: EngineStep
    sender: PoolDevices
    receiver: PoolDevices

    def pages(self, pools: Pools, packed: Int[Array, "B elements"]) -> tuple[Pools, tuple[tuple[Any, ...], ...]]:
        """Prepares pages; returns the pools, and (page tables, starts, kv_lens) of each half, or of all requests."""
        with sharding.use_rules(self.step.model.rules):
            pools, _ = self.step.prepare_pages(pools, packed)
            unused = jnp.zeros((packed.shape[0], self.step.shape.slots), jnp.int32)
            batch = self.step.flat_batch(packed, sharding.constrain(unused, "batch", None))
            return pools, (_halves(batch)[1] if self.step.shape.halves else ((batch.tables, *batch[2:4]),))

    def attend(
        self,
        group: int,
        params: AttentionParams,
        decode_only: bool,
        pools: Pools,
        requests: tuple[Any, ...],
        call: tuple[Any, ...],
        number: Int[Array, ""],
    ) -> tuple[Pools, tuple[Array, ...]]:
        """Writes the keys and values of a layer, and attends.

        Args:
            group: layer group of the layer.
            params: static parameters of its attention.
            decode_only: see ``PagedCache``.
            requests: as ``pages`` returns them.
            call: arrays of the ``AttentionCall``.
            number: of the layer.

        Returns:
            the pools, and the pieces of the attention output.
        """
        tables, starts, kv_lens = requests
        with sharding.use_rules(self.step.model.rules):
            ctx = PagedCache(pools, tables, starts, kv_lens, self.step.groups, decode_only)
            q, k, v, sinks = call
            q, k = sharding.constrain(q, *HEADS), sharding.constrain(k, *KV_HEADS)
            v = None if v is None else sharding.constrain(v, *KV_HEADS)
            out, ctx = ctx.attend_in(group, number, q, k, v, params, sinks)
            return ctx.pools, cut_heads(out, self.sender, self.receiver, *Q_SENT)


def _halves(batch: StepBatch) -> tuple[Int[Array, " B"], tuple[Any, Any]]:
    """First row of the second half, and the requests of each half."""
    return sharding.per_shard(halved_rows, "batch")(batch.tables, batch.starts, batch.kv_lens)


def _cut(x: Array, middle: Array, *, size: int) -> tuple[Array, Array]:
    return x[:size], jax.lax.dynamic_slice_in_dim(x, middle, size)


def _joined(first: Array, second: Array, middle: Array, *, tokens: int) -> Array:
    rows = jnp.zeros((tokens, *first.shape[1:]), first.dtype).at[: len(first)].set(first)
    return jax.lax.dynamic_update_slice_in_dim(rows, second, middle, 0)
