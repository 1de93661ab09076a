"""ZO2's training step: MeZO with parameters in host memory, each layer on the device once per step (arXiv:2503.12668).

While a layer is on the device it gets the update of the step before, which is pending until then, and both perturbed
forward passes; then it returns to the host, updated. MeZO's own step would copy it three times: for either forward pass
and for the update, which needs the losses of both. Directions are drawn from seeds, so a pending update is one number.

Low-bit transfers are parameters of fewer bits, as in the paper's mode for mixed precision: ``model.param_dtype``
"bfloat16" halves the bytes of both copies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

import sharding
from jaxllm.models import Functional, Segments
from jaxllm.models.param_subset import select
from jaxllm.optim import StepHooks
from jaxllm.optim.build import layerwise_parts
from jaxllm.train.config import RunConfig
from jaxllm.train.run_model import trained_params
from jaxllm.train.step.lomo import LayerwiseResult, LayerwiseUpdate, layer_slice, set_layer_slice
from jaxllm.train.step.loss import permute_sequence
from jaxllm.train.step.mezo import PERTURBATION, apply_direction, mezo_update, random_direction
from jaxllm.train.step.objective import HeadObjective, make_objective
from jaxllm.train.step.step_chain import StepLink, link_state
from jaxllm.train.step.train_state import TrainState
from pallas_kernels.ring_attention import Layout

PENDING = "pending_update"
"""Name of the pending update in ``TrainState.extras``; checkpoints have none, because it is applied before a save."""


class PendingUpdate(NamedTuple):
    """Update of the last step that has not been applied yet.

    Attributes:
        due: whether there is one.
        slope: directional derivative, along the direction of the last step's key.
    """

    due: Bool[Array, ""]
    slope: Float[Array, ""]


def zo2_hooks(run: RunConfig, model: Functional) -> StepHooks:
    """Step hooks of MeZO: of ZO2 where the parameters are in host memory, else of MeZO's own step."""
    trainable = trained_params(run, model)
    parts = layerwise_parts(run.optim, run.steps, select(trainable, model.logical_axes()))
    objective: Any = make_objective(run.objective, run.z_loss)
    shared: dict[str, Any] = {"objective": objective, "layout": run.parallel.layout}
    if not run.host.params:
        return StepHooks(update=mezo_update(model, parts, **shared, trainable=trainable))
    return StepHooks(update=zo2_update(model, parts, **shared), settle=settle(model, parts))


def pending_update(config: RunConfig) -> StepLink | None:
    """Link that keeps the pending update; None for runs whose updates are applied in their own step."""
    if not (config.optim.spec.deferred and config.host.params):
        return None
    dtype = _dtype(config.model.dtype)
    return StepLink(PENDING, lambda params: PendingUpdate(jnp.zeros((), bool), jnp.zeros((), dtype)), transient=True)


def zo2_update(
    model: Functional, rules: dict[str, Any], *, objective: HeadObjective, layout: Layout = "contiguous"
) -> LayerwiseUpdate:
    """Function ``(state, batch) -> LayerwiseResult`` of ZO2: losses and parameters are those of ``mezo_update``.

    The result's parameters lack the step's own update, which is in ``extras`` (``settle`` applies it). The norms of
    update and parameters are those of the update that was applied, of the step before.

    Args:
        model, rules, objective, layout: as for ``mezo_update``.
    """

    def update(state: TrainState, batch: Any) -> LayerwiseResult:
        key = jax.random.fold_in(state.rng, state.step)
        with sharding.use_rules(model.rules):
            batch = permute_sequence(batch, layout)
        context, dtype = Segments(batch.segment_ids, layout), _dtype(model.config.dtype)
        total = jnp.maximum(objective.total(batch), 1).astype(dtype)
        sides = jnp.array([PERTURBATION, -PERTURBATION], dtype)

        def shifted(own: Any, z: Any, epsilon: Array) -> Any:
            return jax.tree.map(lambda p, z: p + (epsilon * z).astype(p.dtype), own, z)

        def group(s: str, own: Any, x: Array, first: Array) -> Array:
            own = jax.tree.map(lambda p: p[0], own)
            return model.group(int(s), own, x, batch.positions, first, context)[0]

        updated = _Updater(state, rules, dtype)
        ends, opt_state, norms = updated.ends()
        z = {name: random_direction(key, own, name) for name, own in ends.items()}
        length = optax.tree.norm(z, squared=True).astype(dtype)
        embed = lambda epsilon: model.embed(shifted(ends, z, epsilon), batch.tokens, batch.positions)  # noqa: E731
        x, first, stacks = jax.lax.map(embed, sides), 0, {}
        opt_state["segments"] = {}
        for s, (size, repeats) in segments(model).items():

            def layer(carry: Any, number: Array, s: str = s, size: int = size, first: int = first) -> Any:
                x, stack, now, norms, length = carry
                own, stack, now, more = updated.layer(s, stack, now, number)
                z = random_direction(key, own, s, number)
                x = jax.lax.map(
                    lambda side: group(s, shifted(own, z, side[0]), side[1], first + number * size), (sides, x)
                )
                return (x, stack, now, norms + more, length + optax.tree.norm(z, squared=True).astype(dtype)), None

            carry = x, state.params["segments"][s], state.opt_state["segments"][s], norms, length
            (x, stacks[s], opt_state["segments"][s], norms, length), _ = jax.lax.scan(
                layer, carry, jnp.arange(repeats, dtype=jnp.int32)
            )
            first += size * repeats

        def loss(side: tuple[Array, Array]) -> Any:
            return objective.from_hidden(model, shifted(ends, z, side[0]), side[1], batch)

        both = jax.lax.map(loss, (sides, x))
        slope = (both.loss[0] - both.loss[1]) / (2 * PERTURBATION * total)
        sums = jax.tree.map(lambda x: jnp.mean(x, axis=0), both)._replace(items=objective.items(batch))
        return LayerwiseResult(
            sums,
            {**ends, "segments": stacks},
            opt_state,
            jnp.abs(slope) * jnp.sqrt(length),
            *jnp.sqrt(norms),
            extras={PENDING: PendingUpdate(jnp.ones((), bool), slope)},
        )

    return update


