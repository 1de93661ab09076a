"""Links and reports of the training step: loss scaling, loss spikes, balance biases, norms by layer.

Each is a part of ``training_step.train_step`` that a run has or has not (``step_builder.step_links``); see
``step_chain`` for how they are put together, and ``param_average`` for the average of the parameters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxllm.models import DecoderConfig
from jaxllm.optim import schedule_count
from jaxllm.train.step.loss_spikes import SpikeConfig, SpikeDetectorState, init_spike_detector, select_tree
from jaxllm.train.step.numerics import Numerics, init_numerics
from jaxllm.train.step.routing_losses import routing_metrics, update_balance_biases
from jaxllm.train.step.step_chain import Gradients, InnerStep, Report, StepLink, StepResult, link_state
from jaxllm.train.step.subset_update import apply_updates
from jaxllm.train.step.train_state import TrainState


def mixed_precision(config: DecoderConfig, rate: optax.Schedule) -> StepLink | None:
    """Link of the mixed-precision state (``numerics``): loss scaling of float16, amax history of delayed fp8 scaling.

    A step whose gradients overflow is skipped and halves the loss scale. Metrics: ``loss_scale`` in float16.

    Args:
        config: the architecture; None is returned for precisions that need neither.
        rate: learning-rate schedule of the run.
    """
    if init_numerics(config) is None:
        return None
    name = "numerics"

    def gradients(take: Gradients) -> Gradients:
        return lambda state, batch: take(state, batch, link_state(state, name))

    def wrap(step: InnerStep) -> InnerStep:
        def run(state: TrainState, batch: Any) -> StepResult:
            result, numerics = step(state, batch), link_state(state, name)
            assert isinstance(numerics, Numerics)
            finite = jnp.isfinite(result.grad_norm)
            if numerics.loss_scale is not None:
                overflowed = numerics.should_skip(finite)
                shown = jnp.where(overflowed, 0.0, result.grad_norm)
                result = result.skip_where(overflowed).with_metrics(loss_scale=numerics.scale, grad_norm=shown)
                if (count := schedule_count(state.opt_state)) is not None:
                    result = result._replace(learning_rate=rate(count))  # overflows do not advance the schedule
            return result.with_extra(name, numerics.updated(finite, *result.amax))

        return run

    return StepLink(name, lambda params: init_numerics(config), gradients, wrap)


def spike_detection(config: SpikeConfig, rate: optax.Schedule) -> StepLink | None:
    """Link of the loss spike detector (``spikes``), with the actions "skip" and "lower_rate".

    A skipped spike leaves the state of the links inside of it as it was. Metrics: ``spike`` (0 or 1) and
    ``spike_score`` (deviations above the median).

    Args:
        config: of the detector; None is returned for action "none".
        rate: learning-rate schedule of the run.
    """
    if config.action == "none":
        return None
    name = "spikes"

    def wrap(step: InnerStep) -> InnerStep:
        def run(state: TrainState, batch: Any) -> StepResult:
            result, before = step(state, batch), link_state(state, name)
            assert isinstance(before, SpikeDetectorState)
            loss = result.sums.means()["loss"]
            spike, score, detector = before.update(config, loss, result.grad_norm, result.skipped)
            # Skipped steps do not advance the schedule; those that overflow are in the optimizer's count alone.
            count = None if result.skipped is None else schedule_count(state.opt_state)
            count = state.step - before.skipped if count is None else count
            result = result._replace(learning_rate=rate(count) * detector.rate)
            if config.action == "lower_rate":
                updates = jax.tree.map(lambda u: u * detector.rate.astype(u.dtype), result.updates)
                params = apply_updates(state.params, updates)
                result = result._replace(state=replace(result.state, params=params), updates=updates)
            if config.action == "skip":
                extras = select_tree(spike, state.extras, result.state.extras)
                result = result._replace(state=replace(result.state, extras=extras)).skip_where(spike)
            return result.with_extra(name, detector).with_metrics(spike=spike.astype(jnp.float32), spike_score=score)

        return run

    return StepLink(name, lambda params: init_spike_detector(config), wrap=wrap)


def balance_biases(config: DecoderConfig, rate: float) -> StepLink | None:
    """Link that moves the routers' balance biases towards even loads; it needs routing sums.

    Args:
        config: the architecture.
        rate: step size (``RoutingConfig.bias_rate``); None is returned for 0.
    """
    if not rate:
        return None
    move = update_balance_biases(config, rate)

    def wrap(step: InnerStep) -> InnerStep:
        def run(state: TrainState, batch: Any) -> StepResult:
            result = step(state, batch)
            if result.sums.routing is None:
                return result
            params = move(result.state.params, result.sums.routing)
            return result._replace(state=replace(result.state, params=params))

        return run

    return StepLink("balance_biases", wrap=wrap)


def routing_report(config: DecoderConfig) -> Report:
    """Report of the routing metrics of a model with experts; empty for other models."""

    def report(result: StepResult) -> dict[str, Any]:
        if result.sums.routing is None:
            return {}
        return dict(routing_metrics(config, result.sums.routing, jnp.maximum(result.sums.total, 1)))

    return report


def layer_norms_report(result: StepResult) -> dict[str, Any]:
    """Report of gradient, parameter and update norms layer by layer, as ``layers``."""
    trees = {"grad": result.grads, "param": result.state.params, "update": result.updates}
    return {"layers": {name: jax.tree.map_with_path(layer_norms, tree) for name, tree in trees.items()}}


def layer_norms(path: Any, x: Array) -> Float[Array, " L"]:
    """Frobenius norm of a parameter, for each layer where layers are stacked on its first dimension.

    Args:
        path: of the parameter; those under ``segments`` are stacked over layers.
        x: the parameter, its gradient or its update.

    Returns:
        one norm per layer, in at least float32, replicated; a single one for parameters outside the layers.
    """
    stacked = bool(path) and getattr(path[0], "key", None) == "segments"
    wide = jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
    found = jnp.sqrt(jnp.sum(wide, axis=tuple(range(1, x.ndim)))) if stacked else jnp.sqrt(jnp.sum(wide))[None]
    return jax.sharding.reshard(found, PartitionSpec(None))
