"""Samples on which the recurrent kernels are compared with the reference before their first use."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels._self_check import Sample, normal
from pallas_kernels.recurrent.api import recurrent
from pallas_kernels.recurrent.cells import CELLS


def samples(dtype: DTypeLike) -> list[Sample]:
    """Packed rows, no size a multiple of a block; every cell. Matrices are small, so that rounding does not grow.

    Input gates of a head of the sLSTM are so small that their exponentials are zero without the stabiliser.
    """
    b, s, n, h = 19, 37, 2, 32
    resets = jnp.asarray(np.random.default_rng(0).random((b, s)) < 0.1)

    def run(name: str, x: Any, matrices: Any, bias: Any, resets: Any, cell: Any) -> Any:
        return recurrent(x, matrices, bias, cell=cell, resets=resets, implementation=name)[0]

    def arrays(cell: str) -> tuple[Any, ...]:
        gates = len(CELLS[cell].gates)
        matrices = normal(1, n, gates, h, h, dtype=dtype) * jnp.asarray(h**-0.5, dtype)
        bias = normal(2, n, gates, h, dtype=dtype)
        if cell == "slstm":
            bias = bias.at[1, CELLS[cell].gates.index("i")].add(-120)
        return normal(0, b, s, n, gates, h, dtype=dtype), matrices, bias, resets

    return [Sample(cell, functools.partial(run, cell=cell), arrays(cell), 3) for cell in CELLS]
