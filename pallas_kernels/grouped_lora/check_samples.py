"""Samples on which the kernels of the grouped low-rank matmul are compared with the reference before first use."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels._self_check import Sample, normal
from pallas_kernels.grouped_lora.adapter_tiles import PAGE_RANKS, schedule_tiles
from pallas_kernels.grouped_lora.api import grouped_lora


def samples(dtype: DTypeLike) -> list[Sample]:
    """Adapters of one to four pages in no order, rows without one, a tile without any; no size a multiple of a tile."""
    tables = np.full((5, 4), -1, np.int32)
    for slot, pages in enumerate(([3], [0, 7], [9, 1, 4, 8], [], [2, 5])):
        tables[slot, : len(pages)] = pages
    slots = np.random.default_rng(0).integers(-1, 5, 203)
    slots[64:128] = -1
    rows = schedule_tiles(
        jnp.asarray(slots, jnp.int32), jnp.asarray(tables), jnp.array([2.0, 0.5, 1.0, 3.0, 0.25], jnp.float32)
    )
    x, a, b = (
        normal(0, 203, 200, dtype=dtype),
        normal(1, 10, PAGE_RANKS, 200, dtype=dtype),
        normal(2, 10, PAGE_RANKS, 136, dtype=dtype),
    )
    return [
        Sample(
            "adapters of uneven ranks", lambda name, *args: grouped_lora(*args, implementation=name), (x, a, b, rows)
        )
    ]
