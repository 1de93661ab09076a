"""Step builder: composes a run's training step and optimizer, and refuses combinations that they do not support."""

from __future__ import annotations

import functools
from typing import Any

import optax
from jax.sharding import AbstractMesh, Mesh

from jaxllm.config import ConfigError
from jaxllm.models import Functional
from jaxllm.models.param_subset import select, trainable_mask
from jaxllm.optim import optimizer, schedule
from jaxllm.optim.build import layerwise_transform
from jaxllm.optim.config import LAYERWISE
from jaxllm.optim.layerwise_rules import layerwise_transforms
from jaxllm.optim.schedule_free import gradient_point
from jaxllm.train.config import RunConfig
from jaxllm.train.host_offload import STREAMABLE
from jaxllm.train.step.lomo import lomo_update
from jaxllm.train.step.loss import value_and_grad
from jaxllm.train.step.mezo import mezo_update
from jaxllm.train.step.numerics import init_numerics
from jaxllm.train.step.objective import make_objective
from jaxllm.train.step.sophia_hessian import gauss_newton_estimator
from jaxllm.train.step.subset_update import subset_optimizer
from jaxllm.train.step.training_step import Step, StepHooks, ValueAndGrad, layerwise_step, train_step


def build_step(
    config: RunConfig,
    model: Functional,
    grads: ValueAndGrad,
    optimizer: optax.GradientTransformation,
    *,
    layers: bool = False,
) -> Step:
    """Training step of a run, not yet jitted.

    Args:
        config: the run.
        model: of the run.
        grads: loss sums and gradients of a batch, on the run's mesh (``jaxllm.train.run.build_value_and_grad``).
        optimizer: of the run (``build_optimizer``).
        layers: also report norms layer by layer.
    """
    rate, kind = schedule(config.optim.schedule, config.steps), config.optim.kind
    if kind in LAYERWISE:
        parts = layerwise_transforms(
            functools.partial(layerwise_transform, config.optim, config.steps), model.logical_axes()
        )
        make = mezo_update if kind == "mezo" else lomo_update
        objective: Any = make_objective(config.objective, config.z_loss)
        return layerwise_step(make(model, parts, objective=objective, layout=config.parallel.layout), rate)
    hooks = StepHooks()
    if kind == "schedule_free":
        hooks = StepHooks(gradient_point=functools.partial(gradient_point, config.optim.b1))
    if kind == "sophia":
        shared: dict[str, Any] = {"accumulate": config.accumulate, "layout": config.parallel.layout}
        plain = value_and_grad(model, zero=config.parallel.zero, **shared)
        hooks = StepHooks(hessian=gauss_newton_estimator(model, plain, config.optim.every, **shared))
    return train_step(grads, optimizer, rate, config.model, config.routing.bias_rate, layers, hooks, config.spikes)


def build_optimizer(config: RunConfig, model: Functional) -> optax.GradientTransformation:
    """Optimizer of a run, for its trainable parameters; optimizer offload (``config.host``) updates layer by layer."""
    every = config.host.device_every if config.host.optimizer else 0
    trained = trainable_mask(model, config.trainable)
    found = optimizer(config.optim, config.steps, select(trained, model.logical_axes()), every)
    return subset_optimizer(found, trained)


