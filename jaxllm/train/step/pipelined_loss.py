"""Pipeline-parallel loss and gradients: the ``value_and_grad`` of ``train_step`` for a mesh with stages."""

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
from jaxllm.parallel.pipeline.offload_bands import OffloadedChunks, check_offloaded_chunks
from jaxllm.parallel.pipeline.pipeline_step import Pipeline
from jaxllm.parallel.pipeline.schedule import Schedule, ScheduleError, forward_only
from jaxllm.parallel.pipeline.schedule_generators import default_chunks, legal_sizes, make
from jaxllm.parallel.pipeline.stage_layout import StageDepths, assign_units
from jaxllm.parallel.pipeline.stage_messages import SlowLinks
from jaxllm.train.config import RunConfig
from jaxllm.train.step.loss import permute_sequence, split_micro_batches
from jaxllm.train.step.objective import CrossEntropyObjective, HeadObjective, LossSums
from jaxllm.train.step.routing_losses import RoutingAccumulator, RoutingConfig, RoutingSums
from pallas_kernels.ring_attention import Layout


def pipeline_plan(config: RunConfig, stages: int) -> tuple[Schedule, StageDepths]:
    """Pipeline schedule of a run and the assignment of layers to its virtual stages.

    Args:
        config: the run.
        stages: size of the mesh axis ``stage``.

    Raises:
        ScheduleError: none fits; the message says what is legal.
    """
    parallel = config.parallel
    schedule = make(parallel.schedule, stages, config.accumulate, parallel.chunks)
    check_offloaded_chunks(schedule, parallel.offload, parallel.offload_chunks)
    return schedule, stage_depths(config, stages)


def stage_depths(config: RunConfig, stages: int) -> StageDepths:
    """Assignment of a run's layers to the virtual stages of its schedule, which is not built.

    Args:
        config: the run.
        stages: size of the mesh axis ``stage``.

    Raises:
        ScheduleError: there is no such schedule of these sizes, or the layers do not divide; says what is legal.
    """
    parallel, repeats = config.parallel, [repeats for _, repeats in config.model.segments]
    legal_sizes(parallel.schedule, stages, config.accumulate, parallel.chunks)
    depths = assign_units(repeats, stages * (parallel.chunks or default_chunks(parallel.schedule)), parallel.depths)
    if parallel.in_place and not depths.even:
        even = tuple(int(n) for n in depths.counts.sum(1))
        what = f"{sum(repeats)} layers" if len(repeats) == 1 else f"layers of {len(repeats)} kinds"
        raise ScheduleError(
            f"pipeline: {what} do not divide over stage={stages}: say how many each stage gets, such as "
            f"--parallel.depths {' '.join(map(str, even))}, or choose a number of stages that divides them."
        )
    return depths


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
    offload_chunks: OffloadedChunks = "all",
    objective: HeadObjective | None = None,
    trainable: Any = None,
    links: SlowLinks | None = None,
) -> Callable[[Any, Any], tuple[LossSums, Any]]:
    """Pipeline-parallel counterpart of ``jaxllm.train.step.loss.value_and_grad``.

    Args:
        model: with sharding rules that store layers over ``stage`` (``ParallelConfig.rules``).
        schedule: its micro-batches are those that the batch is split into.
        depths: layers of its virtual stages.
        z_loss: weight of the z-loss of the cross-entropy, the objective if none is given.
        layout: which tokens of a row each device gets.
        zero: ZeRO stage.
        routing: weights of the load-balancing loss and router z-loss; None: routing statistics are not collected.
        offload: share of a stage's layers whose activations are offloaded to the host.
        offload_chunks: chunks that the share is taken of.
        objective: the loss, over single tokens.
        trainable: subset of the parameters that gradients are taken of; None: all.
        links: replicas whose messages between stages are projected; None: all messages are whole.
    """
    loss = CrossEntropyObjective(z_loss) if objective is None else objective
    routers = PipelineRouting.of(model.config, routing)
    pipeline = Pipeline(model, schedule, depths, zero, layout, routers, offload, offload_chunks, trainable, links)

    def run(params: Any, batch: Any) -> tuple[LossSums, Any]:
        dtype = jnp.promote_types(jnp.dtype(model.config.dtype), jnp.float32)
        total = jnp.maximum(loss.total(batch), 1).astype(dtype)
        parts = _parts(model, batch, schedule, layout)
        sums, routing_sums, grads = schedule_executor.sums_and_grads(pipeline, params, parts, total, _head(model, loss))
        sums = sums._replace(items=loss.items(batch))
        return sums if routers is None else routers.add_routing_losses(sums, routing_sums, total), grads

    return run


