"""Parameter groups: one rule for matrices within layers and another for all other parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxllm.optim.matrix_params import MatrixDims, map_matrices
from sharding.rules import split_sizes


def partition_matrices(
    logical_axes: Any,
    of_matrices: Callable[[list[MatrixDims]], optax.GradientTransformation],
    of_others: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Matrices within layers by one rule; embeddings, output heads, gains and biases by another.

    Args:
        logical_axes: of the parameters.
        of_matrices: dimensions of the matrices, in the order of leaves -> the rule for them.
        of_others: the rule for other parameters.
    """
    labels = map_matrices(lambda found: "matrices" if _within(found) else "others", logical_axes)
    found: list[MatrixDims | None] = []
    map_matrices(found.append, logical_axes)
    chosen = [one for one in found if one is not None and _within(one)]
    return optax.partition({"matrices": of_matrices(chosen), "others": of_others}, labels)


def _within(found: MatrixDims | None) -> bool:
    return found is not None and not found.vocabulary


def auto_sharded(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same rule with automatic sharding: on an explicit mesh, the compiler chooses the update's collectives.

    With explicit axes, the matmul of a matrix with itself is ambiguous where both its sides are sharded.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        mesh = jax.sharding.get_abstract_mesh()
        axes = () if mesh.empty else tuple(split_sizes(mesh))  # not the manual ones, inside a replica
        if not axes:
            return transform.update(updates, state)
        places = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, (updates, state))
        run: Any = jax.sharding.auto_axes(transform.update, axes=axes, out_sharding=places)
        return run(updates, state)

    return optax.GradientTransformation(transform.init, update)
