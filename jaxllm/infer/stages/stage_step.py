"""Stage step: the part of an engine step that one pipeline stage computes, as a pure function.

The first stage looks the tokens up, every stage computes its layers with its own page pools, and the last one samples.
Each reads the step's packed inputs itself, so that only hidden states go from stage to stage. All tokens come from the
host: a sequence whose last token is not known yet is not in a step.

Legend: B replicas, T rows of the flat batch, R slots, D embed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import sharding
from jaxllm.infer.runner import logits_processors
from jaxllm.infer.runner.page_programs import Pools
from jaxllm.infer.runner.paged_cache import PagedCache
from jaxllm.infer.runner.step.engine_step import EngineStep, StepBatch
from jaxllm.infer.stages.stage_cut import StageLayers
from jaxllm.models.packed_weight import within_stack

HIDDEN_AXES = ("batch", "residual_seq", "act_embed")
"""Logical axes of the hidden states that go from stage to stage."""


@dataclass(frozen=True, eq=False)
class StageStep:
    """Step of one stage; call the method of its place: ``begin`` of the first stage, ``middle``, ``end`` of the last.

    Attributes:
        step: the whole step, of a shape with prefill, with the layer groups of this stage alone.
        layers: layers of the stage.
    """

    step: EngineStep
    layers: StageLayers

    def begin(self, weights: Any, pools: Pools, packed: Int[Array, "B elements"]) -> tuple[Pools, Array]:
        """Looks the tokens up and computes the first layers.

        Args:
            weights: "embedding", and "layers": the weights of each stretch.

        Returns:
            the pools, and the hidden states: Float[Array, "B T D"].
        """
        with sharding.use_rules(self.step.model.rules):
            batch = self._batch(packed)
            hidden = self.step.model.embed(weights, batch.tokens, batch.positions)
            return self._layers(weights, pools, hidden, packed, batch)

    def middle(
        self, weights: Any, pools: Pools, hidden: Float[Array, "B T D"], packed: Int[Array, "B elements"]
    ) -> tuple[Pools, Array]:
        """Computes the layers of a stage in between; see ``begin``."""
        with sharding.use_rules(self.step.model.rules):
            return self._layers(weights, pools, hidden, packed, self._batch(packed))

    def end(
        self,
        ends: Any,
        weights: Any,
        pools: Pools,
        hidden: Float[Array, "B T D"],
        last: Int[Array, "B R"],
        packed: Int[Array, "B elements"],
        state: tuple[Array, ...] | None = None,
        masks: Array | None = None,
    ) -> tuple[Any, ...]:
        """Computes the last layers and samples; see ``EngineStep`` for the results.

        Args:
            ends: parameters of the head.
        """
        slots = None if state is None else logits_processors.LogitsState(*state)
        with sharding.use_rules(self.step.model.rules):
            pools, hidden = self._layers(weights, pools, hidden, packed, self._batch(packed))
            last, out, slots, _ = self.step.sample_rows(ends, hidden, last, packed, slots, masks, {})
            outputs = pools, last, sharding.constrain(out, None, None)
        return outputs if slots is None else (*outputs, tuple(slots))

    def _batch(self, packed: Array) -> StepBatch:
        """Inputs of the forward pass; no token is taken from a slot's last one."""
        unused = sharding.constrain(jnp.zeros((packed.shape[0], self.step.shape.slots), jnp.int32), "batch", None)
        return self.step.flat_batch(packed, unused)

    def _layers(
        self, weights: Any, pools: Pools, hidden: Array, packed: Array, batch: StepBatch
    ) -> tuple[Pools, Array]:
        """Prepares pages, and computes the stage's layers."""
        model = self.step.model
        pools, _ = self.step.prepare_pages(pools, packed)
        ctx: Any = self.step.context(pools, batch)
        for stretch, own in zip(self.layers.stretches, weights["layers"], strict=True):
            stacked, join = within_stack(own)
            size, count = len(model.config.segments[stretch.segment][0]), stretch.stop - stretch.start

            def repeat(carry: Any, turn: Any, stretch: Any = stretch, size: int = size, join: Any = join) -> Any:
                (hidden, ctx), (params, number) = carry, turn
                first = stretch.first + number * size
                params = join(params, number)
                return model.group(stretch.segment, params, hidden, batch.positions, first, ctx), None

            turns = stacked, jnp.arange(count, dtype=jnp.int32)
            (hidden, ctx), _ = jax.lax.scan(repeat, (hidden, ctx), turns, unroll=model.config.unroll or count)
        assert isinstance(ctx, PagedCache)
        return ctx.pools, sharding.constrain(hidden, *HIDDEN_AXES)
