"""Training step: a pure function ``(state, batch) -> (state, metrics)``.

    gradients        forward and backward pass: cross-entropy, gradient accumulation (``loss``)
    optimizer        gradient clipping, rule, weight decay, learning rate (``jaxllm.optim``)
    links            loss scaling, loss spikes, balance biases, parameter average (``step_chain``, ``step_links``)
    reports          scalars for the log; nothing is copied to the host here

``step_builder`` composes a run's step from its configuration; ``jit_step`` compiles it with the state donated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import optax

import sharding
from jaxllm.models.params import at_least_f32
from jaxllm.optim import StepHooks
from jaxllm.train.step.lomo import LayerwiseUpdate
from jaxllm.train.step.step_chain import Gradients, Report, Step, StepLink, StepResult, finished
from jaxllm.train.step.subset_update import apply_updates
from jaxllm.train.step.train_state import TrainState

ValueAndGrad = Callable[..., tuple[Any, ...]]
"""``(params, batch[, numerics]) -> (LossSums, gradients[, amax])``: ``jaxllm.train.step.loss.value_and_grad`` or the
pipelined one (``jaxllm.train.step.pipelined_loss``). Gradient accumulation and remat happen inside it."""


def train_step(
    value_and_grad: ValueAndGrad,
    optimizer: optax.GradientTransformation,
    rate: optax.Schedule,
    links: Sequence[StepLink] = (),
    reports: Sequence[Report] = (),
    hooks: StepHooks = StepHooks(),  # noqa: B008
) -> Step:
    """Training step: loss and gradients, optimizer update, metrics. Jit it once with ``jit_step``.

    The caller chooses ``value_and_grad``, so that a pipeline schedule can own the backward pass. Gradient clipping and
    weight decay are links of the ``optimizer`` chain.

    Args:
        value_and_grad: loss sums and gradients of a batch.
        optimizer: the optax chain.
        rate: learning-rate schedule, step -> learning rate; here it is only reported, the optimizer has its own copy.
        links: techniques that change the step, innermost first; the state must have been made with the same
            (``jaxllm.train.step.step_links``).
        reports: further metrics.
        hooks: what the optimizer replaces or adds (``OptimizerSpec.hooks``).

    Returns:
        the step. Its metrics are scalars: ``loss`` (the objective and routing losses, per target token or item),
        ``nll`` (nats per target token), ``grad_norm`` (global, before clipping), ``update_norm`` (global, of what is
        added to the parameters), ``param_norm`` (after the update), ``learning_rate`` and ``tokens`` (target tokens);
        ``skipped`` (0 or 1) where steps can be skipped; and those of ``links``, ``reports`` and the optimizer, which
        adds its own to the dict that ``update`` is given as ``metrics``.
    """
    return _with_update(composed_gradients(value_and_grad, links, hooks), optimizer, rate, links, reports, hooks)


class SplitStep(NamedTuple):
    """Training step as two functions, between which the state is not changed.

    Attributes:
        gradients: ``(state, batch) -> gradients``; it only reads the state.
        update: ``(state, batch, gradients) -> (state, metrics)``; the state may be donated.
    """

    gradients: Gradients
    update: Callable[[TrainState, Any, Any], tuple[TrainState, dict[str, Any]]]


def split_step(
    value_and_grad: ValueAndGrad,
    optimizer: optax.GradientTransformation,
    rate: optax.Schedule,
    links: Sequence[StepLink] = (),
    reports: Sequence[Report] = (),
    hooks: StepHooks = StepHooks(),  # noqa: B008
) -> SplitStep:
    """``train_step`` as two functions, so that a checkpoint can be copied while the first one runs.

    Args:
        value_and_grad, optimizer, rate, links, reports, hooks: as for ``train_step``.
    """

    def update(state: TrainState, batch: Any, gradients: Any) -> tuple[TrainState, dict[str, Any]]:
        return _with_update(lambda state, batch: gradients, optimizer, rate, links, reports, hooks)(state, batch)

    return SplitStep(composed_gradients(value_and_grad, links, hooks), update)


def composed_gradients(value_and_grad: ValueAndGrad, links: Sequence[StepLink], hooks: StepHooks) -> Gradients:
    """Function of loss and gradients of a state, with the hooks' and links' changes."""
    gradients = (hooks.gradients or gradients_at_parameters)(value_and_grad)
    for link in links:
        gradients = gradients if link.gradients is None else link.gradients(gradients)
    return gradients


def _with_update(
    gradients: Gradients,
    optimizer: optax.GradientTransformation,
    rate: optax.Schedule,
    links: Sequence[StepLink],
    reports: Sequence[Report],
    hooks: StepHooks,
) -> Step:
    update_inputs = hooks.update_inputs or (lambda state, batch: {})
    update = optax.with_extra_args_support(optimizer).update

    def step(state: TrainState, batch: Any) -> StepResult:
        sums, grads, *amax = gradients(state, batch)
        grad_norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(at_least_f32(g.dtype)), grads))
        inputs = update_inputs(state, batch)
        metrics: dict[str, Any] = {}
        with jax.named_scope("optimizer"):
            updates, opt_state = update(grads, state.opt_state, state.params, metrics=metrics, **inputs)
            params = apply_updates(state.params, updates)
        new = replace(state, params=params, opt_state=opt_state, step=state.step + 1)
        return StepResult(new, sums, rate(state.step), grad_norm, grads, updates, tuple(amax), metrics=metrics)

    return finished(step, links, reports)


def gradients_at_parameters(value_and_grad: ValueAndGrad) -> Gradients:
    """Function of loss and gradients at the parameters of the state."""
    return lambda state, *inputs: value_and_grad(state.params, *inputs)


def layerwise_step(update: LayerwiseUpdate, rate: optax.Schedule, links: Sequence[StepLink] = ()) -> Step:
    """Training step of LOMO, AdaLomo and MeZO, which update each layer before all gradients exist.

    Args:
        update: from ``jaxllm.train.step.lomo.lomo_update`` or ``jaxllm.train.step.mezo.mezo_update``.
        rate: learning-rate schedule, for the metrics.
        links: techniques that need neither gradients nor updates.

    Raises:
        ValueError: a link changes the gradients, which such a step never holds.
    """
    if changing := [link.name for link in links if link.gradients is not None]:
        raise ValueError(f"layerwise step: the links {', '.join(changing)} change gradients, which it never holds.")

    def step(state: TrainState, batch: Any) -> StepResult:
        result = update(state, batch)
        extras = {**state.extras, **result.extras}
        new = replace(state, params=result.params, opt_state=result.opt_state, step=state.step + 1, extras=extras)
        norms = {"param_norm": result.param_norm, "update_norm": result.update_norm}
        return StepResult(new, result.sums, rate(state.step), result.grad_norm, metrics=norms)

    return finished(step, links)


def jit_step(step: Step, abstract: TrainState) -> Step:
    """Jitted training step: the state is donated, so its buffers are updated in place.

    Output shardings equal the input's, so that the second step reuses the compiled program of the first.

    Args:
        step: from ``train_step`` or ``layerwise_step``.
        abstract: shapes and shardings of the state (``abstract_state``).
    """
    return jax.jit(step, donate_argnums=0, out_shardings=(sharding.shardings_of(abstract), None))


def jit_split_step(step: SplitStep, abstract: TrainState) -> SplitStep:
    """Jitted functions of a split step: the update donates the state.

    Args:
        step: from ``split_step``.
        abstract: shapes and shardings of the state (``abstract_state``).
    """
    outs = (sharding.shardings_of(abstract), None)
    return SplitStep(jax.jit(step.gradients), jax.jit(step.update, donate_argnums=0, out_shardings=outs))
