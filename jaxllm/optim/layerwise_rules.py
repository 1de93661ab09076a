"""Layerwise optimizers, which update one layer before the next layer's gradients exist: LOMO, AdaLomo, MeZO.

LOMO (arXiv:2306.09782) is gradient descent, AdaLomo (arXiv:2310.10195) Adafactor with updates scaled by the
parameters' root mean square, and MeZO (arXiv:2305.17333) descent along a random direction, for which two forward
passes suffice. The memory is saved by the steps that apply them, ``jaxllm.train.step.lomo`` and
``jaxllm.train.step.mezo``; as transformations of all gradients at once they compute the same.
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
"""Least root mean square of a parameter in the scale of its update (arXiv:1804.04235, section 8)."""


def layerwise(
    make: Callable[[Any], optax.GradientTransformation], logical_axes: dict[str, Any]
) -> optax.GradientTransformation:
    """Optimizer with a separate transformation and state for each end of the model and each segment of layers.

    The arrays of a segment's state are stacked as the segment is, so rows of them belong to layers. Scalars are all
    equal.

    Args:
        make: logical axes of a part of the model -> its transformation.
        logical_axes: of all parameters.
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
    """Transformations by part of the model: "embedding", "head", and "segments" by segment."""
    return {
        name: {s: make(one) for s, one in axes.items()} if name == "segments" else make(axes)
        for name, axes in logical_axes.items()
    }


def map_parts(fn: Callable[..., Any], parts: dict[str, Any], *trees: Any) -> dict[str, Any]:
    """``fn`` of each part's transformation and that part of each tree."""
    return {
        name: {s: fn(one, *(tree[name][s] for tree in trees)) for s, one in rule.items()}
        if name == "segments"
        else fn(rule, *(tree[name] for tree in trees))
        for name, rule in parts.items()
    }


def scale_by_param_rms(logical_axes: Any) -> optax.GradientTransformation:
    """Scales updates by the root mean square of their parameter, layer by layer (arXiv:2310.10195, equation 9)."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def scaled(update: Array, param: Array, axes: tuple[str | None, ...]) -> Array:
            size = jnp.sqrt(mean(jnp.square(param), own_dims(axes)))
            return update * jnp.maximum(size, MIN_RMS).astype(update.dtype)

        return jax.tree.map(scaled, updates, params, logical_axes), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
