"""Operations of one warpgroup of a Hopper GPU in Pallas' Mosaic-GPU dialect: matmuls by wgmma, and loads into its
register layouts.

Pallas' simulation of a GPU (jax 0.10) has no transposed operands, no operands in registers and no layouts. Inside
``pallas_kernels._compat.interpreting()`` the matmuls here multiply what lies in the simulated shared memory and layouts
are left out; copies, barriers and warpgroups are simulated.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels._compat import is_interpreting
from pallas_kernels._pallas import dot

TILE = plgpu.Layout.WGMMA
"""Register layout of a matmul's result."""
OF_ROWS, OF_COLUMNS = TILE.reduce(1), TILE.reduce(0)
"""Register layouts of one number for each row, or each column, of a result."""

_ALL = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()  # until jax 0.10


def laid_out(x: Array, layout: Any) -> Array:
    """``x`` in a register layout."""
    return x if is_interpreting() else plgpu.layout_cast(x, layout)


def zeros(*shape: int) -> Array:
    """Zeros in float32, laid out as the result of a matmul."""
    return laid_out(jnp.zeros(shape, jnp.float32), TILE)


def load(ref: Any, layout: Any) -> Array:
    """All of a one-dimensional ``ref``, in shared or device memory, in a register layout."""
    return ref[...] if is_interpreting() else plgpu.load(ref, *_ALL, layout=layout, optimized=False)


def spread(x: Array, shape: tuple[int, ...], layout: Any) -> Array:
    """One number for each row (``OF_ROWS``) or each column (``OF_COLUMNS``), spread over a tile of ``shape``."""
    return jax.lax.broadcast_in_dim(x, shape, (0 if layout is OF_ROWS else 1,))


def transposed_product(a: Any, b: Any) -> Array:
    """``a b^T`` in float32, of two tiles in shared memory."""
    if is_interpreting():
        product = dot(a[...], b[...], (1, 1))
        plgpu.commit_smem()  # wgmma reads as copies do, and needs no such fence between
        return product

    def multiply(result: Any) -> Array:
        plgpu.wgmma(result, a, b.transpose((1, 0)))
        return result[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[0]), jnp.float32))


def add_product(total: Array, a: Array, b: Any) -> Array:
    """``total + a b`` in float32; ``a`` lies in registers, laid out as a result, and ``b`` in shared memory."""
    if is_interpreting():
        total = total + dot(a, b[...], (1, 0))
        plgpu.commit_smem()
        return total

    def multiply(result: Any) -> None:
        plgpu.wgmma(result, a, b)

    summed: Any = pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(total))
    return summed


def tiles(count: int, rows: int, columns: int, dtype: Any) -> Any:
    """Shared memory for ``count`` operands of matmuls, tiled and swizzled as wgmma reads them."""
    as_read = () if is_interpreting() else (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM((count, rows, columns), dtype, transforms=as_read)
