"""SAM, sharpness-aware minimisation (arXiv:2010.01412): momentum on gradients at the worst point of a small ball.

An optimizer with a step of its own, two gradient evaluations, as a program adds it: this file, and the row
``OPTIMIZERS["sam"] = SAM``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxllm.optim import OptimizerSpec, StepHooks
from jaxllm.optim.optimizer_spec import decayed

RADIUS = 0.05
"""Rho: radius of the ball around the parameters."""


def sharpness_aware(value_and_grad: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients at ``params + rho g / |g|``, for g the gradients at the parameters (equation 2)."""

    def gradients(state: Any, *inputs: Any) -> Any:
        _, grads = value_and_grad(state.params, *inputs)
        scale = RADIUS / optax.tree.norm(grads)
        return value_and_grad(jax.tree.map(lambda p, g: p + scale * g, state.params, grads), *inputs)

    return gradients


SAM = OptimizerSpec(
    decayed(lambda config, axes: optax.trace(decay=config.b1)),
    fields=frozenset({"b1"}),
    streamable=True,
    passes=2,
    one_pass=False,
    arrays=1,
    counters=1,
    hooks=lambda run, model: StepHooks(gradients=sharpness_aware),
)
