"""Streamed step: the engine's step with prefill as several programs, one for each segment of layers.

A program of a segment computes one repeat of it, any of them: its weights and the number of its first layer are
arguments. So the weights of a layer need be on the device only while it computes.

Legend: B replicas (1), T rows of the flat batch, R slots, D embed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Int

import sharding
from jaxllm.infer.runner import logits_processors
from jaxllm.infer.runner.page_programs import Pools
from jaxllm.infer.runner.paged_cache import PagedCache
from jaxllm.infer.runner.retention.eviction import RETAINING_HEADS
from jaxllm.infer.runner.step.engine_step import EngineStep, StepBatch
from jaxllm.infer.streaming.streamed_adapters import with_factors
from jaxllm.models.layers.residual_stream import GatedStream, LayerStream, plain_of
from pallas_kernels.paged_attention.tree_mask import TreeMask

EVICTIONS = "evictions"
"""Name of the output that says what a rule by scores has evicted, ``StepShape.outputs``."""


@dataclass(frozen=True, eq=False)
class StreamedStep:
    """Parts of a step, as pure functions that are called in this order: ``begin``, ``group`` for each unit, ``end``.

    Attributes:
        step: the whole step, of a shape with prefill.
    """

    step: EngineStep

    def begin(
        self, params: Any, pools: Pools, last: Int[Array, "B R"], packed: Int[Array, "B elements"]
    ) -> tuple[Pools, tuple[Any, ...], LayerStream, Array | None]:
        """Prepares pages, and looks the tokens up.

        Args:
            params: parameters outside of blocks.

        Returns:
            the pools, the fields of the forward pass's ``StepBatch``, the residual stream, and what has been evicted.
        """
        with sharding.use_rules(self.step.model.rules):
            pools, evictions = self.step.prepare_pages(pools, packed)
            batch = self.step.flat_batch(packed, last)
            hidden = self.step.model.stream(self.step.model.embed(params, batch.tokens, batch.positions))
            tree = None if batch.tree is None else tuple(batch.tree)
            # On a mesh the programs of layers take these as they lie: whole on every device.
            fields, hidden, evicted = jax.tree.map(
                lambda x: sharding.constrain(x, *(None,) * x.ndim),
                (tuple(batch._replace(tree=tree)), hidden, evictions.get(EVICTIONS)),
            )
            return pools, fields, hidden, evicted

    def group(
        self,
        segment: int,
        params: Any,
        weights: Any,
        pools: Pools,
        batch: tuple[Any, ...],
        hidden: LayerStream,
        first: Int[Array, ""],
        block: str | None = None,
    ) -> tuple[Pools, LayerStream]:
        """Computes one repeat of a segment, or one block of it.

        Args:
            params: parameters outside of blocks.
            weights: parameters of the repeat.
            first: number of its first layer.
            block: the block, whose parameters ``weights`` are then; None: all of them.
        """
        model = self.step.model
        with sharding.use_rules(model.rules):
            inputs = step_batch(batch)
            ctx = self.step.context(pools, inputs, params.get(RETAINING_HEADS))
            weights = with_factors(model, params, weights, inputs.adapters, first, segment, block)
            if block is None:
                hidden, ctx = model.group(segment, weights, hidden, inputs.positions, first, ctx)
            else:
                module = model.block(segment, int(block), weights, first, gated=isinstance(hidden, GatedStream))
                hidden, ctx = module(hidden, inputs.positions, first, ctx)
            hidden = jax.tree.map(lambda x: sharding.constrain(x, *(None,) * x.ndim), hidden)
        assert isinstance(ctx, PagedCache)
        return ctx.pools, hidden

    def end(
        self,
        params: Any,
        pools: Pools,
        hidden: LayerStream,
        last: Int[Array, "B R"],
        packed: Int[Array, "B elements"],
        evicted: Array | None,
        state: tuple[Array, ...] | None = None,
        masks: Array | None = None,
    ) -> tuple[Any, ...]:
        """Samples; see ``EngineStep`` for the results."""
        slots = None if state is None else logits_processors.LogitsState(*state)
        with sharding.use_rules(self.step.model.rules):
            further = {} if evicted is None else {EVICTIONS: evicted}
            last, out, slots, branch = self.step.sample_rows(
                params, plain_of(hidden), last, packed, slots, masks, further
            )
            pools = self.step.keep_branches(pools, packed, branch)
        return (pools, last, out) if slots is None else (pools, last, out, tuple(slots))


def step_batch(fields: tuple[Any, ...]) -> StepBatch:
    """Inputs of the forward pass, of the fields that ``StreamedStep.begin`` returns."""
    batch = StepBatch(*fields)
    return batch if batch.tree is None else batch._replace(tree=TreeMask(*batch.tree))
