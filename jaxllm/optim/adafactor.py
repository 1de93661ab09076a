"""Adafactor's second moment, factored by row and column (arXiv:1804.04235, algorithms 4 and 5).

optax.scale_by_factored_rms factors an array's two largest dimensions; stacked layers would share statistics.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from jaxllm.optim.matrix_params import MatrixDims, map_matrices, mean, own_dims

DECAY = 0.8
LARGEST_RMS = 1.0


class FactoredState(NamedTuple):
    """Optimizer state of Adafactor: (row means, column means) for matrices, elementwise means for other parameters."""

    count: Int[Array, ""]
    squares: Any


def scale_by_adafactor(logical_axes: Any, eps: float) -> optax.GradientTransformation:
    """Divides gradients by the root of their factored second moment; clips to a root mean square of 1 per layer.

    The decay of the second moment is ``1 - t**-0.8`` (section 7.2).

    Args:
        logical_axes: of the parameters.
        eps: added to squared gradients.
    """
    tree = map_matrices(lambda found: found, logical_axes)

    def init(params: Any) -> FactoredState:
        def zeros(param: Array, found: MatrixDims | None) -> Any:
            if found is None:
                return jnp.zeros_like(param)
            return tuple(jnp.zeros_like(mean(param, over)) for over in (found.columns, found.rows))

        return FactoredState(jnp.zeros((), jnp.int32), _map(zeros, params, tree))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        count = state.count + 1
        decay = 1 - count.astype(jnp.result_type(float)) ** -DECAY

        def kept(grad: Array, found: MatrixDims | None, old: Any) -> Any:
            square, now = jnp.square(grad) + eps, decay.astype(grad.dtype)
            if found is None:
                return now * old + (1 - now) * square
            sides = (found.columns, found.rows)
            return tuple(now * was + (1 - now) * mean(square, over) for was, over in zip(old, sides, strict=True))

        def scaled(grad: Array, found: MatrixDims | None, axes: tuple[str | None, ...], squares: Any) -> Array:
            if found is None:
                out = grad * jax.lax.rsqrt(squares)
            else:
                by_row, by_column = squares
                share = by_row / mean(by_row, found.rows)
                out = grad * jax.lax.rsqrt(share * by_column)
            return out / jnp.maximum(1, jnp.sqrt(mean(jnp.square(out), own_dims(axes))) / LARGEST_RMS)

        squares = _map(kept, updates, tree, state.squares)
        return _map(scaled, updates, tree, logical_axes, squares), FactoredState(count, squares)

    return optax.GradientTransformation(init, update)


def _map(fn: Any, first: Any, tree: Any, *rest: Any) -> Any:
    """``jax.tree.map`` over arrays, with the subtrees at their places in trees that are deeper."""
    leaves, structure = jax.tree.flatten(first)
    return structure.unflatten(
        [fn(*args) for args in zip(leaves, *(structure.flatten_up_to(one) for one in (tree, *rest)), strict=True)]
    )
