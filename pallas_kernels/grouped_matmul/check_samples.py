"""Samples on which the kernels of the grouped matmul are compared with the reference before their first use."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels._self_check import Sample, normal
from pallas_kernels.grouped_matmul.api import grouped_matmul


def samples(dtype: DTypeLike) -> list[Sample]:
    """Groups of no whole number of tiles, empty ones, rows after the last; more tiles than are kept together. Then the
    same in rows and columns of whole tiles, which ``mosaic_gpu`` takes alone.

    A group ends a row after a tile of 128 does, and two tiles that do not run one after the other share rows.
    """
    return [
        _sample("uneven groups", (37, 250, 0, 290, 1, 0, 403, 172, 60, 0), (1230, 80, 72), dtype),
        _sample("uneven groups, whole tiles", (37, 0, 120, 5, 1, 0, 30, 20), (256, 192, 128), dtype),
    ]


def _sample(label: str, sizes: tuple[int, ...], shape: tuple[int, int, int], dtype: DTypeLike) -> Sample:
    rows, inner, columns = shape
    lhs, rhs = normal(0, rows, inner, dtype=dtype), normal(1, len(sizes), inner, columns, dtype=dtype)
    return Sample(
        label,
        lambda name, lhs, rhs, sizes: grouped_matmul(lhs, rhs, sizes, implementation=name),
        (lhs, rhs, jnp.array(sizes, jnp.int32)),
        2,
    )
