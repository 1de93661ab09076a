"""Sophia (arXiv:2305.14342, algorithm 3): a momentum over a diagonal of the Hessian, each number clipped to 1.

The diagonal is given from outside every few steps (``jaxllm.train.step.sophia_hessian``: the paper's Gauss-Newton-Bartlett
estimate). optax.contrib.sophia makes its own by Hutchinson's estimator, a product with the Hessian: it needs the loss
as a function inside of ``update``, and derivatives of derivatives, which fused losses and pipelines have not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int

GAMMA = 0.05
"""Of the Hessian, so that a tenth to a half of all numbers are not clipped (section 3.1)."""


class HessianEstimate(NamedTuple):
    """An estimate of the Hessian's diagonal, of the parameters' shapes, and whether there is a new one."""

    fresh: Bool[Array, ""]
    diagonal: Any


class SophiaState(NamedTuple):
    """The momentum, and the mean of the estimates."""

    count: Int[Array, ""]
    first: Any
    hessian: Any


def scale_by_sophia(b1: float, b2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """``clip(m / max(gamma h, eps), 1)``."""

    def init(params: Any) -> SophiaState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return SophiaState(jnp.zeros((), jnp.int32), zeros, jax.tree.map(jnp.zeros_like, params))

    def update(
        updates: Any, state: Any, params: Any = None, *, hessian: HessianEstimate | None = None, **others: Any
    ) -> tuple[Any, SophiaState]:
        del params, others
        if hessian is None:
            raise TypeError('"sophia": update needs a hessian (jaxllm.train.step.sophia_hessian).')
        first = jax.tree.map(lambda g, m: b1 * m + (1 - b1) * g, updates, state.first)
        mean = jax.tree.map(
            lambda new, h: jnp.where(hessian.fresh, b2 * h + (1 - b2) * new, h), hessian.diagonal, state.hessian
        )
        out = jax.tree.map(lambda m, h: jnp.clip(m / jnp.maximum(GAMMA * h, eps), -1, 1), first, mean)
        return out, SophiaState(state.count + 1, first, mean)

    return optax.GradientTransformationExtraArgs(init, update)