def settle(model: Functional, rules: dict[str, Any]) -> Callable[[TrainState], TrainState]:
    """Function of a state that applies its pending update, as saves and evaluations need.

    Args:
        model, rules: as for ``zo2_update``.
    """

    def settled(state: TrainState) -> TrainState:
        updated = _Updater(state, rules, _dtype(model.config.dtype))
        ends, opt_state, _ = updated.ends()
        stacks: dict[str, Any] = {}
        opt_state["segments"] = {}
        for s, (_, repeats) in segments(model).items():

            def layer(carry: Any, number: Array, s: str = s) -> Any:
                _, stack, now, _ = updated.layer(s, carry[0], carry[1], number)
                return (stack, now), None

            carry = state.params["segments"][s], state.opt_state["segments"][s]
            (stacks[s], opt_state["segments"][s]), _ = jax.lax.scan(layer, carry, jnp.arange(repeats, dtype=jnp.int32))
        pending = jax.tree.map(jnp.zeros_like, link_state(state, PENDING))
        return TrainState(
            {**ends, "segments": stacks}, opt_state, state.step, state.rng, {**state.extras, PENDING: pending}
        )

    return settled


def segments(model: Functional) -> dict[str, tuple[int, int]]:
    """Segments of the model: (layers of a group, repeats) by name."""
    return {str(s): (len(group), repeats) for s, (group, repeats) in enumerate(model.config.segments)}


class _Updater:
    """Applies the pending update of a state to its parts, one at a time."""

    def __init__(self, state: TrainState, rules: dict[str, Any], dtype: Any):
        self._state, self._rules, self._dtype = state, rules, dtype
        self._pending = link_state(state, PENDING)
        self._key = jax.random.fold_in(state.rng, state.step - 1)

    def ends(self) -> tuple[Any, Any, Array]:
        """Embedding and head after the update, their optimizer states, and squared norms of updates and parameters."""
        new, states, norms = {}, dict(self._state.opt_state), jnp.zeros(2, self._dtype)
        for name in ("embedding", "head"):
            apply = functools.partial(self._apply, self._rules[name], name=name, number=0)
            own = self._state.params[name], self._state.opt_state[name]
            # In a branch of its own, so that the update is not fused with what follows and rounds as MeZO's does.
            new[name], states[name], more = jax.lax.cond(self._pending.due, apply, apply, *own)
            norms += more
        return new, states, norms

    def layer(self, s: str, stack: Any, now: Any, number: Array) -> tuple[Any, Any, Any, Array]:
        """Layer after the update, on the device; its segment's parameters and states with it; squared norms."""
        own = layer_slice(stack, number), layer_slice(now, number, self._state.opt_state["segments"][s])
        new, new_state, norms = self._apply(self._rules["segments"][s], *own, s, number)
        return new, set_layer_slice(stack, new, number), set_layer_slice(now, new_state, number), norms

    def _apply(self, rule: Any, own: Any, state: Any, name: str, number: Any) -> tuple[Any, Any, Array]:
        due, slope = self._pending
        new, new_state, norms = apply_direction(rule, own, state, self._key, slope, name, number)
        new, new_state = jax.tree.map(lambda new, old: jnp.where(due, new, old), (new, new_state), (own, state))
        norms = jnp.stack([jnp.where(due, norms[1], 0), optax.tree.norm(new, squared=True)])
        return new, new_state, norms.astype(self._dtype)


def _dtype(dtype: str) -> Any:
    return jnp.promote_types(jnp.dtype(dtype), jnp.float32)