def check_optimizer(config: RunConfig, mesh: Mesh | AbstractMesh) -> None:
    """Checks that the run's optimizer supports the run's mesh, model and loss-spike action.

    Raises:
        ConfigError: names the unsupported setting and what is legal.
    """
    kind = config.optim.kind
    _check_spikes(config)
    if kind not in (*LAYERWISE, "sophia"):
        return
    said = f'optim.kind = "{kind}"'
    if mesh.shape.get("stage", 1) > 1:
        why = "samples labels from the model's logits" if kind == "sophia" else "updates layer by layer"
        raise ConfigError(
            f"{said} {why}, which pipeline parallelism does not support: leave stage out of the mesh {config.mesh!r}."
        )
    if init_numerics(config.model) is not None:
        raise ConfigError(
            f"{said} does not support loss scaling or delayed fp8 scaling, which need one pass with all gradients per "
            "step: give another model.dtype than float16 and another model.matmul_precision than fp8_delayed."
        )
    if kind == "mezo" and config.model.embed_grad != 1.0:
        raise ConfigError(f"{said} has no backward pass for model.embed_grad to scale: set it to 1.")
    if kind not in LAYERWISE:
        return
    if config.accumulate > 1:
        raise ConfigError(
            f"{said} does not support gradient accumulation, as it never holds all gradients: set accumulate to 1 and "
            "reduce data.batch_size."
        )
    if config.parallel.zero < 3:
        raise ConfigError(f"{said} gathers the weights of one layer at a time: parallel.zero must be 3.")
    if config.model.mixtures:
        raise ConfigError(f"{said} does not support models with experts, whose routing losses need all layers.")
    if config.observe.layers_every:
        raise ConfigError(
            f"{said} never holds all gradients, so their norms cannot be logged: set observe.layers_every to 0."
        )
    if kind != "mezo" and config.model.remat != "full":
        raise ConfigError(
            f'{said} saves only the input of each layer and recomputes the layer: model.remat must be "full", not '
            f'"{config.model.remat}".'
        )


def check_offload(config: RunConfig, mesh: Mesh | AbstractMesh) -> None:
    """Checks that what ``config.host`` moves to host memory can be there: optimizer offload and parameter offload.

    Raises:
        ConfigError: names the unsupported setting and what is legal.
    """
    host, optim = config.host, config.optim
    if (host.optimizer or host.params) and mesh.shape.get("stage", 1) > 1:
        raise ConfigError(
            f"host.{'optimizer' if host.optimizer else 'params'} (offload to host memory) does not support pipeline "
            f"parallelism: leave stage out of the mesh {config.mesh!r}."
        )
    if host.params and optim.kind not in LAYERWISE:
        raise ConfigError(
            f"host.params (parameter offload) requires an optimizer that never holds all gradients: "
            f'{", ".join(LAYERWISE)}. Gradients of optim.kind = "{optim.kind}" need as much memory as the parameters.'
        )
    if not host.optimizer:
        return
    if optim.kind not in STREAMABLE or optim.rounding != "nearest":
        raise ConfigError(
            f"host.optimizer (optimizer offload) updates layer by layer, which optim.kind = {', '.join(STREAMABLE)} "
            f'support with optim.rounding = "nearest"; got "{optim.kind}" and "{optim.rounding}".'
        )
    if host.device_every > 1 and optim.moments != "float32":
        raise ConfigError(
            f"host.device_every = {host.device_every}: the host's CPU updates moments in float32, not "
            f'"{optim.moments}"; give optim.moments = "float32", or host.device_every = 1.'
        )
    if config.model.dtype == "float16":
        raise ConfigError(
            "host.optimizer does not support loss scaling: a skipped float16 step would need a second copy of the "
            "optimizer state. Set model.dtype to bfloat16."
        )


def _check_spikes(config: RunConfig) -> None:
    """Checks that the action at a loss spike fits the optimizer and the checkpoints; raises ConfigError."""
    action, kind = config.spikes.action, config.optim.kind
    if action == "none":
        return
    said = f'spikes.action = "{action}"'
    if kind in LAYERWISE:
        raise ConfigError(
            f'{said} needs all gradients before an update, which optim.kind = "{kind}" never holds: give "none".'
        )
    if action in ("skip", "lower_rate") and config.host.optimizer:
        raise ConfigError(
            f'{said} would need a second copy of the optimizer state: set host.optimizer to false, or give "rollback".'
        )
    if action == "lower_rate" and kind == "schedule_free":
        raise ConfigError(
            f'{said} scales updates, but those of optim.kind = "{kind}" move averages: give another action.'
        )
    if action == "lower_rate" and config.optim.rounding != "nearest":
        raise ConfigError(f'{said} would scale updates that are already rounded: optim.rounding must be "nearest".')
    if action == "rollback" and config.checkpoint.memory is not None:
        raise ConfigError(f"{said} restores checkpoints on disk: checkpoint.memory must be None.")
