"""One training step: a pure function ``(state, batch) -> (state, metrics)``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, ArrayLike, Float

import sharding
from jaxllm.models import DecoderConfig
from jaxllm.models.params import at_least_f32
from jaxllm.train.step.lomo import LayerwiseUpdate
from jaxllm.train.step.loss import LossSums
from jaxllm.train.step.loss_spikes import SpikeConfig, select_tree
from jaxllm.train.step.routing_losses import routing_metrics, update_balance_biases
from jaxllm.train.step.train_state import TrainState

ValueAndGrad = Callable[..., tuple[Any, ...]]
"""``jaxllm.train.step.loss.value_and_grad``'s result, or a pipeline's."""
Step = Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]


@dataclass(frozen=True)
class StepHooks:
    """What an optimizer asks of the step.

    Attributes:
        point: ``(params, opt_state)`` -> where gradients are taken; None: at the parameters.
        curvature: ``(state, batch)`` -> what its update is given besides.
    """

    gradient_point: Callable[[Any, Any], Any] | None = None
    hessian: Callable[[TrainState, Any], Any] | None = None


def train_step(
    value_and_grad: ValueAndGrad,
    optimizer: optax.GradientTransformation,
    rate: optax.Schedule,
    model: DecoderConfig | None = None,
    bias_rate: float = 0.0,
    layers: bool = False,
    rule: StepHooks | None = None,
    spikes: SpikeConfig | None = None,
) -> Step:
    """Composes loss, gradients and update; jit the result once, donating the state.

    ``value_and_grad`` is given from outside, so that a pipeline schedule can own the backward pass.

    The metrics: loss (with z-loss), nll (nats per target token), grad_norm (before clipping), update_norm (of what is
    added to the parameters), param_norm (after it), learning_rate, tokens; of a model with experts what
    ``routing_metrics`` makes of them; in float16 loss_scale and whether the step was skipped, of which grad_norm is 0;
    where spikes are looked for whether it is one, by how many deviations, and whether it was skipped.

    Args:
        model: the architecture, where it has experts whose load is to be seen.
        bias_rate: of ``RoutingConfig``.
        layers: the norms also of every parameter's every layer, as ``layers`` of the metrics.
        rule: what the optimizer asks of the step besides.
        spikes: what is done about them, of a state that has ``spikes``.
    """
    asked = rule or StepHooks()
    lowers, skips = (spikes is not None and spikes.action == name for name in ("lower_rate", "skip"))

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        at = state.params if asked.gradient_point is None else asked.gradient_point(state.params, state.opt_state)
        kept, watch, said = state.numerics, state.spikes, {}
        given = (at, batch) if kept is None else (at, batch, kept)
        sums, grads, *seen = value_and_grad(*given)
        grad_norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(at_least_f32(g.dtype)), grads))
        finite, skipped, learning_rate = jnp.isfinite(grad_norm), None, rate(state.step)
        if kept is not None and kept.loss_scale is not None:
            skipped = kept.should_skip(finite)
            said["loss_scale"] = kept.scale
        if watch is not None and spikes is not None:
            learning_rate = rate(state.step - watch.skipped)
            spike, score, watch = watch.update(spikes, sums.loss / jnp.maximum(sums.count, 1), grad_norm, skipped)
            said |= {"spike": spike.astype(jnp.float32), "spike_score": score}
            learning_rate = learning_rate * watch.rate
        if skipped is not None:
            grad_norm = jnp.where(skipped, 0.0, grad_norm)
        more = {} if asked.hessian is None else {"hessian": asked.hessian(state, batch)}
        update = optax.with_extra_args_support(optimizer).update
        updates, opt_state = update(grads, state.opt_state, state.params, **more)
        if lowers and watch is not None:
            lower = watch.rate
            updates = jax.tree.map(lambda u: u * lower.astype(u.dtype), updates)
        params = optax.apply_updates(state.params, updates)
        if bias_rate and model is not None and sums.routing is not None:
            params = update_balance_biases(model, bias_rate)(params, sums.routing)
        if kept is not None:
            kept = kept.updated(finite, *seen)
        if skips:
            kept = select_tree(spike, state.numerics, kept)
            skipped = spike if skipped is None else skipped | spike
        if skipped is not None:
            nothing = jax.tree.map(jnp.zeros_like, updates)
            old = state.params, state.opt_state, nothing
            params, opt_state, updates = select_tree(skipped, old, (params, opt_state, updates))
            said["skipped"] = skipped.astype(jnp.float32)

        metrics = _metrics(sums, learning_rate, optax.tree.norm(params), grad_norm, optax.tree.norm(updates)) | said
        if model is not None and sums.routing is not None:
            metrics |= routing_metrics(model, sums.routing, jnp.maximum(sums.count, 1))
        if layers:
            trees = {"grad": grads, "param": params, "update": updates}
            metrics["layers"] = {name: jax.tree.map_with_path(layer_norms, tree) for name, tree in trees.items()}
        after = {"params": params, "opt_state": opt_state, "numerics": kept, "spikes": watch}
        return replace(state, step=state.step + 1, **after), metrics

    return step


def layerwise_step(move: LayerwiseUpdate, rate: optax.Schedule) -> Step:
    """``train_step`` of an optimizer that has moved the parameters by the time gradients could be seen.

    Args:
        move: ``jaxllm.train.step.lomo`` or ``jaxllm.train.step.mezo``.
    """

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        moved = move(state, batch)
        metrics = _metrics(moved.sums, rate(state.step), moved.param_norm, moved.grad_norm, moved.update_norm)
        return replace(state, params=moved.params, opt_state=moved.opt_state, step=state.step + 1), metrics

    return step


def _metrics(
    sums: LossSums, rate: ArrayLike, param_norm: Array, grad_norm: Array, update_norm: Array
) -> dict[str, Any]:
    count = jnp.maximum(sums.count, 1)
    return {
        "loss": sums.loss / count,
        "nll": sums.nll / count,
        "grad_norm": grad_norm,
        "param_norm": param_norm,
        "update_norm": update_norm,
        "learning_rate": rate,
        "tokens": sums.count,
    }


def layer_norms(path: Any, x: Array) -> Float[Array, " L"]:
    """Of each layer's part of a parameter, which is stacked over them if it is a segment's; else of the whole."""
    stacked = bool(path) and getattr(path[0], "key", None) == "segments"
    wide = jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
    found = jnp.sqrt(jnp.sum(wide, axis=tuple(range(1, x.ndim)))) if stacked else jnp.sqrt(jnp.sum(wide))[None]
    return jax.sharding.reshard(found, PartitionSpec(None))


def jit_step(step: Step, abstract: TrainState) -> Step:
    """``jax.jit`` with the state donated: its buffers are updated in place.

    The state leaves with exactly the shardings it came with, so the second step finds the first's program.
    """
    return jax.jit(step, donate_argnums=0, out_shardings=(sharding.shardings_of(abstract), None))
