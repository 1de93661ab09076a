"""Block step: the programs of a streamed step whose pools are those of one unit of layers and one batch.

Legend: B replicas (1), R slots, M pages that a step writes to, see ``written_pages``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

import sharding
from jaxllm.infer.runner.page_programs import Pools
from jaxllm.infer.runner.step.engine_step import EngineStep
from jaxllm.infer.streaming.blocks.unit_pools import UnitCache
from jaxllm.infer.streaming.streamed_adapters import with_factors
from jaxllm.infer.streaming.streamed_step import StreamedStep, step_batch
from jaxllm.models.layers.residual_stream import LayerStream


@dataclass(frozen=True, eq=False)
class BlockStep:
    """Parts of a step of one batch: ``begin``, ``unit`` for each unit of layers, ``end``.

    Attributes:
        step: the whole step, of a shape with prefill.
        rows: row of each layer in the pools of its unit.
    """

    step: EngineStep
    rows: tuple[int, ...]

    def begin(
        self, params: Any, last: Int[Array, "B R"], packed: Int[Array, "B elements"]
    ) -> tuple[tuple[Any, ...], LayerStream]:
        """The fields of the forward pass's ``StepBatch``, and the residual stream.

        Args:
            params: parameters outside of blocks.
        """
        with sharding.use_rules(self.step.model.rules):
            batch = self.step.flat_batch(packed, last)
            hidden = self.step.model.stream(self.step.model.embed(params, batch.tokens, batch.positions))
            return tuple(batch), hidden

    def unit(
        self,
        segment: int,
        params: Any,
        weights: Any,
        pools: Pools,
        packed: Int[Array, "B elements"],
        batch: tuple[Any, ...],
        hidden: LayerStream,
        first: Int[Array, ""],
        written: tuple[Int[Array, " M"], ...] | None,
    ) -> tuple[Any, ...]:
        """Prepares the pages of a unit and computes its layers.

        Args:
            segment: of the unit.
            params: parameters outside of blocks.
            weights: parameters of the unit.
            pools: of its layers.
            first: number of its first layer.
            written: pages of each pool whose contents are to be written back; None: they stay.

        Returns:
            the pools, the residual stream, and with ``written`` the contents of these pages.
        """
        model, step = self.step.model, self.step
        with sharding.use_rules(model.rules):
            pools, _ = step.prepare_pages(pools, packed)
            inputs = step_batch(batch)
            ctx: Any = UnitCache.of(step.context(pools, inputs), self.rows)
            weights = with_factors(model, params, weights, inputs.adapters, first, segment)
            hidden, ctx = model.group(segment, weights, hidden, inputs.positions, first, ctx)
        if written is None:
            return ctx.pools, hidden
        contents = tuple(
            jax.tree.map(lambda x, pages=pages: jnp.take(x, pages, axis=1, mode="clip"), pool)
            for pool, pages in zip(ctx.pools, written, strict=True)
        )
        return ctx.pools, hidden, contents

    def end(
        self,
        params: Any,
        hidden: LayerStream,
        last: Int[Array, "B R"],
        packed: Int[Array, "B elements"],
        state: tuple[Array, ...] | None = None,
        masks: Array | None = None,
    ) -> tuple[Any, ...]:
        """Samples: each slot's last token, the packed outputs, and with the full sampler its slot state."""
        return StreamedStep(self.step).end(params, (), hidden, last, packed, None, state, masks)[1:]
