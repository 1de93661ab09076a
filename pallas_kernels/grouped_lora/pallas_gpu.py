"""Grouped low-rank matmul on NVIDIA GPUs: two Pallas kernels through Triton, one for each factor.

The first has a program for each step of the schedule: a tile of rows with one page of the left factors. It writes each
row's product to the columns of that page. The second has a program for each tile of the result, which adds the pages
of its rows up in a fixed order.

Arrays are not padded: loads mask what lies beyond an edge, see ``pallas_kernels.grouped_matmul.pallas_gpu``.

Legend: M rows, P pages, R ranks of a page, K columns of a row, N columns of the result, J pages of the largest adapter.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels._compat import is_interpreting, result_like
from pallas_kernels._pallas import bytes_of, check_supported, cost, dot, round_up, stated
from pallas_kernels.grouped_lora.adapter_tiles import AdapterTiles, parts_of_step, tile_rows

INNER = 64
"""Columns of a row that are multiplied at a time."""
COLUMNS = 128
"""Columns of a tile of the result."""
MAX_ELEMENTS = 2**31
"""Offsets in an array are 32-bit integers."""


def grouped_lora_pallas_gpu(
    x: Float[Array, "M K"], a: Float[Array, "P R K"], b: Float[Array, "P R N"], rows: AdapterTiles
) -> Float[Array, "M N"]:
    """Grouped low-rank matmul on GPUs; see ``grouped_lora``.

    Raises:
        NotImplementedError: a page has fewer than 16 ranks or no power of two of them, an array has ``MAX_ELEMENTS`` or
            more elements, or see ``pallas_kernels._pallas.check_supported``.
    """
    check_supported("pallas_gpu", x=x, a=a, b=b)
    (m, _), (_, ranks, n) = x.shape, b.shape
    if ranks < 16 or ranks & (ranks - 1):
        raise NotImplementedError(f"pallas_gpu takes pages of 16, 32, 64, ... ranks, not {ranks}.")
    if max(x.size, a.size, b.size, m * n) >= MAX_ELEMENTS:
        raise NotImplementedError(
            f"pallas_gpu takes arrays of fewer than 2^31 elements: x {list(x.shape)}, a {list(a.shape)}, b "
            f"{list(b.shape)}, result {[m, n]}."
        )
    return _expand(_shrink(x, a, rows), b, rows)


def _shrink(x: Array, a: Array, rows: AdapterTiles) -> Float[Array, "M JR"]:
    """Each row times its adapter's left pages, scaled; columns of pages that its adapter does not have are not set."""
    (m, k), (_, ranks, _), size, (slots, columns) = x.shape, a.shape, tile_rows(x.shape[0]), rows.tables.shape

    def body(steps: Any, first: Any, tables: Any, scales: Any, own: Any, x: Any, a: Any, out: Any) -> None:
        i = pl.program_id(0)
        tile, slot, column = parts_of_step(steps[i], slots, columns)
        live = (i < first[-(-m // size)]) & (slot < slots)
        # Steps after the last one are out of range.
        tile, slot, column = (jnp.where(live, part, 0) for part in (tile, slot, column))
        page = jnp.maximum(tables[slot * columns + column], 0)
        here, some = pl.ds(tile * size, size), _from(tile * size, size) < m

        def more(j: Any, acc: Array) -> Array:
            deep, inside = pl.ds(j * INNER, INNER), _from(j * INNER, INNER) < k
            tokens = plgpu.load(x.at[here, deep], mask=some[:, None] & inside[None], other=0.0)
            factor = plgpu.load(a.at[page, :, deep], mask=_rows_of(inside, ranks), other=0.0)
            return acc + dot(tokens, factor, (1, 1))

        acc = jnp.zeros((size, ranks), jnp.float32)
        acc = jax.lax.fori_loop(jnp.int32(0), live.astype(jnp.int32) * -(-k // INNER), more, acc)
        mine = live & some & (plgpu.load(own.at[here], mask=some, other=-1) == slot)
        acc = (acc * scales[slot]).astype(out.dtype)
        ref = out.at[here, pl.ds(column * ranks, ranks)]
        plgpu.store(ref, acc, mask=jnp.broadcast_to(mine[:, None], acc.shape))

    scalars = rows.steps, rows.first, rows.tables.reshape(-1), rows.scales.astype(jnp.float32), rows.slots
    made = result_like(x, (m, columns * ranks), x.dtype)
    estimate = cost(2 * m * ranks * k, bytes_of(x, a, made))
    return _call(body, rows.steps.shape, scalars, (x, a), (INNER, INNER), made, ranks, size, estimate, "grouped_lora_a")


def _expand(inner: Array, b: Array, rows: AdapterTiles) -> Float[Array, "M N"]:
    """Sum over the pages of each row's adapter."""
    m, (_, ranks, n), size, (slots, columns) = inner.shape[0], b.shape, tile_rows(inner.shape[0]), rows.tables.shape

    def body(steps: Any, first: Any, tables: Any, own: Any, inner: Any, b: Any, out: Any) -> None:
        tile, start = pl.program_id(0), pl.program_id(1) * COLUMNS
        here, some = pl.ds(tile * size, size), _from(tile * size, size) < m
        across, inside = pl.ds(start, COLUMNS), _from(start, COLUMNS) < n
        slot_of_row = plgpu.load(own.at[here], mask=some, other=-1)

        def more(i: Any, acc: Array) -> Array:
            _, slot, column = parts_of_step(steps[i], slots, columns)
            page = jnp.maximum(tables[jnp.minimum(slot, slots - 1) * columns + column], 0)
            mine = jnp.broadcast_to(((slot_of_row == slot) & some)[:, None], (size, ranks))
            left = plgpu.load(inner.at[here, pl.ds(column * ranks, ranks)], mask=mine, other=0.0)
            used = inside & (slot < slots)
            right = plgpu.load(b.at[page, :, across], mask=_rows_of(used, ranks), other=0.0)
            return acc + dot(left, right, (1, 0))

        acc = jnp.zeros((size, COLUMNS), jnp.float32)
        acc = jax.lax.fori_loop(first[tile], first[tile + 1], more, acc)
        plgpu.store(out.at[here, across], acc.astype(out.dtype), mask=some[:, None] & inside[None])

    scalars = rows.steps, rows.first, rows.tables.reshape(-1), rows.slots
    made = result_like(inner, (m, n), inner.dtype)
    grid = rows.first.shape[0] - 1, -(-n // COLUMNS)
    estimate = cost(2 * m * ranks * n, bytes_of(inner, b, made))
    return _call(body, grid, scalars, (inner, b), (ranks, COLUMNS), made, COLUMNS, size, estimate, "grouped_lora_b")


def _call(
    body: Any,
    grid: tuple[int, ...],
    scalars: tuple[Array, ...],
    operands: tuple[Array, Array],
    blocks: tuple[int, int],
    made: jax.ShapeDtypeStruct,
    block: int,
    size: int,
    estimate: pl.CostEstimate,
    name: str,
) -> Array:
    rows, pages = operands

    def spec(shape: tuple[int, ...], columns: int, tall: int) -> pl.BlockSpec:
        rounded = round_up(shape[-2], tall), round_up(shape[-1], columns)
        return pl.BlockSpec((*shape[:-2], *rounded), lambda *_: (0,) * len(shape))

    *integers, slots = scalars
    call = pl.pallas_call(
        body,
        grid=grid,
        in_specs=[
            *(pl.BlockSpec(x.shape, lambda *_: (0,)) for x in integers),
            pl.BlockSpec((round_up(slots.shape[0], size),), lambda *_: (0,)),
            spec(rows.shape, blocks[0], size),
            spec(pages.shape, blocks[1], 1),
        ],
        out_specs=spec(made.shape, block, size),
        out_shape=made,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=is_interpreting(),
        cost_estimate=estimate,
        metadata=stated(estimate),
        name=name,
    )
    return call(*scalars, *operands)


def _from(start: Any, size: int) -> Array:
    return start + jnp.arange(size, dtype=jnp.int32)


def _rows_of(mask: Array, count: int) -> Array:
    """A mask of columns, for each of ``count`` rows."""
    return jnp.broadcast_to(mask[None], (count, mask.shape[0]))