def pipelined_loss_sums(
    model: Functional, schedule: Schedule, depths: StageDepths, *, layout: Layout = "contiguous"
) -> Callable[[Any, Any], LossSums]:
    """Function ``(params, batch) -> LossSums``: a forward pass through the pipeline's stages, for evaluation."""
    pipeline = Pipeline(model, forward_only(schedule), depths, 3, layout)

    def run(params: Any, batch: Any) -> LossSums:
        parts = _parts(model, batch, schedule, layout)
        return schedule_executor.sums(pipeline, params, parts, _head(model, CrossEntropyObjective()))

    return run


@dataclass(frozen=True)
class PipelineRouting:
    """Routing statistics and losses of pipelined layers; an ``AuxLossCollector`` of the pipeline.

    Loss terms are shares of the whole batch's mean until ``add_routing_losses`` multiplies them by the target tokens.
    """

    config: DecoderConfig
    routing: RoutingConfig

    @classmethod
    def of(cls, config: DecoderConfig, routing: RoutingConfig | None) -> PipelineRouting | None:
        """Collector for a model; None without experts, or where routing losses are off."""
        return (
            None if routing is None or RoutingAccumulator.of(config, Segments(None)) is None else cls(config, routing)
        )

    def zeros(self) -> RoutingSums:
        """Empty sums, before any layer."""
        return self._tally(Segments(None)).sums(self.config, jnp.zeros(()))

    def context(self, g: int, segments: Segments, over: tuple[str, ...]) -> RoutingAccumulator:
        """Attention context that accumulates the routing of one unit (a group of layers).

        Args:
            g: segment of the unit.
            segments: attention context to delegate to.
            over: manual mesh axes that tokens are split over.
        """
        tally = self._tally(segments)
        return replace(tally, counts=tally.counts[: len(self.config.segments[g][0])], over=over)

    def collect(self, context: RoutingAccumulator, weight: Array) -> tuple[Array, RoutingSums]:
        """Routing loss of a unit, to be added to the step's loss, and its statistics.

        Args:
            context: of the unit, after its forward pass.
            weight: share of the micro-batch in the step.
        """
        sums = context.sums(self.config, weight)
        return self._loss(sums), sums

    def add(self, sums: RoutingSums, found: RoutingSums, g: int, unit: Array) -> RoutingSums:
        """Adds the statistics of one unit of segment ``g`` to those of the whole model."""
        segments = self.config.segments
        first = sum(len(group) * repeats for group, repeats in segments[:g])
        rows = first + unit * len(segments[g][0]) + jnp.arange(found.counts.shape[0])
        more = sums._replace(counts=sums.counts.at[rows].add(found.counts))
        rest = {name: getattr(sums, name) + getattr(found, name) for name in ("dropped", "balance", "z")}
        return more._replace(**rest)

    def add_routing_losses(self, sums: LossSums, routing: RoutingSums, total: Array) -> LossSums:
        """Loss sums of the head with the routing losses added, for a batch of ``total`` target tokens."""
        whole = routing._replace(balance=routing.balance * total, z=routing.z * total)
        return sums._replace(loss=sums.loss + self._loss(whole), routing=whole)

    def _loss(self, sums: RoutingSums) -> Array:
        return self.routing.balance_loss * sums.balance + self.routing.z_loss * sums.z

    def _tally(self, segments: Segments) -> RoutingAccumulator:
        tally = RoutingAccumulator.of(self.config, segments)
        assert tally is not None
        return tally


def _parts(model: Functional, batch: Any, schedule: Schedule, layout: Layout) -> Any:
    """The batch as micro-batches: [M B S] each."""
    with sharding.use_rules(model.rules):
        return jax.tree.map(lambda x: split_micro_batches(x, schedule.micro_batches), permute_sequence(batch, layout))


def _head(model: Functional, objective: HeadObjective) -> Callable[[Any, Array, Any], LossSums]:
    """Function of parameters, final hidden states and a micro-batch: its loss sums."""

    def head(ends: Any, hidden: Array, batch: Any) -> LossSums:
        return objective.from_hidden(model, ends, hidden, batch)

    return head
