"""Rows of a batch on a mesh that they do not divide over: rows of padding fill it up.

An elastic run keeps its global batch when devices are lost. Rows that are padding alone have no targets, so that sums
over targets, and with them losses and gradients, are those of the batch without them.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxllm.data import Batch
from sharding import Rules
from sharding.layer_layouts import row_axes

PADDING = {"targets": -1}
"""Values of rows of padding by field; 0 for others."""


def rows_on_mesh(rows: int, mesh: Mesh | AbstractMesh, rules: Rules, accumulate: int = 1) -> int:
    """Rows with padding: the smallest number from ``rows`` on that every micro-batch divides over the mesh with.

    Args:
        rows: of a global batch.
        mesh, rules: say over how many devices rows are split.
        accumulate: micro-batches of the batch.
    """
    parts = accumulate * math.prod(mesh.shape.get(axis, 1) for axis in row_axes(rules))
    return -(-rows // parts) * parts


def pad_rows(batch: Batch, rows: int) -> Batch:
    """The batch with rows of padding after its own, ``rows`` in all.

    Args:
        batch: host arrays, or their shapes, of a global batch.
        rows: at least those of the batch.
    """

    def pad(name: str, array: Any) -> Any:
        if array is None or (more := rows - array.shape[0]) == 0:
            return array
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((rows, *array.shape[1:]), array.dtype)
        return np.pad(array, [(0, more), *[(0, 0)] * (array.ndim - 1)], constant_values=PADDING.get(name, 0))

    return batch._replace(**{name: pad(name, array) for name, array in batch._asdict().items()})
