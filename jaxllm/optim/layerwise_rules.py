"""Rules that move one layer before the next one's gradients exist: LOMO, AdaLomo, MeZO.

LOMO (arXiv:2306.09782) is gradient descent, AdaLomo (arXiv:2310.10195) Adafactor whose steps have the parameters' size,
and MeZO (arXiv:2305.17333) descent along a random direction, for which two forward passes are enough. What makes them
small is the step that applies them, ``jaxllm.train.step.lomo`` and ``jaxllm.train.step.mezo``; as transformations of all
gradients together they do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxllm.optim.matrix_params import mean, own_dims

MIN_RMS = 1e-3
"""Of a parameter's root mean square, as its step's size takes it (arXiv:1804.04235, section 8)."""


def layerwise(
    make: Callable[[Any], optax.GradientTransformation], logical_axes: dict[str, Any]
) -> optax.GradientTransformation:
    """A transformation for each end of the model and each of its segments, with a state of its own.

    A state's arrays then are stacked as its segment is: those of a layer are rows of them. Scalars are all the same.

    Args:
        make: the transformation for parameters with these logical axes.
    """
    parts = layerwise_transforms(make, logical_axes)

    def init(params: Any) -> Any:
        return map_parts(lambda rule, own: rule.init(own), parts, params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        both = map_parts(lambda rule, *args: rule.update(*args), parts, updates, state, params)
        pick = lambda i: map_parts(lambda _, pair: pair[i], parts, both)  # noqa: E731
        return pick(0), pick(1)

    return optax.GradientTransformation(init, update)


def layerwise_transforms(
    make: Callable[[Any], optax.GradientTransformation], logical_axes: dict[str, Any]
) -> dict[str, Any]:
    """By end of the model; of ``segments`` by segment."""
    return {
        name: {s: make(one) for s, one in axes.items()} if name == "segments" else make(axes)
        for name, axes in logical_axes.items()
    }


def map_parts(fn: Callable[..., Any], parts: dict[str, Any], *trees: Any) -> dict[str, Any]:
    """``fn`` of each part's rule and its part of each tree."""
    return {
        name: {s: fn(one, *(tree[name][s] for tree in trees)) for s, one in rule.items()}
        if name == "segments"
        else fn(rule, *(tree[name] for tree in trees))
        for name, rule in parts.items()
    }


def scale_by_param_rms(logical_axes: Any) -> optax.GradientTransformation:
    """Updates times the root mean square of the parameter, layer by layer (arXiv:2310.10195, equation 9)."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def scaled(update: Array, param: Array, axes: tuple[str | None, ...]) -> Array:
            size = jnp.sqrt(mean(jnp.square(param), own_dims(axes)))
            return update * jnp.maximum(size, MIN_RMS).astype(update.dtype)

        return jax.tree.map(scaled, updates, params, logical_axes), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
