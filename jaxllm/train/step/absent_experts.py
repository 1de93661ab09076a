"""Absent experts: routers choose among the experts that are there, and the others come back as they were.

As the gate of Learning@home (arXiv:2002.04013), whose experts are on machines that come and go. Here the experts are in
the run's devices; which of them are away is drawn by the run's key, for ``routing.absent_steps`` steps at a time. The
router masks their logits, so that scores and combine weights are normalised over the experts that are there, and no
token is sent to the others. These get no gradient; the link keeps their parameters and optimizer state as they were,
without weight decay or momentum, until they rejoin.

Legend: E experts of a layer; the same are away in every layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

import sharding
from jaxllm.config import ConfigError
from jaxllm.models import DecoderConfig, functional
from jaxllm.models.moe.router import only_experts
from jaxllm.train.step.routing_losses import RoutingConfig
from jaxllm.train.step.step_chain import Gradients, InnerStep, StepLink, StepResult
from jaxllm.train.step.train_state import TrainState

TAG = 0x6578
"""Folded into the run's key, so that absences are drawn apart from all else."""


def absent_experts(config: RoutingConfig, model: DecoderConfig) -> StepLink | None:
    """Link that masks absent experts and keeps them as they were; None without absences.

    Metrics: ``absent_experts``, how many of a layer's are away.

    Args:
        config: share of absent experts, and steps of an absence.
        model: the architecture.
    """
    if not config.absent:
        return None
    (experts,) = {mixture.experts for mixture in model.mixtures.values()}
    axes = jax.tree_util.tree_leaves_with_path(functional(model).logical_axes(), is_leaf=lambda x: isinstance(x, tuple))
    dims = {_name(path): leaf.index("experts") for path, leaf in axes if "experts" in leaf}

    def there(state: TrainState) -> Bool[Array, " E"]:
        return available_experts(state.rng, state.step, experts, config)

    def gradients(take: Gradients) -> Gradients:
        def run(state: TrainState, *inputs: Any) -> tuple[Any, ...]:
            with only_experts(there(state)):
                return take(state, *inputs)

        return run

    def wrap(step: InnerStep) -> InnerStep:
        def run(state: TrainState, batch: Any) -> StepResult:
            result, available = step(state, batch), there(state)
            old, new = ((one.params, one.opt_state) for one in (state, result.state))
            params, opt_state = keep_absent(old, new, available, dims)
            result = result._replace(state=replace(result.state, params=params, opt_state=opt_state))
            return result.with_metrics(absent_experts=experts - jnp.sum(available))

        return run

    return StepLink("absent_experts", gradients=gradients, wrap=wrap)


def available_experts(key: Array, step: Int[Array, ""], experts: int, config: RoutingConfig) -> Bool[Array, " E"]:
    """Experts that are there in a step: all but a fixed number of them, drawn anew for every absence.

    Args:
        key: of the run.
        step: steps done.
        experts: E.
        config: share of absent experts, and steps of an absence.
    """
    away = config.absent_of(experts)
    return drawn_present(jax.random.fold_in(key, TAG), step // config.absent_steps, experts, away)


def drawn_present(key: Array, period: Int[Array, ""], count: int, away: int) -> Bool[Array, " E"]:
    """Members that are present in a period: all but ``away`` of them, drawn anew for every period.

    Args:
        key: of these draws alone.
        period: its number.
        count: E, members.
        away: how many are absent.
    """
    drawn = jax.random.uniform(jax.random.fold_in(key, period), (count,))
    return jnp.argsort(jnp.argsort(drawn)) >= away


def keep_absent(old: Any, new: Any, available: Bool[Array, " E"], dims: dict[str, int]) -> Any:
    """Tree ``new`` in which arrays of experts have the values of ``old`` for the experts that are away.

    Args:
        old, new: trees with the paths of parameters in them: parameters, optimizer state.
        available: experts that are there.
        dims: dimension of the experts, by path of the parameter.

    Raises:
        ConfigError: an array of the optimizer state has another shape than its parameter, so that an expert has no
            part of it.
    """

    def one(path: tuple[Any, ...], before: Array, after: Array) -> Array:
        name = _name(path)
        dim = next((at for parameter, at in dims.items() if f"/{parameter}/" in f"/{name}/"), None)
        if dim is None:
            return after
        if dim >= after.ndim or after.shape[dim] != available.shape[0]:
            raise ConfigError(
                f"routing.absent keeps the optimizer state of absent experts, but {name} has the shape {after.shape}, "
                "in which an expert has no part; choose an optimizer with a state of the parameters' shapes, such as "
                "adamw."
            )
        mask = available
        if sharding.current_mesh() is not None:
            mask = jax.sharding.reshard(mask, jax.P(jax.typeof(after).sharding.spec[dim]))
        return jnp.where(jnp.expand_dims(mask, [i for i in range(after.ndim) if i != dim]), after, before)

    return jax.tree.map_with_path(one, old, new)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
