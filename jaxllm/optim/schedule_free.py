"""Schedule-free AdamW (arXiv:2405.15682, algorithm 1): an average of the iterates instead of a falling learning rate.

Parameters are x, the average, which is what is evaluated, saved and exported. Gradients are taken at y, a little from x
towards z, the iterates of AdamW without momentum: ``gradient_point``. optax.contrib.schedule_free is the same with y as
the parameters, so that every reader of a checkpoint would have to know of it; here only the training step does, and has
y beside x while it runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int


class ScheduleFreeState(NamedTuple):
    """The iterates z and their second moment, as parameters are; the sum of the average's weights."""

    count: Int[Array, ""]
    weights: Float[Array, ""]
    z: Any
    second: Any


def schedule_free(
    rate: optax.Schedule, b1: float, b2: float, eps: float, weight_decay: float, mask: Any
) -> optax.GradientTransformation:
    """The whole rule, learning rate and decay (of y) too. An iterate weighs its learning rate's square.

    Args:
        b1: y is ``b1 x + (1 - b1) z``.
        mask: of the parameters that decay.
    """

    def init(params: Any) -> ScheduleFreeState:
        weights = jnp.zeros((), jnp.result_type(float))
        # Not the parameters' own buffers: both are donated.
        z, second = jax.tree.map(jnp.copy, params), jax.tree.map(jnp.zeros_like, params)
        return ScheduleFreeState(jnp.zeros((), jnp.int32), weights, z, second)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        now = jnp.asarray(rate(state.count))
        weights = state.weights + (now**2).astype(state.weights.dtype)
        share, steps = now**2 / weights, state.count + 1
        second = jax.tree.map(lambda g, v: b2 * v + (1 - b2) * jnp.square(g), updates, state.second)

        def moved(g: Array, v: Array, x: Array, z: Array, decays: bool) -> Array:
            step = g / (jnp.sqrt(v / (1 - b2 ** steps.astype(v.dtype))) + eps)
            if decays:
                step = step + weight_decay * (b1 * x + (1 - b1) * z)
            return z - now.astype(z.dtype) * step

        z = jax.tree.map(moved, updates, second, params, state.z, mask)
        out = jax.tree.map(lambda x, z: share.astype(x.dtype) * (z - x), params, z)
        return out, ScheduleFreeState(steps, weights, z, second)

    return optax.GradientTransformation(init, update)


def gradient_point(b1: float, params: Any, opt_state: Any) -> Any:
    """Where the gradient is to be taken: y.

    Args:
        opt_state: of an optimizer with this rule in it.
    """
    z = optax.tree.get(opt_state, "z")
    return jax.tree.map(lambda x, z: b1 * x + (1 - b1) * z, params, z)
