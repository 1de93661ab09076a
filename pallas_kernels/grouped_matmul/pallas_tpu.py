"""Grouped matmul (megablox) on TPUs: Pallas kernels through Mosaic.

The grid runs over the steps of ``steps.TileSteps``; scalars prefetched to SMEM give their indices before a tile is
fetched. A block that stays the same from one step to the next (a group's matrix, a tile of the result) is neither
fetched again nor written in between; steps after the last one change nothing.

Legend: M rows, E groups, K columns of a row, N columns of the result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import result_like, target_device
from pallas_kernels._pallas import bytes_of, check_supported, cost, dot, interpret_tpu
from pallas_kernels.grouped_matmul import config, steps
from pallas_kernels.grouped_matmul.steps import TileSteps


def grouped_matmul_pallas_tpu(
    lhs: Float[Array, "M K"], rhs: Float[Array, "E K N"], group_sizes: Int[Array, " E"]
) -> Float[Array, "M N"]:
    """Grouped matmul on TPUs; see ``grouped_matmul``.

    Raises:
        NotImplementedError: see ``pallas_kernels._pallas.check_supported``.
    """
    check_supported("pallas_tpu", lhs=lhs, rhs=rhs)
    return steps.multiply(_Kernels(), lhs, rhs, group_sizes)


class _Kernels(NamedTuple):
    """TPU kernels of ``steps.multiply``."""

    def matmul(self, rows: Array, matrices: Array, group_sizes: Array, transposed: bool) -> Array:
        (m, inner), (e, *shape), kind = rows.shape, matrices.shape, target_device().kind
        columns = shape[0] if transposed else shape[1]
        tiles = config.matmul_tiles(kind, m, e, inner, columns, rows.dtype.itemsize)
        plan = TileSteps.of(group_sizes, m, tiles.rows)
        deep = -(-inner // tiles.inner)

        def source(step: Any, k: Any, groups: Any, tile: Any, ends: Any, count: Any) -> tuple[Any, Any, Any]:
            """(row tile, group, contraction block) to fetch; steps without a matmul repeat the last fetched one."""
            none = (groups[step] == e) | (step >= count[0])
            last = jnp.maximum(ends[e] - 1, 0) // tiles.rows
            group = jnp.minimum(groups[step], e - 1)
            return jnp.where(none, last, tile[step]), group, jnp.where(none, deep - 1, k)

        def matrix(j: Any, step: Any, k: Any, *scalars: Any) -> tuple[Any, Any, Any]:
            _, group, k = source(step, k, *scalars)
            return (group, j, k) if transposed else (group, k, j)

        def row(j: Any, step: Any, k: Any, *scalars: Any) -> tuple[Any, Any]:
            tile, _, k = source(step, k, *scalars)
            return tile, k

        def body(groups: Any, tile: Any, ends: Any, count: Any, rows: Any, matrix: Any, out: Any, acc: Any) -> None:
            step, k = pl.program_id(1), pl.program_id(2)
            group, live = groups[step], step < count[0]

            @pl.when(k == 0)
            def _() -> None:
                acc[...] = jnp.zeros_like(acc)

            @pl.when(live & (group < e))
            def _() -> None:
                a, b = rows[...], matrix[...]
                if inner % tiles.inner:  # the last block reads undefined elements beyond the end
                    left = inner - k * tiles.inner
                    a, b = _first(a, left, 1), _first(b, left, 1 if transposed else 0)
                acc[...] += dot(a, b, (1, 1 if transposed else 0))

            @pl.when(live & (k == deep - 1))
            def _() -> None:
                inside = _inside(ends, group, tile[step], tiles.rows)
                first = (step == 0) | (tile[jnp.maximum(step - 1, 0)] != tile[step])
                before = jnp.where(first, 0.0, out[...].astype(jnp.float32))
                out[...] = jnp.where(inside, acc[...], before).astype(out.dtype)

        block = (tiles.columns, tiles.inner) if transposed else (tiles.inner, tiles.columns)
        call = pl.pallas_call(
            body,
            out_shape=result_like(rows, (m, columns), rows.dtype),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=4,
                grid=(-(-columns // tiles.columns), plan.group.shape[0], deep),
                in_specs=[pl.BlockSpec((tiles.rows, tiles.inner), row), pl.BlockSpec((None, *block), matrix)],
                out_specs=pl.BlockSpec((tiles.rows, tiles.columns), lambda j, s, k, g, tile, *_: (tile[s], j)),
                scratch_shapes=[pltpu.VMEM((tiles.rows, tiles.columns), jnp.float32)],
            ),
            compiler_params=_params(kind, "parallel", "arbitrary", "arbitrary"),
            interpret=interpret_tpu(),
            cost_estimate=cost(
                2 * m * inner * columns,
                -(-columns // tiles.columns) * bytes_of(rows) + bytes_of(matrices) + m * columns * rows.dtype.itemsize,
            ),
            name="grouped_matmul_d_lhs" if transposed else "grouped_matmul",
        )
        return call(*plan, rows, matrices)

    def outer(self, lhs: Array, d_out: Array, group_sizes: Array) -> Array:
        (m, left), columns, e, kind = lhs.shape, d_out.shape[1], group_sizes.shape[0], target_device().kind
        tiles = config.outer_tiles(kind, m, e, left, columns, lhs.dtype.itemsize)
        plan = TileSteps.of(group_sizes, m, tiles.rows, every_group=True)

        def body(groups: Any, tile: Any, ends: Any, count: Any, lhs: Any, d_out: Any, out: Any, acc: Any) -> None:
            step, last = pl.program_id(2), count[0] - 1
            group = groups[step]
            begin, end, start = ends[group], ends[group + 1], tile[step] * tiles.rows
            whole = (begin <= start) & (start + tiles.rows <= end)

            @pl.when((step == 0) | (groups[jnp.maximum(step - 1, 0)] != group))
            def _() -> None:
                acc[...] = jnp.zeros_like(acc)

            @pl.when(whole & (step <= last))
            def _() -> None:
                acc[...] += dot(lhs[...], d_out[...], (0, 0))

            @pl.when(~whole & (end > begin) & (step <= last))
            def _() -> None:
                inside = _inside(ends, group, tile[step], tiles.rows)
                # Mask both operands: 0 * nan is nan.
                acc[...] += dot(jnp.where(inside, lhs[...], 0), jnp.where(inside, d_out[...], 0), (0, 0))

            @pl.when((step == last) | ((step < last) & (groups[jnp.minimum(step + 1, last)] != group)))
            def _() -> None:
                out[...] = acc[...].astype(out.dtype)

        call = pl.pallas_call(
            body,
            out_shape=result_like(lhs, (e, left, columns), lhs.dtype),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=4,
                grid=(-(-left // tiles.left), -(-columns // tiles.columns), plan.group.shape[0]),
                in_specs=[
                    pl.BlockSpec((tiles.rows, tiles.left), lambda i, j, s, g, tile, *_: (tile[s], i)),
                    pl.BlockSpec((tiles.rows, tiles.columns), lambda i, j, s, g, tile, *_: (tile[s], j)),
                ],
                out_specs=pl.BlockSpec((None, tiles.left, tiles.columns), lambda i, j, s, g, *_: (g[s], i, j)),
                scratch_shapes=[pltpu.VMEM((tiles.left, tiles.columns), jnp.float32)],
            ),
            compiler_params=_params(kind, "parallel", "parallel", "arbitrary"),
            interpret=interpret_tpu(),
            cost_estimate=cost(
                2 * m * left * columns,
                -(-columns // tiles.columns) * bytes_of(lhs)
                + -(-left // tiles.left) * bytes_of(d_out)
                + e * left * columns * lhs.dtype.itemsize,
            ),
            name="grouped_matmul_d_rhs",
        )
        return call(*plan, lhs, d_out)


def _params(kind: str, *semantics: Any) -> pltpu.CompilerParams:
    limit = config.tpu_limits(kind).vmem_bytes
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=limit)


def _inside(ends: Any, group: Any, tile: Any, rows: int) -> Array:
    """Mask Bool[rows 1]: which rows of the tile belong to the group."""
    at = tile * rows + jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    return (at >= ends[group]) & (at < ends[group + 1])


def _first(x: Array, count: Any, axis: int) -> Array:
    """``x`` with zeros after the first ``count`` along the axis."""
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) < count, x, 0)
