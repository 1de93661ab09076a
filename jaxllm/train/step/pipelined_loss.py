"""Loss and gradients of a step whose layers are pipelined: the ``value_and_grad`` that ``train_step`` takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

import sharding
from jaxllm.models import DecoderConfig, Functional, Segments
from jaxllm.parallel.pipeline import schedule_executor
from jaxllm.parallel.pipeline.pipeline_step import Pipeline
from jaxllm.parallel.pipeline.schedule import Schedule, ScheduleError, forward_only
from jaxllm.parallel.pipeline.schedule_generators import make
from jaxllm.parallel.pipeline.stage_layout import StageDepths, assign_units
from jaxllm.train.config import RunConfig
from jaxllm.train.step.loss import LossSums, permute_sequence, sharded_loss_sums, split_micro_batches
from jaxllm.train.step.routing_losses import RoutingAccumulator, RoutingConfig, RoutingSums
from pallas_kernels.ring_attention import Layout


def pipeline_plan(config: RunConfig, stages: int) -> tuple[Schedule, StageDepths]:
    """A run's schedule over so many stages, and which layers its virtual stages have.

    Raises:
        ScheduleError: there is none; says what would be legal.
    """
    parallel, repeats = config.parallel, [repeats for _, repeats in config.model.segments]
    schedule = make(parallel.schedule, stages, config.accumulate, parallel.chunks)
    depths = assign_units(repeats, stages * schedule.chunks, parallel.depths)
    if parallel.in_place and not depths.even:
        even = tuple(int(n) for n in depths.counts.sum(1))
        what = f"{sum(repeats)} layers" if len(repeats) == 1 else f"layers of {len(repeats)} kinds"
        raise ScheduleError(
            f"pipeline: {what} do not divide over stage={stages}: say how many each stage gets, such as "
            f"--parallel.depths {' '.join(map(str, even))}, or take a number of stages that divides them."
        )
    return schedule, depths


def pipelined_value_and_grad(
    model: Functional,
    schedule: Schedule,
    depths: StageDepths,
    *,
    z_loss: float = 0.0,
    layout: Layout = "contiguous",
    zero: Literal[1, 2, 3] = 3,
    routing: RoutingConfig | None = None,
    offload: float = 0.0,
) -> Callable[[Any, Any], tuple[LossSums, Any]]:
    """``jaxllm.train.step.loss.value_and_grad``, by a pipeline schedule.

    Args:
        model: of rules that store its layers over ``stage`` (``ParallelConfig.rules``).
        schedule: its micro-batches are those that the batch is cut into.
        depths: which layers its virtual stages have.
        routing: weights of the routers' losses, of a model with experts; None: they are not even counted.
        offload: share of a stage's layers whose activations wait on the host.
    """
    routers = PipelineRouting.of(model.config, routing)
    pipeline = Pipeline(model, schedule, depths, zero, layout, routers, offload)

    def run(params: Any, batch: Any) -> tuple[LossSums, Any]:
        dtype = jnp.promote_types(jnp.dtype(model.config.dtype), jnp.float32)
        total = jnp.maximum(jnp.sum(batch.targets >= 0), 1).astype(dtype)
        parts = _parts(model, batch, schedule, layout)
        sums, heard, grads = schedule_executor.sums_and_grads(pipeline, params, parts, total, _head(model, z_loss))
        return sums if routers is None else routers.joined(sums, heard, total), grads

    return run


def pipelined_loss_sums(
    model: Functional, schedule: Schedule, depths: StageDepths, *, layout: Layout = "contiguous"
) -> Callable[[Any, Any], LossSums]:
    """``(params, batch) -> sums``, forward through the same stages: for evaluation where the parameters lie so."""
    pipeline = Pipeline(model, forward_only(schedule), depths, 3, layout)

    def run(params: Any, batch: Any) -> LossSums:
        return schedule_executor.sums(pipeline, params, _parts(model, batch, schedule, layout), _head(model, 0.0))

    return run


@dataclass(frozen=True)
class PipelineRouting:
    """What a pipeline's layers say of their routers: a ``Listener``.

    Sums of losses are shares of the whole batch's mean until ``joined``.
    """

    config: DecoderConfig
    routing: RoutingConfig

    @classmethod
    def of(cls, config: DecoderConfig, routing: RoutingConfig | None) -> PipelineRouting | None:
        """None where nothing is to be heard."""
        return (
            None if routing is None or RoutingAccumulator.of(config, Segments(None)) is None else cls(config, routing)
        )

    def nothing(self) -> RoutingSums:
        """Sums of no layer."""
        return self._tally(Segments(None)).sums(self.config, jnp.zeros(()))

    def context(self, g: int, segments: Segments, over: tuple[str, ...]) -> RoutingAccumulator:
        """Hears the layers of a unit, by their places in it."""
        tally = self._tally(segments)
        return replace(tally, counts=tally.counts[: len(self.config.segments[g][0])], over=over)

    def heard(self, context: RoutingAccumulator, weight: Array) -> tuple[Array, RoutingSums]:
        """A unit's part of the step's loss, and what it has counted."""
        sums = context.sums(self.config, weight)
        return self._loss(sums), sums

    def add(self, sums: RoutingSums, found: RoutingSums, g: int, unit: Array) -> RoutingSums:
        """``sums`` with those of a unit of segment g, at its layers' rows."""
        segments = self.config.segments
        first = sum(len(group) * repeats for group, repeats in segments[:g])
        rows = first + unit * len(segments[g][0]) + jnp.arange(found.counts.shape[0])
        more = sums._replace(counts=sums.counts.at[rows].add(found.counts))
        rest = {name: getattr(sums, name) + getattr(found, name) for name in ("dropped", "balance", "z")}
        return more._replace(**rest)

    def joined(self, sums: LossSums, heard: RoutingSums, total: Array) -> LossSums:
        """The head's sums with the routers', of a batch with ``total`` targets."""
        whole = heard._replace(balance=heard.balance * total, z=heard.z * total)
        return sums._replace(loss=sums.loss + self._loss(whole), routing=whole)

    def _loss(self, sums: RoutingSums) -> Array:
        return self.routing.balance_loss * sums.balance + self.routing.z_loss * sums.z

    def _tally(self, segments: Segments) -> RoutingAccumulator:
        tally = RoutingAccumulator.of(self.config, segments)
        assert tally is not None
        return tally


def _parts(model: Functional, batch: Any, schedule: Schedule, layout: Layout) -> Any:
    """The batch, cut into micro-batches: Int[M B S] each."""
    with sharding.use_rules(model.rules):
        return jax.tree.map(lambda x: split_micro_batches(x, schedule.micro_batches), permute_sequence(batch, layout))


def _head(model: Functional, z_loss: float) -> Callable[[Any, Array, Any], LossSums]:
    """The loss of a micro-batch, from what the last layer gives."""

    def head(ends: Any, hidden: Array, batch: Any) -> LossSums:
        hidden, weight = model.unembed(ends, hidden)
        return sharded_loss_sums(hidden, weight, batch.targets, z_loss, model.config.logit_softcap)

    return head
