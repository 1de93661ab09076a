"""Rules for matrices within layers beside a rule for all other parameters; and rules that no mesh is told of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxllm.optim.matrix_params import MatrixDims, map_matrices


def partition_matrices(
    logical_axes: Any,
    of_matrices: Callable[[list[MatrixDims]], optax.GradientTransformation],
    of_others: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Matrices within layers by one rule; embeddings, output heads, gains and biases by another.

    Args:
        of_matrices: makes the rule for matrices, in the order of the leaves that it is given.
    """
    labels = map_matrices(lambda found: "matrices" if _within(found) else "others", logical_axes)
    found: list[MatrixDims | None] = []
    map_matrices(found.append, logical_axes)
    chosen = [one for one in found if one is not None and _within(one)]
    return optax.partition({"matrices": of_matrices(chosen), "others": of_others}, labels)


def _within(found: MatrixDims | None) -> bool:
    return found is not None and not found.vocabulary


def auto_sharded(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same on a mesh of explicit axes, with what is sent in an update left to the compiler.

    A product of a matrix with itself is ambiguous where both its sides are split.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        if jax.sharding.get_abstract_mesh().empty:
            return transform.update(updates, state)
        places = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, (updates, state))
        run: Any = jax.sharding.auto_axes(transform.update, out_sharding=places)
        return run(updates, state)

    return optax.GradientTransformation(transform.init, update)
