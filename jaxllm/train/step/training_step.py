"""Training step: a pure function ``(state, batch) -> (state, metrics)``.

    value_and_grad   forward and backward pass: cross-entropy, gradient accumulation, loss scaling (``loss``)
    spike detection  is this step's loss or gradient norm a loss spike? (``loss_spikes``)
    optimizer        gradient clipping, rule, weight decay, learning rate (``jaxllm.optim``)
    metrics          scalars for the log; nothing is copied to the host here

``step_builder`` composes a run's step from its configuration; ``jit_step`` compiles it with the state donated.
"""

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
from jaxllm.train.step.loss_spikes import SpikeConfig, select_tree
from jaxllm.train.step.objective import LossSums
from jaxllm.train.step.routing_losses import routing_metrics, update_balance_biases
from jaxllm.train.step.subset_update import apply_updates
from jaxllm.train.step.train_state import TrainState

ValueAndGrad = Callable[..., tuple[Any, ...]]
"""``(params, batch[, numerics]) -> (LossSums, gradients[, amax])``: ``jaxllm.train.step.loss.value_and_grad`` or the
pipelined one (``jaxllm.train.step.pipelined_loss``). Gradient accumulation and remat happen inside it."""
Step = Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]
"""``(state, batch) -> (state, metrics)``."""


