"""Grouped matmul on NVIDIA GPUs: Pallas kernels through Triton.

A program owns a tile of rows with one group that has rows in it (see ``steps.TileSteps``) and some columns. For the
weight gradient it owns a tile of one group's matrix and loops over the group's rows, so partial sums are added in a
fixed order.

Arrays are not padded: loads mask what lies beyond an edge. Triton's refs know only an array's address; the shapes
given to them are rounded up for the interpreter, which shifts slices that leave the array.

Legend: M rows, E groups, K columns of a row, N columns of the result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import is_interpreting, result_like, target_device
from pallas_kernels._pallas import bytes_of, check_supported, cost, dot, round_up, stated
from pallas_kernels.grouped_matmul import config, steps
from pallas_kernels.grouped_matmul.steps import TileSteps

MAX_ELEMENTS = 2**31
"""Offsets in an array are 32-bit integers."""


def grouped_matmul_pallas_gpu(
    lhs: Float[Array, "M K"], rhs: Float[Array, "E K N"], group_sizes: Int[Array, " E"]
) -> Float[Array, "M N"]:
    """Grouped matmul on GPUs; see ``grouped_matmul``.

    Raises:
        NotImplementedError: an array has ``MAX_ELEMENTS`` or more elements, or see
            ``pallas_kernels._pallas.check_supported``.
    """
    check_supported("pallas_gpu", lhs=lhs, rhs=rhs)
    (m, _), (e, k, n) = lhs.shape, rhs.shape
    if max(m * k, m * n, e * k * n) >= MAX_ELEMENTS:
        raise NotImplementedError(
            f"pallas_gpu takes arrays of fewer than 2^31 elements: lhs {[m, k]}, rhs {[e, k, n]}, result {[m, n]}."
        )
    return steps.multiply(_Kernels(), lhs, rhs, group_sizes)


class _Kernels(NamedTuple):
    """GPU kernels of ``steps.multiply``."""

    def matmul(self, rows: Array, matrices: Array, group_sizes: Array, transposed: bool) -> Array:
        (m, inner), (e, *shape) = rows.shape, matrices.shape
        columns = shape[0] if transposed else shape[1]
        tiles = config.gpu_tiles(target_device().kind, m, e, rows.dtype.itemsize)
        plan = TileSteps.of(group_sizes, m, tiles.rows)
        most = plan.group.shape[0]

        def body(groups: Any, tile: Any, ends: Any, count: Any, rows: Any, matrices: Any, out: Any) -> None:
            step = pl.program_id(2) * tiles.together + pl.program_id(0)
            live = step < count[0]
            step = jnp.minimum(step, most - 1)
            group, start = groups[step], tile[step] * tiles.rows
            begin, end = ends[group], ends[group + 1]
            first = pl.program_id(1) * tiles.columns
            across = _from(first, tiles.columns) < columns
            own = jnp.minimum(group, e - 1)
            some = _from(start, tiles.rows) < m

            def more(k: Any, acc: Array) -> Array:
                here, deep = pl.ds(k * tiles.inner, tiles.inner), _from(k * tiles.inner, tiles.inner) < inner
                a = _load(rows, (pl.ds(start, tiles.rows), here), some, deep, (m % tiles.rows, inner % tiles.inner))
                edges = columns % tiles.columns, inner % tiles.inner
                if transposed:
                    b = _load(matrices, (own, pl.ds(first, tiles.columns), here), across, deep, edges)
                else:
                    b = _load(matrices, (own, here, pl.ds(first, tiles.columns)), deep, across, (edges[1], edges[0]))
                return acc + dot(a, b, (1, 1 if transposed else 0))

            acc = jnp.zeros((tiles.rows, tiles.columns), jnp.float32)
            # No matmul for rows after the last group, nor in steps after the last one.
            some_group = (live & (group < e)).astype(jnp.int32)
            acc = jax.lax.fori_loop(jnp.int32(0), some_group * -(-inner // tiles.inner), more, acc)
            at = _from(start, tiles.rows)
            inside = ((at >= begin) & (at < end) & live)[:, None] & across[None]
            ref = out.at[pl.ds(start, tiles.rows), pl.ds(first, tiles.columns)]
            plgpu.store(ref, acc.astype(out.dtype), mask=inside)

        return _call(
            body,
            (tiles.together, -(-columns // tiles.columns), -(-most // tiles.together)),
            (*plan, rows, matrices),
            ((m, columns), (tiles.rows, tiles.columns)),
            ((tiles.rows, tiles.inner), (tiles.columns, tiles.inner) if transposed else (tiles.inner, tiles.columns)),
            tiles,
            2 * m * inner * columns,
            "grouped_matmul_d_lhs" if transposed else "grouped_matmul",
        )

    def outer(self, lhs: Array, d_out: Array, group_sizes: Array) -> Array:
        (m, left), columns, e = lhs.shape, d_out.shape[1], group_sizes.shape[0]
        tiles = config.gpu_tiles(target_device().kind, m, e, lhs.dtype.itemsize)
        ends = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), m)])
        size = tiles.rows_back

        def body(ends: Any, lhs: Any, d_out: Any, out: Any) -> None:
            group = pl.program_id(2)
            begin, end = ends[group], ends[group + 1]
            corner = pl.program_id(0) * tiles.left_back, pl.program_id(1) * tiles.columns_back
            spans = pl.ds(corner[0], tiles.left_back), pl.ds(corner[1], tiles.columns_back)
            down, across = _from(corner[0], tiles.left_back) < left, _from(corner[1], tiles.columns_back) < columns

            def more(i: Any, acc: Array) -> Array:
                start = begin + i * size
                inside = _from(start, size) < end
                here = pl.ds(start, size)
                a = _load(lhs, (here, spans[0]), inside, down, (1, left % tiles.left_back))
                b = _load(d_out, (here, spans[1]), inside, across, (1, columns % tiles.columns_back))
                return acc + dot(a, b, (0, 0))

            acc = jnp.zeros((tiles.left_back, tiles.columns_back), jnp.float32)
            acc = jax.lax.fori_loop(jnp.int32(0), (end - begin + size - 1) // size, more, acc)
            ref = out.at[(group, *spans)]
            plgpu.store(ref, acc.astype(out.dtype), mask=down[:, None] & across[None])

        return _call(
            body,
            (-(-left // tiles.left_back), -(-columns // tiles.columns_back), e),
            (ends, lhs, d_out),
            ((e, left, columns), (tiles.left_back, tiles.columns_back)),
            ((size, tiles.left_back), (size, tiles.columns_back)),
            tiles,
            2 * m * left * columns,
            "grouped_matmul_d_rhs",
        )


def _call(
    body: Any,
    grid: tuple[int, ...],
    operands: tuple[Array, ...],
    result: tuple[tuple[int, ...], tuple[int, int]],
    blocks: tuple[tuple[int, int], tuple[int, int]],
    tiles: config.GroupedGpuTiles,
    flops: int,
    name: str,
) -> Array:
    """Launches the kernel over ``grid``; the last two operands and the result are blocked, the others are scalars."""
    shape, block = result
    made = result_like(operands[-2], shape, operands[-2].dtype)
    estimate = cost(flops, bytes_of(*operands, made))
    *scalars, a, b = operands

    def spec(shape: tuple[int, ...], block: tuple[int, int]) -> pl.BlockSpec:
        # One more block of rows, because a group may begin anywhere.
        rounded = round_up(shape[-2], block[0]) + block[0], round_up(shape[-1], block[1])
        return pl.BlockSpec((*shape[:-2], *rounded), lambda *_: (0,) * len(shape))

    whole = [pl.BlockSpec(x.shape, lambda *_: (0,)) for x in scalars]
    call = pl.pallas_call(
        body,
        grid=grid,
        in_specs=[*whole, spec(a.shape, blocks[0]), spec(b.shape, blocks[1])],
        out_specs=spec(shape, block),
        out_shape=made,
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=is_interpreting(),
        cost_estimate=estimate,
        metadata=stated(estimate),
        name=name,
    )
    return call(*operands)


def _from(start: Any, size: int) -> Array:
    return start + jnp.arange(size, dtype=jnp.int32)


def _load(ref: Any, where: tuple[Any, ...], row: Array, column: Array, edges: tuple[int, int]) -> Array:
    """A block with zeros where ``row`` or ``column`` is false; an entry of ``edges`` is 0 where the mask is
    all true.
    """
    masks = [m for m, edge in ((row[:, None], edges[0]), (column[None], edges[1])) if edge]
    if not masks:
        return plgpu.load(ref.at[where])
    mask = jnp.broadcast_to(masks[0] if len(masks) == 1 else masks[0] & masks[1], (len(row), len(column)))
    return plgpu.load(ref.at[where], mask=mask, other=0.0)
