"""Packed matmul on NVIDIA GPUs: a Pallas kernel through Triton that dequantises tiles of codes in registers.

A program makes a tile of the result. It goes over the tuples of codes of its outputs a tile at a time, whose loads are
pipelined (``num_stages``): a tile's bytes are on their way while others are multiplied. A tile lies within one group of
inputs, so that each output has one scale there; where groups have fewer than 16 tuples, a tile has a scale for each
tuple. Scales in blocks are decoded from their bytes, and codes by row are read where they lie, so that neither is
written anew before the call.

Legend: M rows, K inputs, n codes of a tuple, T tuples of an output (K / n), B bytes, N outputs, G groups of inputs.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels._compat import is_interpreting, result_like, target_device
from pallas_kernels._pallas import bytes_of, check_supported, cost, dot, round_up, stated
from pallas_kernels.packed_matmul.codes import PackedBytes, PackedCodes, lane_values, result_dtype, split_lanes
from pallas_kernels.packed_matmul.config import gpu_tiles
from pallas_kernels.packed_matmul.scales import EXTRA, Scales, block_count, float8_values, joined_float, scale_values

MAX_ELEMENTS = 2**31
"""Offsets in an array are 32-bit integers."""


def packed_matmul_pallas_gpu(
    x: Float[Array, "M K"], packed: PackedBytes, scales: Scales, form: PackedCodes
) -> Float[Array, "M _"]:
    """Packed matmul on GPUs; see ``packed_matmul``.

    Raises:
        NotImplementedError: wide codes are in groups of no multiple of 16 tuples, an array has ``MAX_ELEMENTS`` or more
            elements, or see ``pallas_kernels._pallas.check_supported``.
    """
    check_supported("pallas_gpu", x=x)
    by_row = form.by_row
    (m, k), n, (groups, stored) = x.shape, packed.shape[0 if by_row else 1], scales.shape[:: -1 if by_row else 1]
    blocks = 0 if by_row or scales.dtype != jnp.uint8 else block_count(stored, n)
    block = n // blocks if blocks else 0
    rows = k // form.lanes
    size = rows // groups
    tiles = gpu_tiles(target_device().kind, m, size, groups)
    one_scale = groups == 1 or size % tiles.inner == 0
    if form.wide and not one_scale:
        raise NotImplementedError(
            f"pallas_gpu takes wide codes in groups of a multiple of 16 tuples an output, not of {size}."
        )
    if max(x.size, packed.size, m * n) >= MAX_ELEMENTS:
        raise NotImplementedError(f"pallas_gpu takes fewer than 2^31 elements: x {[m, k]}, bytes {list(packed.shape)}.")

    def body(x: Any, packed: Any, scales: Any, out: Any) -> None:
        top, left = pl.program_id(0) * tiles.rows, pl.program_id(1) * tiles.columns
        here, across = pl.ds(top, tiles.rows), pl.ds(left, tiles.columns)
        some, inside = _from(top, tiles.rows) < m, _from(left, tiles.columns) < n

        columns = _from(left, tiles.columns)

        def at(array: Any, row: Any, column: Any, mask: Array) -> Array:
            place = (column, row) if by_row else (row, column)
            return plgpu.load(array.at[place], mask=mask, other=0)

        def scale_at(group: Any, column: Array, mask: Array) -> Array:
            if not blocks:
                return scale_values(at(scales, group, column, mask))
            first = column // block * (block + EXTRA)
            byte = lambda place: at(scales, group, first + place, mask)  # noqa: E731
            unit, mean = (joined_float([byte(block + start + b) for b in range(4)]) for start in (0, 4))
            return float8_values(byte(column % block)) * unit + mean

        def more(i: Any, acc: Array) -> Array:
            start = i * tiles.inner
            part, own = pl.ds(start, tiles.inner), _from(start, tiles.inner) < rows
            both = own[:, None] & inside[None]
            places = _from(start, tiles.inner)[:, None] * form.bytes
            parts = [at(packed, places + b, columns[None], both).astype(jnp.int32) << 8 * b for b in range(form.bytes)]
            codes = functools.reduce(operator.or_, parts)
            if one_scale:
                scale = scale_at(jnp.minimum(start // size, groups - 1), columns, inside)[None]
            else:
                group = jnp.minimum(_from(start, tiles.inner) // size, groups - 1)[:, None]
                scale = scale_at(group, columns[None], both)
            for lane in range(form.lanes):
                values = lane_values(codes, lane, form)
                # Integer codes are exact in any dtype, so their sums may be scaled.
                matrix = values if form.wide else values * scale
                # A byte beyond the last is a code, too, and its value may be other than 0.
                tokens = plgpu.load(x.at[jnp.int32(lane), here, part], mask=some[:, None] & own[None], other=0.0)
                sums = dot(tokens, matrix.astype(tokens.dtype), (1, 0))
                acc += sums * scale if form.wide else sums
            return acc

        acc = jnp.zeros((tiles.rows, tiles.columns), jnp.float32)
        acc = jax.lax.fori_loop(0, -(-rows // tiles.inner), more, acc)
        plgpu.store(out.at[here, across], acc.astype(out.dtype), mask=some[:, None] & inside[None])

    made = result_like(x, (m, n), result_dtype(x.dtype, form))
    estimate = cost(2 * m * k * n, bytes_of(x, packed, scales, made))
    tall, wide, deep = round_up(m, tiles.rows), round_up(n, tiles.columns), round_up(rows, tiles.inner)
    whole = lambda *shape: pl.BlockSpec(shape, lambda *_: (0,) * len(shape))  # noqa: E731
    flat = lambda *shape: whole(*(shape[::-1] if by_row else shape))  # noqa: E731
    call = pl.pallas_call(
        body,
        grid=(tall // tiles.rows, wide // tiles.columns),
        in_specs=[whole(form.lanes, tall, deep), flat(deep * form.bytes, wide), flat(groups, max(wide, stored))],
        out_specs=whole(tall, wide),
        out_shape=made,
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=is_interpreting(),
        cost_estimate=estimate,
        metadata=stated(estimate),
        name="packed_matmul",
    )
    return call(split_lanes(x, form.lanes), packed, scales if scales.dtype == jnp.uint8 else scales.astype(jnp.float32))


def _from(start: Any, size: int) -> Array:
    return start + jnp.arange(size, dtype=jnp.int32)
