"""Matrix dimensions of parameters, derived from their logical axes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

STREAM_AXES = ("embed", "vocab_embed", "expert_embed", "latent")
"""Logical axes of the residual stream and of latents: what layers read and write."""
STACK_AXES = ("layers", "experts")
"""Logical axes along which matrices are stacked."""


class MatrixDims(NamedTuple):
    """Dimensions of a parameter that form a matrix's rows and columns; the others stack such matrices.

    Attributes:
        rows: the dimension of a residual stream or latent.
        columns: all dimensions that it is mapped to or from.
        vocabulary: whether one side is the vocabulary.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    vocabulary: bool


def matrix_dims(axes: tuple[str | None, ...]) -> MatrixDims | None:
    """Matrix dimensions of a parameter with these logical axes; None for gains and biases."""
    own = own_dims(axes)
    rows = next((i for i in own if axes[i] in STREAM_AXES), None)
    columns = tuple(i for i in own if i != rows)
    return None if rows is None or not columns else MatrixDims((rows,), columns, "vocab" in axes)


def own_dims(axes: tuple[str | None, ...]) -> tuple[int, ...]:
    """Dimensions of the parameter of a single layer and expert: all except the stacking ones."""
    return tuple(i for i, axis in enumerate(axes) if axis not in STACK_AXES)


def map_matrices(fn: Callable[[MatrixDims | None], Any], logical_axes: Any) -> Any:
    """Tree of ``fn(matrix_dims(axes))`` for a tree of logical axes."""
    return jax.tree.map(lambda axes: fn(matrix_dims(axes)), logical_axes, is_leaf=lambda x: isinstance(x, tuple))


def decay_mask(logical_axes: Any) -> Any:
    """Mask of weight decay: True for matrices and embeddings, False for gains and biases.

    Args:
        logical_axes: of the parameters.
    """
    return map_matrices(lambda found: found is not None, logical_axes)


def sides(leaf: Array, of: MatrixDims) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Dimensions of the smaller side and of the larger side of a matrix."""
    sizes = [math.prod(leaf.shape[i] for i in side) for side in (of.rows, of.columns)]
    return (of.rows, of.columns) if sizes[0] <= sizes[1] else (of.columns, of.rows)


def zeros_of_rank(leaf: Array, side: tuple[int, ...], rank: int) -> Array:
    """Zeros with an array's shape and sharding, except that ``side`` has size ``rank``."""
    return jnp.repeat(jnp.zeros_like(mean(leaf, side)), rank, axis=side[0])


def mean(x: Array, over: tuple[int, ...]) -> Array:
    """Mean over dimensions, which stay with size one."""
    return jnp.mean(x, axis=over, keepdims=True)


def decompose_each(
    decompose: Callable[[Float[Array, "S k k"]], Float[Array, "S ..."]], stack: Float[Array, "S k k"]
) -> Float[Array, "S ..."]:
    """Matrix decomposition of a stack; on CPU one matrix at a time.

    XLA's CPU decompositions of several matrices wait for threads of the pool that they run in, so that with several
    simulated devices every thread waits for another one and the program never ends.

    Args:
        decompose: stack of matrices -> stack of matrices, or of vectors.
        stack: the matrices.
    """

    def single(matrix: Float[Array, "k k"]) -> Float[Array, "..."]:
        return decompose(matrix[None])[0]

    return jax.lax.platform_dependent(stack, cpu=lambda stack: jax.lax.map(single, stack), default=decompose)


def _order(ndim: int, first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    return (*(i for i in range(ndim) if i not in first + second), *first, *second)


def to_matrices(x: Array, first: tuple[int, ...], second: tuple[int, ...]) -> Float[Array, "S a b"]:
    """Array as stacked matrices with these sides."""
    sizes = [math.prod(x.shape[i] for i in side) for side in (first, second)]
    return x.transpose(_order(x.ndim, first, second)).reshape(-1, *sizes)


def from_matrices(
    x: Float[Array, "S a b"], shape: tuple[int, ...], first: tuple[int, ...], second: tuple[int, ...]
) -> Array:
    """Inverse of ``to_matrices``, to an array of ``shape``."""
    order = _order(len(shape), first, second)
    back = sorted(range(len(shape)), key=order.__getitem__)
    return x.reshape([shape[i] for i in order]).transpose(back)
