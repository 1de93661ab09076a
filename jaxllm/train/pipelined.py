"""Loss and gradients of a step whose layers are pipelined: the ``value_and_grad`` that ``train_step`` takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

import sharding
from jaxllm.models import Functional
from jaxllm.parallel.pipeline.executor import Pipeline
from jaxllm.parallel.pipeline.generators import make
from jaxllm.parallel.pipeline.layout import Depths, spread
from jaxllm.parallel.pipeline.schedule import Schedule, ScheduleError, forward_only
from jaxllm.train.config import RunConfig
from jaxllm.train.loss import LossSums, arrange, sharded_sums, split_batch
from jaxllm.train.routing import RoutingConfig
from pallas_kernels.ring_attention import Layout


def planned(config: RunConfig, stages: int) -> tuple[Schedule, Depths]:
    """A run's schedule over so many stages, and which layers its virtual stages have.

    Raises:
        ScheduleError: there is none; says what would be legal.
    """
    if config.routing != RoutingConfig():
        raise ScheduleError(
            "pipeline: routers' own losses and biases (routing) are not summed over stages yet: leave routing at its "
            "defaults, or take a mesh without stage."
        )
    parallel, repeats = config.parallel, [repeats for _, repeats in config.model.segments]
    schedule = make(parallel.schedule, stages, config.accumulate, parallel.chunks)
    depths = spread(repeats, stages * schedule.chunks, parallel.depths)
    if parallel.in_place and not depths.even:
        even = tuple(int(n) for n in depths.counts.sum(1))
        what = f"{sum(repeats)} layers" if len(repeats) == 1 else f"layers of {len(repeats)} kinds"
        raise ScheduleError(
            f"pipeline: {what} do not divide over stage={stages}: say how many each stage gets, such as "
            f"--parallel.depths {' '.join(map(str, even))}, or take a number of stages that divides them."
        )
    return schedule, depths


def pipelined(
    model: Functional,
    schedule: Schedule,
    depths: Depths,
    *,
    z_loss: float = 0.0,
    layout: Layout = "contiguous",
    zero: Literal[1, 2, 3] = 3,
) -> Callable[[Any, Any], tuple[LossSums, Any]]:
    """``jaxllm.train.loss.value_and_grad``, by a pipeline schedule.

    Args:
        model: of rules that store its layers over ``stage`` (``ParallelConfig.rules``).
        schedule: its micro-batches are those that the batch is cut into.
        depths: which layers its virtual stages have.
    """
    pipeline = Pipeline(model, schedule, depths, zero, layout)

    def run(params: Any, batch: Any) -> tuple[LossSums, Any]:
        dtype = jnp.promote_types(jnp.dtype(model.config.dtype), jnp.float32)
        total = jnp.maximum(jnp.sum(batch.targets >= 0), 1).astype(dtype)
        return pipeline.sums_and_grads(params, _parts(model, batch, schedule, layout), total, _head(model, z_loss))

    return run


def pipelined_sums(
    model: Functional, schedule: Schedule, depths: Depths, *, layout: Layout = "contiguous"
) -> Callable[[Any, Any], LossSums]:
    """``(params, batch) -> sums``, forward through the same stages: for evaluation where the parameters lie so."""
    pipeline = Pipeline(model, forward_only(schedule), depths, 3, layout)

    def run(params: Any, batch: Any) -> LossSums:
        return pipeline.sums(params, _parts(model, batch, schedule, layout), _head(model, 0.0))

    return run


def _parts(model: Functional, batch: Any, schedule: Schedule, layout: Layout) -> Any:
    """The batch, cut into micro-batches: Int[M B S] each."""
    with sharding.use_rules(model.rules):
        return jax.tree.map(lambda x: split_batch(x, schedule.micro_batches), arrange(batch, layout))


def _head(model: Functional, z_loss: float) -> Callable[[Any, Array, Any], LossSums]:
    """The loss of a micro-batch, from what the last layer gives."""

    def head(ends: Any, hidden: Array, batch: Any) -> LossSums:
        hidden, weight = model.unembed(ends, hidden)
        return sharded_sums(hidden, weight, batch.targets, z_loss, model.config.logit_softcap)

    return head