@dataclass(frozen=True)
class StepHooks:
    """Extensions of the training step that some optimizers need.

    Attributes:
        gradient_point: ``(params, opt_state) -> params`` at which gradients are taken (schedule-free AdamW); None: at
            the parameters themselves.
        hessian: ``(state, batch) -> HessianEstimate``, passed to the optimizer's update as ``hessian`` (Sophia).
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
    hooks: StepHooks | None = None,
    spikes: SpikeConfig | None = None,
) -> Step:
    """Training step: loss and gradients, optimizer update, metrics. Jit it once with ``jit_step``.

    The caller chooses ``value_and_grad``, so that a pipeline schedule can own the backward pass. Gradient clipping and
    weight decay are links of the ``optimizer`` chain. float16 steps whose gradients overflow, and loss spikes where
    ``spikes.action`` is "skip", leave parameters and optimizer state as they were.

    Args:
        value_and_grad: loss sums and gradients of a batch.
        optimizer: the optax chain.
        rate: learning-rate schedule, step -> learning rate; here it is only reported, the optimizer has its own copy.
        model: the architecture; needed for the routing metrics of mixture-of-experts models.
        bias_rate: step size of the routers' balance biases (``RoutingConfig.bias_rate``); 0: they stay.
        layers: also report gradient, parameter and update norms layer by layer, as ``metrics["layers"]``.
        hooks: extensions that the optimizer needs.
        spikes: loss spike detection; requires a state that has ``spikes``.

    Returns:
        the step. Its metrics are scalars: ``loss`` (the objective and routing losses, per target token or item),
        ``nll`` (nats per target token), ``grad_norm`` (global, before clipping), ``update_norm`` (global, of what is
        added to the parameters), ``param_norm`` (after the update), ``learning_rate`` and ``tokens`` (target tokens);
        ``routing_metrics`` for models with experts; ``loss_scale`` in float16; ``spike`` (0 or 1) and ``spike_score``
        (deviations above the median) where spikes are detected; ``skipped`` (0 or 1) where steps can be skipped. A
        step skipped for overflow reports grad_norm 0.
    """
    hooks = hooks or StepHooks()
    lowers_rate, skips_spikes = (spikes is not None and spikes.action == name for name in ("lower_rate", "skip"))

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        # Loss and gradients. `amax` is there for delayed scaling of fp8 matmuls only.
        point = state.params if hooks.gradient_point is None else hooks.gradient_point(state.params, state.opt_state)
        numerics, detector, extra_metrics = state.numerics, state.spikes, {}
        inputs = (point, batch) if numerics is None else (point, batch, numerics)
        sums, grads, *amax = value_and_grad(*inputs)
        grad_norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(at_least_f32(g.dtype)), grads))
        finite, skipped, learning_rate = jnp.isfinite(grad_norm), None, rate(state.step)

        # Is this step to be skipped, for overflow under loss scaling or for a loss spike?
        if numerics is not None and numerics.loss_scale is not None:
            skipped = numerics.should_skip(finite)
            extra_metrics["loss_scale"] = numerics.scale
        if detector is not None and spikes is not None:
            learning_rate = rate(state.step - detector.skipped)  # skipped steps do not advance the schedule
            mean_loss = sums.means()["loss"]
            spike, score, detector = detector.update(spikes, mean_loss, grad_norm, skipped)
            extra_metrics |= {"spike": spike.astype(jnp.float32), "spike_score": score}
            learning_rate = learning_rate * detector.rate
        if skipped is not None:
            grad_norm = jnp.where(skipped, 0.0, grad_norm)

        # Optimizer update.
        extra_args = {} if hooks.hessian is None else {"hessian": hooks.hessian(state, batch)}
        update = optax.with_extra_args_support(optimizer).update
        with jax.named_scope("optimizer"):
            updates, opt_state = update(grads, state.opt_state, state.params, **extra_args)
            if lowers_rate and detector is not None:
                factor = detector.rate
                updates = jax.tree.map(lambda u: u * factor.astype(u.dtype), updates)
            params = apply_updates(state.params, updates)
        if bias_rate and model is not None and sums.routing is not None:
            params = update_balance_biases(model, bias_rate)(params, sums.routing)
        if numerics is not None:
            numerics = numerics.updated(finite, *amax)

        # A skipped step keeps the old parameters and optimizer state.
        if skips_spikes:
            numerics = select_tree(spike, state.numerics, numerics)
            skipped = spike if skipped is None else skipped | spike
        if skipped is not None:
            no_updates = jax.tree.map(jnp.zeros_like, updates)
            old = state.params, state.opt_state, no_updates
            params, opt_state, updates = select_tree(skipped, old, (params, opt_state, updates))
            extra_metrics["skipped"] = skipped.astype(jnp.float32)

        metrics = _metrics(sums, learning_rate, optax.tree.norm(params), grad_norm, optax.tree.norm(updates))
        metrics |= extra_metrics
        if model is not None and sums.routing is not None:
            metrics |= routing_metrics(model, sums.routing, jnp.maximum(sums.total, 1))
        if layers:
            trees = {"grad": grads, "param": params, "update": updates}
            metrics["layers"] = {name: jax.tree.map_with_path(layer_norms, tree) for name, tree in trees.items()}
        new = {"params": params, "opt_state": opt_state, "numerics": numerics, "spikes": detector}
        return replace(state, step=state.step + 1, **new), metrics

    return step


def layerwise_step(update: LayerwiseUpdate, rate: optax.Schedule) -> Step:
    """Training step of LOMO, AdaLomo and MeZO, which update each layer before all gradients exist.

    Args:
        update: from ``jaxllm.train.step.lomo.lomo_update`` or ``jaxllm.train.step.mezo.mezo_update``.
        rate: learning-rate schedule, for the metrics.
    """

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        result = update(state, batch)
        metrics = _metrics(result.sums, rate(state.step), result.param_norm, result.grad_norm, result.update_norm)
        return replace(state, params=result.params, opt_state=result.opt_state, step=state.step + 1), metrics

    return step


def _metrics(
    sums: LossSums, rate: ArrayLike, param_norm: Array, grad_norm: Array, update_norm: Array
) -> dict[str, Any]:
    """Metrics that every step has, and those of its objective; ``nll`` is a mean over the batch's target tokens."""
    return {
        **sums.means(),
        "nll": sums.nll / jnp.maximum(sums.count, 1),
        "grad_norm": grad_norm,
        "param_norm": param_norm,
        "update_norm": update_norm,
        "learning_rate": rate,
        "tokens": sums.count,
    }


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


def jit_step(step: Step, abstract: TrainState) -> Step:
    """Jitted training step: the state is donated, so its buffers are updated in place.

    Output shardings equal the input's, so that the second step reuses the compiled program of the first.

    Args:
        step: from ``train_step`` or ``layerwise_step``.
        abstract: shapes and shardings of the state (``abstract_state``).
    """
    return jax.jit(step, donate_argnums=0, out_shardings=(sharding.shardings_of(abstract), None))
