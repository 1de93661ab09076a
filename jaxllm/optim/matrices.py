"""Which parameters are matrices, and of what: read off their logical axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

STREAMS = ("embed", "vocab_embed", "expert_embed", "latent")
"""Logical axes of what layers read and write."""
STACKS = ("layers", "experts")
"""Logical axes along which matrices lie beside each other."""


class Matrix(NamedTuple):
    """Dimensions of a parameter that are a matrix's rows and its columns; others are stacks of such matrices.

    Attributes:
        rows: a stream's dimension.
        columns: all that it is mapped to or from.
        vocabulary: whether a side of it is.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    vocabulary: bool


def matrix_of(axes: tuple[str | None, ...]) -> Matrix | None:
    """Of a parameter with these logical axes; None for gains and biases."""
    own = [i for i, axis in enumerate(axes) if axis not in STACKS]
    rows = next((i for i in own if axes[i] in STREAMS), None)
    columns = tuple(i for i in own if i != rows)
    return None if rows is None or not columns else Matrix((rows,), columns, "vocab" in axes)


def map_matrices(fn: Callable[[Matrix | None], Any], logical_axes: Any) -> Any:
    """A tree of ``fn(matrix_of(axes))`` for a tree of logical axes."""
    return jax.tree.map(lambda axes: fn(matrix_of(axes)), logical_axes, is_leaf=lambda x: isinstance(x, tuple))
