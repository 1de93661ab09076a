"""Step builder: composes a run's training step and optimizer, and refuses combinations that they do not support."""

from __future__ import annotations

import optax
from jax.sharding import AbstractMesh, Mesh

from jaxllm.config import ConfigError
from jaxllm.models import Functional
from jaxllm.models.param_subset import select, trainable_mask
from jaxllm.optim import StepHooks, optimizer, schedule
from jaxllm.optim.optimizer_table import kinds_where
from jaxllm.train.config import RunConfig
from jaxllm.train.step.numerics import init_numerics
from jaxllm.train.step.param_average import parameter_average
from jaxllm.train.step.step_chain import Step, StepLink, link_states
from jaxllm.train.step.step_links import (
    balance_biases,
    layer_norms_report,
    mixed_precision,
    routing_report,
    spike_detection,
)
from jaxllm.train.step.subset_update import subset_optimizer
from jaxllm.train.step.train_state import TrainState, abstract_state
from jaxllm.train.step.training_step import ValueAndGrad, layerwise_step, train_step


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
    rate = schedule(config.optim.schedule, config.steps)
    hooks = StepHooks() if config.optim.spec.hooks is None else config.optim.spec.hooks(config, model)
    links = step_links(config)
    if hooks.update is not None:
        return layerwise_step(hooks.update, rate, links)
    reports = [routing_report(config.model), *([layer_norms_report] if layers else [])]
    return train_step(grads, optimizer, rate, links, reports, hooks)


def step_links(config: RunConfig) -> tuple[StepLink, ...]:
    """Links of a run's step, innermost first; the run's state has their states (``run_state``)."""
    links = (
        mixed_precision(config.model),
        spike_detection(config.spikes, schedule(config.optim.schedule, config.steps)),
        None if config.optim.spec.layerwise else balance_biases(config.model, config.routing.bias_rate),
        parameter_average(config.ema),
    )
    return tuple(link for link in links if link is not None)


def run_state(
    config: RunConfig, model: Functional, optimizer: optax.GradientTransformation, mesh: Mesh | AbstractMesh
) -> TrainState:
    """Shapes, dtypes and shardings of a run's train state, with the states of its step's links (``abstract_state``)."""
    return abstract_state(model, optimizer, mesh, config.host, link_states(step_links(config)))


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
    spec = config.optim.spec
    _check_spikes(config)
    said = f'optim.kind = "{config.optim.kind}"'
    if spec.why_not_staged and mesh.shape.get("stage", 1) > 1:
        raise ConfigError(
            f"{said} {spec.why_not_staged}, which pipeline parallelism does not support: leave stage out of the mesh "
            f"{config.mesh!r}."
        )
    if not spec.one_pass and init_numerics(config.model) is not None:
        raise ConfigError(
            f"{said} does not support loss scaling or delayed fp8 scaling, which need one pass with all gradients per "
            "step: give another model.dtype than float16 and another model.matmul_precision than fp8_delayed."
        )
    if not spec.passes and config.model.embed_grad != 1.0:
        raise ConfigError(f"{said} has no backward pass for model.embed_grad to scale: set it to 1.")
    if not spec.layerwise:
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
    if spec.passes and config.model.remat != "full":
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
    if host.params and not optim.spec.layerwise:
        legal = ", ".join(kinds_where(lambda spec: spec.layerwise))
        raise ConfigError(
            f"host.params (parameter offload) requires an optimizer that never holds all gradients: "
            f'{legal}. Gradients of optim.kind = "{optim.kind}" need as much memory as the parameters.'
        )
    if host.params and config.ema.decay:
        raise ConfigError(
            "host.params (parameter offload) does not support a parameter average, which needs as much device memory "
            "as the parameters: set ema.decay to 0."
        )
    if not host.optimizer:
        return
    if not optim.spec.streamable or optim.rounding != "nearest":
        legal = ", ".join(kinds_where(lambda spec: spec.streamable))
        raise ConfigError(
            f"host.optimizer (optimizer offload) updates layer by layer, which optim.kind = {legal} "
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
    action, kind, spec = config.spikes.action, config.optim.kind, config.optim.spec
    if action == "none":
        return
    said = f'spikes.action = "{action}"'
    if spec.layerwise:
        raise ConfigError(
            f'{said} needs all gradients before an update, which optim.kind = "{kind}" never holds: give "none".'
        )
    if action in ("skip", "lower_rate") and config.host.optimizer:
        raise ConfigError(
            f'{said} would need a second copy of the optimizer state: set host.optimizer to false, or give "rollback".'
        )
    if action == "lower_rate" and spec.averaging:
        raise ConfigError(
            f'{said} scales updates, but those of optim.kind = "{kind}" move averages: give another action.'
        )
    if action == "lower_rate" and config.optim.rounding != "nearest":
        raise ConfigError(f'{said} would scale updates that are already rounded: optim.rounding must be "nearest".')
    if action == "rollback" and config.checkpoint.memory is not None:
        raise ConfigError(f"{said} restores checkpoints on disk: checkpoint.memory must be None.")
