"""Grouped matmul on Hopper GPUs: Pallas Mosaic-GPU kernels, which feed wgmma from shared memory filled by TMA.

A program owns a tile of the result. Its rows may belong to several groups: for each of these it multiplies the whole
tile with the group's matrix, and keeps the group's rows. So a tile is stored once, whole. For the weight gradient a
program owns a tile of one group's matrix and sums over the tiles of rows in which the group has some; in the first and
last of them the rows of other groups are set to zero in shared memory, in both operands, since these may be infinite.

Legend: M rows, E groups, K columns of a row, N columns of the result.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_over, varying_axes
from pallas_kernels._mosaic_gpu import NAME, add_product, check_hopper, interpret_mosaic_gpu, swizzled
from pallas_kernels.grouped_matmul import steps

ROWS, INNER = 128, 64
"""Rows of a tile; columns of it that a step of the pipeline multiplies, and rows that one of the gradient sums over."""
PIPELINE = 4
"""Steps whose tiles are in shared memory or on their way."""


def grouped_matmul_mosaic_gpu(
    lhs: Float[Array, "M K"], rhs: Float[Array, "E K N"], group_sizes: Int[Array, " E"]
) -> Float[Array, "M N"]:
    """Grouped matmul on Hopper GPUs; see ``grouped_matmul``.

    Raises:
        NotImplementedError: M is no multiple of ``ROWS``, or K or N of ``INNER``, or see
            ``pallas_kernels._mosaic_gpu.check_hopper``.
    """
    check_hopper(lhs=lhs, rhs=rhs)
    (m, k), n = lhs.shape, rhs.shape[2]
    if m % ROWS or k % INNER or n % INNER:
        raise NotImplementedError(
            f"{NAME} takes rows in multiples of {ROWS} and columns in multiples of {INNER}, not lhs {[m, k]} and "
            f"{n} columns of the result."
        )
    return steps.multiply(_Kernels(), lhs, rhs, group_sizes)


class _Kernels(NamedTuple):
    """Hopper kernels of ``steps.multiply``."""

    def matmul(self, rows: Array, matrices: Array, group_sizes: Array, transposed: bool) -> Array:
        (m, inner), columns = rows.shape, matrices.shape[1 if transposed else 2]
        begins, ends = _bounds(group_sizes, m)
        at = jnp.arange(m // ROWS, dtype=jnp.int32)[:, None] * ROWS
        first, last = (jnp.sum(x, axis=1, dtype=jnp.int32) for x in (ends[None] <= at, begins[None] < at + ROWS))
        wide = _tile(columns)
        blocks = (ROWS, INNER), (wide, INNER) if transposed else (INNER, wide)

        def body(first: Any, last: Any, begins: Any, ends: Any, rows: Any, matrices: Any, out: Any) -> None:
            column, tile = jax.lax.axis_index("columns"), jax.lax.axis_index("tiles")

            def product(group: Any, acc: Any) -> Array:
                def more(_: Any, a: Any, b: Any) -> None:
                    add_product(acc, a, b, transposed="b" if transposed else "")

                across = (lambda k: (column, k)) if transposed else (lambda k: (k, column))
                some = jnp.where(begins[group] < ends[group], inner // INNER, 0)
                _pipelined(more, some, blocks, (lambda k: (tile, k), across), rows, matrices.at[group])
                return acc[...]

            def store(ready: Any) -> None:
                ready[...] = jnp.zeros((ROWS, wide), out.dtype)

                def keep(i: Any, _: Any) -> None:
                    group = first[tile] + i
                    found = pl.run_scoped(functools.partial(product, group), plgpu.WGMMAAccumulatorRef((ROWS, wide)))
                    row = tile * ROWS + _down(ROWS, wide)
                    own = (row >= begins[group]) & (row < ends[group])
                    ready[...] = jnp.where(own, found.astype(out.dtype), ready[...])

                jax.lax.fori_loop(jnp.int32(0), last[tile] - first[tile], keep, None)
                _copy_out(ready, out.at[pl.ds(tile * ROWS, ROWS), pl.ds(column * wide, wide)])

            pl.run_scoped(store, plgpu.SMEM((ROWS, wide), out.dtype, transforms=swizzled(out.dtype, wide)))

        name = "grouped_matmul_d_lhs" if transposed else "grouped_matmul"
        grid = {"columns": columns // wide, "tiles": m // ROWS}
        return _call(body, (first, last, begins, ends, rows, matrices), (m, columns), grid, name)

    def outer(self, lhs: Array, d_out: Array, group_sizes: Array) -> Array:
        (m, left), columns, groups = lhs.shape, d_out.shape[1], group_sizes.shape[0]
        begins, ends = _bounds(group_sizes, m)
        high, wide = _tile(left), _tile(columns)

        def body(begins: Any, ends: Any, lhs: Any, d_out: Any, out: Any) -> None:
            down, across, group = (jax.lax.axis_index(name) for name in ("rows", "columns", "groups"))
            begin, end = begins[group], ends[group]
            first = begin // INNER
            count = jnp.where(begin < end, (end + INNER - 1) // INNER - first, 0)

            def product(acc: Any) -> Array:
                def more(indices: Any, a: Any, b: Any) -> None:
                    start = (first + indices[0]) * INNER

                    @pl.when((start < begin) | (start + INNER > end))
                    def _() -> None:
                        for ref, width in ((a, high), (b, wide)):
                            row = start + _down(INNER, width)
                            ref[...] = jnp.where((row >= begin) & (row < end), ref[...], jnp.zeros((), ref.dtype))
                        plgpu.commit_smem()

                    add_product(acc, a, b, transposed="a")

                places = (lambda i: (first + i, down)), (lambda i: (first + i, across))
                _pipelined(more, count, ((INNER, high), (INNER, wide)), places, lhs, d_out)
                return acc[...]

            found = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((high, wide)))

            def store(ready: Any) -> None:
                ready[...] = found.astype(out.dtype)
                _copy_out(ready, out.at[group, pl.ds(down * high, high), pl.ds(across * wide, wide)])

            pl.run_scoped(store, plgpu.SMEM((high, wide), out.dtype, transforms=swizzled(out.dtype, wide)))

        grid = {"rows": left // high, "columns": columns // wide, "groups": groups}
        return _call(body, (begins, ends, lhs, d_out), (groups, left, columns), grid, "grouped_matmul_d_rhs")


def _bounds(group_sizes: Array, m: int) -> tuple[Array, Array]:
    """First row of each group, and the row after its last."""
    ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), m)
    return jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]]), ends


def _tile(size: int) -> int:
    """Columns of a tile."""
    return 2 * INNER if size % (2 * INNER) == 0 else INNER


def _down(rows: int, columns: int) -> Array:
    """Number of each element's row in a tile."""
    return jax.lax.broadcasted_iota(jnp.int32, (rows, columns), 0)


def _pipelined(
    body: Any, count: Any, blocks: tuple[tuple[int, int], ...], places: tuple[Any, ...], *operands: Any
) -> None:
    """Calls ``body`` with the blocks of each of ``count`` steps in shared memory, while those of later ones come."""
    specs = [
        plgpu.BlockSpec(block, place, delay_release=1, transforms=swizzled(operand.dtype, block[1]))
        for block, place, operand in zip(blocks, places, operands, strict=True)
    ]
    plgpu.emit_pipeline(body, grid=(count,), in_specs=specs, max_concurrent_steps=PIPELINE)(*operands)


def _copy_out(ready: Any, out: Any) -> None:
    """Copies a tile from shared memory to where it belongs."""
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(ready, out)
    plgpu.wait_smem_to_gmem(0)


def _call(body: Any, operands: tuple[Array, ...], shape: tuple[int, ...], grid: dict[str, int], name: str) -> Array:
    """Launches the kernel over ``grid``; the last operand has the result's dtype."""
    like = operands[-1]
    made = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, like.dtype),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret_mosaic_gpu(),
        kernel_name=name,
    )(*operands)
    return vary_over(made, varying_axes(like))  # the result's type does not say so by itself
