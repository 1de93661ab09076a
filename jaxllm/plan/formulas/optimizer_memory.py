"""Optimizer state bytes on a device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxllm.config import ConfigError
from jaxllm.models import DecoderConfig
from jaxllm.models.param_subset import select, trainable_mask
from jaxllm.optim import OptimConfig, ScheduleConfig, optimizer
from jaxllm.peft.adapted_model import adapted_model
from jaxllm.peft.adapter_method import AdapterConfig
from jaxllm.peft.method_table import ADAPTER_METHODS
from jaxllm.plan.formulas.device_work import DeviceWork, architecture, cached_model, rules_of
from jaxllm.train import RunConfig
from jaxllm.train.step.subset_update import subset_optimizer
from jaxllm.train.step.train_state import abstract_state
from sharding import MeshSpec, Rules

COUNTER = 4
"""Bytes of a step counter of an optimizer."""


def check_optimizer(run: RunConfig) -> None:
    """Raises for optimizers without a formula, and for states that are on disk.

    Raises:
        ConfigError: says what to do instead.
    """
    if run.disk.directory:
        raise ConfigError(
            f'plan: disk.directory = "{run.disk.directory}": how fast the disk of a cluster is, is not known; leave it '
            "out, or train with --within SIZE --disk DIR:SIZE, which compiles the step."
        )
    if run.optim.spec.passes != 1:
        passes = run.optim.spec.passes
        said = f"{passes} forward and backward passes a step" if passes else "no backward pass"
        raise ConfigError(
            f'plan: optim.kind = "{run.optim.kind}" has {said}, and the cost model has no formula for such steps; '
            "plan another optimizer, or compile the run for its devices."
        )


def state_bytes(work: DeviceWork, parameters: int, laid: Callable[[Sequence[int]], int] = math.prod) -> int:
    """Bytes of a device's optimizer state.

    Args:
        work: work of the device.
        parameters: bytes of the device's trained parameters, of which the state of some optimizers is a multiple
            (``OptimizerSpec.arrays``). For others the abstract state is evaluated, without allocation.
        laid: elements that an array of a shape takes in memory.
    """
    optim, spec = work.run.optim, work.run.optim.spec
    if spec.arrays is not None and optim.moments == "float32" and optim.rounding == "nearest":
        return spec.arrays * parameters + spec.counters * COUNTER
    same = replace(optim, schedule=ScheduleConfig("constant"))  # cache key
    return _abstract_bytes(
        architecture(work.run.model),
        same,
        rules_of(work.run.parallel),
        work.mesh,
        laid,
        work.run.trainable,
        work.run.adapter,
    )


def average_bytes(run: RunConfig, parameters: int) -> int:
    """Bytes of a device's parameter average (``RunConfig.ema``), at least float32; 0 without one.

    Args:
        run: the run.
        parameters: bytes of the device's parameters.
    """
    if not run.ema.decay:
        return 0
    width = jnp.dtype(run.model.param_dtype).itemsize
    return parameters // width * max(width, 4)


@functools.lru_cache(maxsize=1024)
def _abstract_bytes(
    config: DecoderConfig,
    optim: OptimConfig,
    rules: Rules,
    mesh: MeshSpec,
    laid: Callable[[Sequence[int]], int],
    trainable: tuple[str, ...],
    adapter: AdapterConfig,
) -> int:
    model = adapted_model(cached_model(config, rules), adapter)
    own = ADAPTER_METHODS[adapter.kind].trained if adapter else ()
    trained = trainable_mask(model, (*own, *trainable))
    transform = subset_optimizer(optimizer(optim, 1, select(trained, model.logical_axes())), trained)
    state = abstract_state(model, transform, mesh.abstract())
    return sum(
        laid(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.opt_state)
    )
