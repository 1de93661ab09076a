"""Optimizer state bytes on a device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax

from jaxllm.config import ConfigError
from jaxllm.models import DecoderConfig
from jaxllm.models.param_subset import select, trainable_mask
from jaxllm.optim import OptimConfig, ScheduleConfig, optimizer
from jaxllm.plan.formulas.device_work import DeviceWork, architecture, cached_model, rules_of
from jaxllm.train import RunConfig
from jaxllm.train.step.subset_update import subset_optimizer
from jaxllm.train.step.train_state import abstract_state
from sharding import MeshSpec, Rules

STEPS = 8
"""Bytes of AdamW's two step counters, beside the two moments of each parameter."""


def check_optimizer(run: RunConfig) -> None:
    """Raises for optimizers without a formula.

    Raises:
        ConfigError: says what to do instead.
    """
    if run.optim.kind == "mezo":
        raise ConfigError(
            'plan: optim.kind = "mezo" has no backward pass, and the cost model has no formula for such steps; '
            "plan another optimizer, or compile the run for its devices."
        )


def state_bytes(work: DeviceWork, parameters: int, laid: Callable[[Sequence[int]], int] = math.prod) -> int:
    """Bytes of a device's optimizer state.

    Args:
        work: work of the device.
        parameters: bytes of the device's trained parameters; AdamW's state is twice that. For other optimizers the
            abstract state is evaluated, without allocation.
        laid: elements that an array of a shape takes in memory.
    """
    optim = work.run.optim
    if optim.kind == "adamw" and optim.moments == "float32" and optim.rounding == "nearest":
        return 2 * parameters + STEPS
    same = replace(optim, schedule=ScheduleConfig("constant"))  # cache key
    return _abstract_bytes(
        architecture(work.run.model), same, rules_of(work.run.parallel), work.mesh, laid, work.run.trainable
    )


@functools.lru_cache(maxsize=1024)
def _abstract_bytes(
    config: DecoderConfig,
    optim: OptimConfig,
    rules: Rules,
    mesh: MeshSpec,
    laid: Callable[[Sequence[int]], int],
    trainable: tuple[str, ...],
) -> int:
    model = cached_model(config, rules)
    trained = trainable_mask(model, trainable)
    transform = subset_optimizer(optimizer(optim, 1, select(trained, model.logical_axes())), trained)
    state = abstract_state(model, transform, mesh.abstract())
    return sum(
        laid(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.opt_state)
    )
