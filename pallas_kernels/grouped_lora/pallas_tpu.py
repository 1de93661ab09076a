"""Grouped low-rank matmul on TPUs: one Pallas kernel through Mosaic that multiplies with both factors.

The grid has as many steps as the schedule, a number known at run time. Scalars prefetched to SMEM give a step's tile
and page before they are fetched; the tile of rows and of the result stay in VMEM while the tile's pages pass.

Legend: M rows, P pages, R ranks of a page, K columns of a row, N columns of the result.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels._compat import result_like
from pallas_kernels._pallas import bytes_of, check_supported, cost, dot, interpret_tpu
from pallas_kernels.grouped_lora.adapter_tiles import AdapterTiles, parts_of_step, tile_rows

VMEM_BYTES = 48 * 2**20
"""VMEM limit of the kernel: the smallest generation that it is compiled for has 64 MiB."""
SMEM_STEPS = 2**16
"""Most steps of a schedule: each takes 4 bytes of SMEM."""


def grouped_lora_pallas_tpu(
    x: Float[Array, "M K"], a: Float[Array, "P R K"], b: Float[Array, "P R N"], rows: AdapterTiles
) -> Float[Array, "M N"]:
    """Grouped low-rank matmul on TPUs; see ``grouped_lora``.

    Raises:
        NotImplementedError: a page has no multiple of 16 ranks, a tile does not fit into VMEM, the schedule has more
            than ``SMEM_STEPS`` steps, or see ``pallas_kernels._pallas.check_supported``.
    """
    check_supported("pallas_tpu", x=x, a=a, b=b)
    (m, k), (_, ranks, n), size, item = x.shape, b.shape, tile_rows(x.shape[0]), x.dtype.itemsize
    slots, columns = rows.tables.shape
    if ranks % 16:
        raise NotImplementedError(f"pallas_tpu takes pages of 16, 32, 48, ... ranks, not {ranks}.")
    held = 2 * item * (size + ranks) * (k + n) + 4 * size * n  # double buffering
    if held > VMEM_BYTES or rows.steps.shape[0] > SMEM_STEPS:
        raise NotImplementedError(
            f"pallas_tpu needs {held / 2**20:.0f} MiB of VMEM for tiles of rows of {k} and {n} columns and has "
            f"{VMEM_BYTES >> 20}, or the schedule has more than {SMEM_STEPS} steps: {rows.steps.shape[0]}."
        )

    def tile_of(i: Any, steps: Any, *_: Any) -> tuple[Any, Any]:
        return parts_of_step(steps[i], slots, columns)[0], 0

    def page_of(i: Any, steps: Any, tables: Any, *_: Any) -> tuple[Any, Any, Any]:
        _, slot, column = parts_of_step(steps[i], slots, columns)
        return jnp.maximum(tables[jnp.minimum(slot, slots - 1) * columns + column], 0), 0, 0

    def body(steps: Any, tables: Any, scales: Any, own: Any, x: Any, a: Any, b: Any, out: Any, acc: Any) -> None:
        i, last = pl.program_id(0), pl.num_programs(0) - 1
        tile, slot, _ = parts_of_step(steps[i], slots, columns)

        @pl.when((i == 0) | (tile_of(jnp.maximum(i - 1, 0), steps)[0] != tile))
        def _() -> None:
            acc[...] = jnp.zeros_like(acc)

        @pl.when(slot < slots)
        def _() -> None:
            inner = dot(x[...], a[...], (1, 1)) * scales[jnp.minimum(slot, slots - 1)]
            # Masked after the matmul: rows of others, and those beyond the last, may hold anything.
            inner = jnp.where(own[...] == slot, inner, 0.0).astype(x.dtype)
            acc[...] += dot(inner, b[...], (1, 0))

        @pl.when((i == last) | (tile_of(jnp.minimum(i + 1, last), steps)[0] != tile))
        def _() -> None:
            out[...] = acc[...].astype(out.dtype)

    call = pl.pallas_call(
        body,
        out_shape=result_like(x, (m, n), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(rows.first[-1],),
            in_specs=[
                pl.BlockSpec((size, 1), tile_of),
                pl.BlockSpec((size, k), tile_of),
                pl.BlockSpec((None, ranks, k), page_of),
                pl.BlockSpec((None, ranks, n), page_of),
            ],
            out_specs=pl.BlockSpec((size, n), tile_of),
            scratch_shapes=[pltpu.VMEM((size, n), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret_tpu(),
        # The least: every row has an adapter of one page.
        cost_estimate=cost(2 * m * ranks * (k + n), bytes_of(x, a, b) + m * n * item),
        name="grouped_lora",
    )
    scalars = rows.steps, rows.tables.reshape(-1), rows.scales.astype(jnp.float32)
    return call(*scalars, jnp.asarray(rows.slots[:, None], jnp.int32), x, a, b)
