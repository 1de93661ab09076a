"""Schedule-free AdamW (arXiv:2405.15682, algorithm 1): averages the iterates instead of decaying the learning rate.

The parameters are x, the average, which is evaluated, saved and exported. Gradients are taken at y, which lies between
x and z, the iterates of AdamW without momentum: ``gradient_point``. In optax.contrib.schedule_free the parameters are
y, so that every reader of a checkpoint would have to convert them; here only the training step uses y, and holds it
beside x while it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int


class ScheduleFreeState(NamedTuple):
    """Optimizer state: the iterates z, their second moment, and the sum of the averaging weights."""

    count: Int[Array, ""]
    weights: Float[Array, ""]
    z: Any
    second: Any


def schedule_free(
    rate: optax.Schedule, b1: float, b2: float, eps: float, weight_decay: float, mask: Any
) -> optax.GradientTransformation:
    """The whole update, with learning rate and weight decay (of y). An iterate's weight is its squared learning rate.

    Args:
        rate: learning-rate schedule, usually constant after warm-up.
        b1: y is ``b1 x + (1 - b1) z``.
        b2, eps: of the second moment.
        weight_decay: decoupled weight decay.
        mask: of the parameters that decay.
    """

    def init(params: Any) -> ScheduleFreeState:
        weights = jnp.zeros((), jnp.result_type(float))
        # Copies, because parameters and state are both donated.
        z, second = jax.tree.map(jnp.copy, params), jax.tree.map(jnp.zeros_like, params)
        return ScheduleFreeState(jnp.zeros((), jnp.int32), weights, z, second)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        now = jnp.asarray(rate(state.count))
        weights = state.weights + (now**2).astype(state.weights.dtype)
        share, steps = now**2 / weights, state.count + 1
        second = jax.tree.map(lambda g, v: b2 * v + (1 - b2) * jnp.square(g), updates, state.second)

        def step_z(g: Array, v: Array, x: Array, z: Array, decays: bool) -> Array:
            step = g / (jnp.sqrt(v / (1 - b2 ** steps.astype(v.dtype))) + eps)
            if decays:
                step = step + weight_decay * (b1 * x + (1 - b1) * z)
            return z - now.astype(z.dtype) * step

        z = jax.tree.map(step_z, updates, second, params, state.z, mask)
        out = jax.tree.map(lambda x, z: share.astype(x.dtype) * (z - x), params, z)
        return out, ScheduleFreeState(steps, weights, z, second)

    return optax.GradientTransformation(init, update)


def gradients_between_iterates(b1: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Step hook: gradients at ``gradient_point`` instead of at the parameters.

    Args:
        b1: interpolation between z and x.
    """

    def take(value_and_grad: Callable[..., Any]) -> Callable[..., Any]:
        def gradients(state: Any, *inputs: Any) -> Any:
            return value_and_grad(gradient_point(b1, state.params, state.opt_state), *inputs)

        return gradients

    return take


def gradient_point(b1: float, params: Any, opt_state: Any) -> Any:
    """Point y at which gradients are taken.

    Args:
        b1: interpolation between z and x.
        params: x; those without a z in the state are frozen and stay.
        opt_state: of an optimizer that contains this rule.
    """
    z = optax.tree.get(opt_state, "z")
    return jax.tree.map(lambda z, x: x if z is None else b1 * x + (1 - b1) * z, z, params, is_leaf=lambda z: z is None)
