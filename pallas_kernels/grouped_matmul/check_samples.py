"""Samples on which the kernels of the grouped matmul are compared with the reference before their first use."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels._self_check import Sample, normal
from pallas_kernels.grouped_matmul.api import grouped_matmul


def samples(dtype: DTypeLike) -> list[Sample]:
    """Groups of no whole number of tiles, empty ones, rows after the last; more tiles than are kept together.

    A group ends a row after a tile of 128 does, and two tiles that do not run one after the other share rows.
    """
    sizes = jnp.array([37, 250, 0, 290, 1, 0, 403, 172, 60, 0], jnp.int32)
    lhs, rhs = normal(0, 1230, 80, dtype=dtype), normal(1, 10, 80, 72, dtype=dtype)
    return [
        Sample(
            "uneven groups",
            lambda name, lhs, rhs, sizes: grouped_matmul(lhs, rhs, sizes, implementation=name),
            (lhs, rhs, sizes),
            2,
        )
    ]
