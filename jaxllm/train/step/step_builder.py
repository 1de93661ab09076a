"""The step that a run's optimizer asks for."""

from __future__ import annotations

import functools
from typing import Any

import optax
from jax.sharding import AbstractMesh, Mesh

from jaxllm.config import ConfigError
from jaxllm.models import Functional, MoeConfig
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
from jaxllm.train.step.sophia_hessian import gauss_newton_estimator
from jaxllm.train.step.training_step import Step, StepHooks, ValueAndGrad, layerwise_step, train_step


def build_step(
    config: RunConfig,
    model: Functional,
    grads: ValueAndGrad,
    optimizer: optax.GradientTransformation,
    *,
    layers: bool = False,
) -> Step:
    """The run's step, not yet jitted.

    Args:
        grads: of the run, on its mesh.
        layers: norms by layer too.
    """
    rate, kind = schedule(config.optim.schedule, config.steps), config.optim.kind
    if kind in LAYERWISE:
        parts = layerwise_transforms(
            functools.partial(layerwise_transform, config.optim, config.steps), model.logical_axes()
        )
        make = mezo_update if kind == "mezo" else lomo_update
        return layerwise_step(make(model, parts, z_loss=config.z_loss, layout=config.parallel.layout), rate)
    rule = StepHooks()
    if kind == "schedule_free":
        rule = StepHooks(gradient_point=functools.partial(gradient_point, config.optim.b1))
    if kind == "sophia":
        same: dict[str, Any] = {"accumulate": config.accumulate, "layout": config.parallel.layout}
        plain = value_and_grad(model, zero=config.parallel.zero, **same)
        rule = StepHooks(hessian=gauss_newton_estimator(model, plain, config.optim.every, **same))
    return train_step(grads, optimizer, rate, config.model, config.routing.bias_rate, layers, rule, config.spikes)


def build_optimizer(config: RunConfig, model: Functional) -> optax.GradientTransformation:
    """The run's optimizer."""
    every = config.host.device_every if config.host.optimizer else 0
    return optimizer(config.optim, config.steps, model.logical_axes(), every)


def check_optimizer(config: RunConfig, mesh: Mesh | AbstractMesh) -> None:
    """Refuses what the optimizer cannot do.

    Raises:
        ConfigError: names it, and what is legal.
    """
    kind = config.optim.kind
    _check_spikes(config)
    if kind not in (*LAYERWISE, "sophia"):
        return
    said = f'optim.kind = "{kind}"'
    if mesh.shape.get("stage", 1) > 1:
        why = "draws labels from the whole model's logits" if kind == "sophia" else "moves a layer where it is used"
        raise ConfigError(
            f"{said} {why}, which a pipeline's stages cannot: leave stage out of the mesh {config.mesh!r}."
        )
    if init_numerics(config.model) is not None:
        raise ConfigError(
            f"{said} takes more passes than a step, or none that has all gradients: model.dtype cannot be float16, "
            "nor model.matmul_precision fp8_delayed."
        )
    if kind == "mezo" and config.model.embed_grad != 1.0:
        raise ConfigError(f"{said} has no backward pass for model.embed_grad to shrink: set it to 1.")
    if kind not in LAYERWISE:
        return
    if config.accumulate > 1:
        raise ConfigError(
            f"{said} keeps no gradients that could be summed: set accumulate to 1, data.batch_size lower."
        )
    if config.parallel.zero < 3:
        raise ConfigError(f"{said} has one layer's weights whole at a time: parallel.zero must be 3.")
    if any(isinstance(block.mlp, MoeConfig) for block in config.model.blocks):
        raise ConfigError(f"{said} is of models without experts: their routers' losses are of all layers together.")
    if config.observe.layers_every:
        raise ConfigError(f"{said} never has all gradients to show: set observe.layers_every to 0.")
    if kind != "mezo" and config.model.remat != "full":
        raise ConfigError(
            f'{said} keeps a layer\'s input and computes the layer again: model.remat must be "full", not '
            f'"{config.model.remat}".'
        )


def check_offload(config: RunConfig, mesh: Mesh | AbstractMesh) -> None:
    """Refuses what cannot wait in the host's memory.

    Raises:
        ConfigError: names it, and what is legal.
    """
    host, optim = config.host, config.optim
    if (host.optimizer or host.params) and mesh.shape.get("stage", 1) > 1:
        raise ConfigError(
            f"host.{'optimizer' if host.optimizer else 'params'} takes layers one after the other, which a pipeline's "
            f"stages split: leave stage out of the mesh {config.mesh!r}."
        )
    if host.params and optim.kind not in LAYERWISE:
        raise ConfigError(
            f"host.params is of rules that never have all gradients, {', '.join(LAYERWISE)}: gradients of all layers "
            f'would take the place of the parameters. optim.kind is "{optim.kind}".'
        )
    if not host.optimizer:
        return
    if optim.kind not in STREAMABLE or optim.rounding != "nearest":
        raise ConfigError(
            f"host.optimizer updates layer by layer, which {', '.join(STREAMABLE)} can with "
            f'optim.rounding = "nearest"; here optim.kind = "{optim.kind}", optim.rounding = "{optim.rounding}".'
        )
    if host.device_every > 1 and optim.moments != "float32":
        raise ConfigError(
            f'host.device_every = {host.device_every}: the host updates moments in float32, not "{optim.moments}".'
        )
    if config.model.dtype == "float16":
        raise ConfigError(
            "host.optimizer: a step of float16 may be skipped, for which it would keep the state before it too: set "
            "model.dtype to bfloat16."
        )


def _check_spikes(config: RunConfig) -> None:
    action, kind = config.spikes.action, config.optim.kind
    if action == "none":
        return
    said = f'spikes.action = "{action}"'
    if kind in LAYERWISE:
        raise ConfigError(f'{said} needs all gradients before an update, which optim.kind = "{kind}" has not: "none".')
    if action in ("skip", "lower_rate") and config.host.optimizer:
        raise ConfigError(f'{said} would keep the state before a step too: host.optimizer must be off, or "rollback".')
    if action == "lower_rate" and kind == "schedule_free":
        raise ConfigError(f'{said} scales updates, and those of optim.kind = "{kind}" are of averages: choose another.')
    if action == "lower_rate" and config.optim.rounding != "nearest":
        raise ConfigError(f'{said} scales updates that are rounded already: optim.rounding must be "nearest".')
    if action == "rollback" and config.checkpoint.memory is not None:
        raise ConfigError(f"{said} goes back to checkpoints on disk: checkpoint.memory must be None.")
