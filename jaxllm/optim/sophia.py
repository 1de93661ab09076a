"""Sophia (arXiv:2305.14342, algorithm 3): momentum over a Hessian diagonal estimate, clipped elementwise to 1.

The training step provides the diagonal every few steps (``jaxllm.train.step.sophia_hessian``: the paper's
Gauss-Newton-Bartlett estimate). optax.contrib.sophia computes its own by Hutchinson's estimator, a Hessian-vector
product: it needs the loss as a function inside ``update``, and second derivatives, which fused losses and pipelines do
not have.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int

GAMMA = 0.05
"""Scale of the Hessian, chosen so that 10% to 50% of the elements are not clipped (section 3.1)."""


class HessianEstimate(NamedTuple):
    """Estimate of the Hessian's diagonal, of the parameters' shapes; ``fresh`` says whether it is new in this step."""

    fresh: Bool[Array, ""]
    diagonal: Any


class SophiaState(NamedTuple):
    """Optimizer state: the momentum, and the running mean of the Hessian estimates."""

    count: Int[Array, ""]
    first: Any
    hessian: Any


def scale_by_sophia(b1: float, b2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """Update ``clip(m / max(gamma h, eps), 1)``; ``update`` takes the estimate as ``hessian``."""

    def init(params: Any) -> SophiaState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return SophiaState(jnp.zeros((), jnp.int32), zeros, jax.tree.map(jnp.zeros_like, params))

    def update(
        updates: Any, state: Any, params: Any = None, *, hessian: HessianEstimate | None = None, **others: Any
    ) -> tuple[Any, SophiaState]:
        del params, others
        if hessian is None:
            raise TypeError('"sophia": update needs a hessian estimate (jaxllm.train.step.sophia_hessian).')
        first = jax.tree.map(lambda g, m: b1 * m + (1 - b1) * g, updates, state.first)
        mean = jax.tree.map(
            lambda new, h: jnp.where(hessian.fresh, b2 * h + (1 - b2) * new, h), hessian.diagonal, state.hessian
        )
        out = jax.tree.map(lambda m, h: jnp.clip(m / jnp.maximum(GAMMA * h, eps), -1, 1), first, mean)
        return out, SophiaState(state.count + 1, first, mean)

    return optax.GradientTransformationExtraArgs(init, update)
