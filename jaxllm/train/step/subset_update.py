"""Updates of a subset of the parameters (``jaxllm.models.param_subset``): optimizer state for the subset alone."""

from __future__ import annotations

from typing import Any, cast

import jax
import optax

from jaxllm.models.param_subset import is_frozen, select


def subset_optimizer(optimizer: optax.GradientTransformation, mask: Any) -> optax.GradientTransformation:
    """Optimizer that takes all parameters and gradients of a subset, and keeps state for the subset.

    Args:
        optimizer: for the subset.
        mask: of the subset; None: all parameters.
    """
    if mask is None:
        return optimizer
    inner = optax.with_extra_args_support(optimizer)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return inner.update(updates, state, select(mask, params), **extra)

    return optax.GradientTransformationExtraArgs(lambda params: inner.init(select(mask, params)), update)


def apply_updates(params: Any, updates: Any) -> Any:
    """``optax.apply_updates`` where updates may be those of a subset; the other parameters are returned as they are."""

    def one(update: Any, param: jax.Array) -> jax.Array:
        return param if update is None else cast(jax.Array, optax.apply_updates(param, update))

    return jax.tree.map(one, updates, params, is_leaf=is_frozen)
