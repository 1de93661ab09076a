"""Packed matmul on TPUs: a Pallas kernel through Mosaic that dequantises tiles of codes in VMEM.

The grid runs over tiles of rows, of outputs and of tuples, the last innermost. While a tile is multiplied, the bytes of
the next are on their way (Pallas' double buffering): per weight, memory is read in the bits of a code.

Legend: M rows, K inputs, n codes of a tuple, T tuples of an output (K / n), B bytes, N outputs, G groups of inputs.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels._compat import result_like, target_device
from pallas_kernels._pallas import bytes_of, check_supported, cost, dot, interpret_tpu
from pallas_kernels.packed_matmul.codes import (
    PackedBytes,
    PackedCodes,
    by_column,
    lane_values,
    result_dtype,
    split_lanes,
    tuples,
)
from pallas_kernels.packed_matmul.config import SUBLANES, tpu_tiles
from pallas_kernels.packed_matmul.scales import Scales, scale_values


def packed_matmul_pallas_tpu(
    x: Float[Array, "M K"], packed: PackedBytes, scales: Scales, form: PackedCodes
) -> Float[Array, "M _"]:
    """Packed matmul on TPUs; see ``packed_matmul``.

    Raises:
        NotImplementedError: no tile of tuples goes with the groups, or see ``pallas_kernels._pallas.check_supported``.
    """
    check_supported("pallas_tpu", x=x)
    packed, scales = by_column(packed, scales, form)
    (m, k), n, groups = x.shape, packed.shape[1], scales.shape[0]
    rows = k // form.lanes
    size = rows // groups
    tiles = tpu_tiles(target_device().kind, m, size, rows, n, x.dtype.itemsize)
    if tiles is None:
        raise NotImplementedError(
            f"pallas_tpu takes as many tuples of codes an output as a multiple of 128 divides that holds or divides a "
            f"group; {rows} tuples in groups of {size} have none."
        )
    held = max(1, tiles.inner // size)
    last = rows // tiles.inner - 1
    # Integer codes are bfloat16 exactly, and their scales may wait where all inputs share them. Else the weights are
    # the sum of two bfloat16 matrices.
    wide = form.wide and x.dtype == jnp.bfloat16
    last_scales = wide and groups == 1
    out_dtype = result_dtype(x.dtype, form)
    # As they are stored where a block has whole tiles of groups; else the compiler lays them out anew.
    whole = held % (SUBLANES if scales.dtype == jnp.uint8 else 8) == 0 or held == groups
    if scales.dtype != jnp.uint8 or not whole:
        scales = scale_values(scales).astype(jnp.float32)

    def whole_tuples(packed: Any, kept: list[Any]) -> Array:
        """Tuples of a tile; those of several bytes by a loop over parts of it, since their reshape is unrolled."""
        if not kept:
            return tuples(packed[...], form)
        part = math.gcd(tiles.inner, SUBLANES)

        def unpack(i: Any, _: None) -> None:
            some = packed[pl.ds(pl.multiple_of(i * part * form.bytes, part), part * form.bytes), :]
            kept[0][pl.ds(pl.multiple_of(i * part, part), part), :] = tuples(some, form)

        jax.lax.fori_loop(0, tiles.inner // part, unpack, None)
        return kept[0][...]

    def body(x: Any, packed: Any, scales: Any, out: Any, acc: Any, *kept: Any) -> None:
        i = pl.program_id(2)

        @pl.when(i == 0)
        def _() -> None:
            acc[...] = jnp.zeros_like(acc)

        own = scale_values(scales[...])
        own = own[:, None] if whole else own
        spread = own[:, 0] if held == 1 else _spread(own, tiles.inner)
        codes = whole_tuples(packed, list(kept))
        for lane in range(form.lanes):
            weights = lane_values(codes, lane, form)
            weights = weights if last_scales else weights * spread
            matrix = weights.astype(x.dtype)
            acc[...] += dot(x[lane], matrix, (1, 0))
            if wide and not last_scales:
                acc[...] += dot(x[lane], (weights - matrix.astype(weights.dtype)).astype(x.dtype), (1, 0))

        @pl.when(i == last)
        def _() -> None:
            out[...] = (acc[...] * own[:, 0] if last_scales else acc[...]).astype(out.dtype)

    call = pl.pallas_call(
        body,
        grid=(pl.cdiv(m, tiles.rows), pl.cdiv(n, tiles.columns), last + 1),
        in_specs=[
            pl.BlockSpec((form.lanes, tiles.rows, tiles.inner), lambda r, c, i: (0, r, i)),
            pl.BlockSpec((tiles.inner * form.bytes, tiles.columns), lambda r, c, i: (i, c)),
            pl.BlockSpec((held, tiles.columns), lambda r, c, i: (i * tiles.inner // size // held, c))
            if whole
            else pl.BlockSpec((held, 1, tiles.columns), lambda r, c, i: (i * tiles.inner // size // held, 0, c)),
        ],
        out_specs=pl.BlockSpec((tiles.rows, tiles.columns), lambda r, c, i: (r, c)),
        out_shape=result_like(x, (m, n), out_dtype),
        scratch_shapes=[pltpu.VMEM((tiles.rows, tiles.columns), jnp.float32)]
        + [pltpu.VMEM((tiles.inner, tiles.columns), jnp.int32)] * (form.bytes > 1),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret_tpu(),
        cost_estimate=cost(2 * m * k * n, bytes_of(x, packed, scales) + m * n * out_dtype.itemsize),
        name="packed_matmul",
    )
    return call(split_lanes(x, form.lanes), packed, scales if whole else scales[:, None])


def _spread(scales: Array, rows: int) -> Array:
    """Scales [groups, 1, columns] of every row of a tile."""
    groups, _, columns = scales.shape
    return jnp.broadcast_to(scales, (groups, rows // groups, columns)).reshape(rows, columns)
