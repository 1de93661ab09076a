"""Grouped low-rank matmul in plain JAX, for any backend: tile by tile, or row by row where the rows' adapters differ.

Legend: M rows, P pages, R ranks of a page, K columns of a row, N columns of the result.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._compat import vary_over, varying_axes
from pallas_kernels.grouped_lora.adapter_tiles import TILE_ROWS, AdapterTiles, parts_of_step, tile_rows

ROW_COST = 8
"""Rows of a tile that are multiplied with a page in the time of one row with a page of its own, on a CPU: the page is
read for that row alone."""


def grouped_lora_xla(
    x: Float[Array, "M K"], a: Float[Array, "P R K"], b: Float[Array, "P R N"], rows: AdapterTiles
) -> Float[Array, "M N"]:
    """Grouped low-rank matmul in plain JAX; see ``grouped_lora``.

    A tile is multiplied with every page that some row of it uses. Sixteen rows of sixteen adapters are cheaper one by
    one; the schedule says which, at run time.
    """
    if x.shape[0] > TILE_ROWS:
        return by_tile(x, a, b, rows)
    pages = jnp.sum((rows.tables[rows.slots] >= 0) & (rows.slots >= 0)[:, None])
    alone = ROW_COST * pages < tile_rows(x.shape[0]) * rows.first[-1]
    return jax.lax.cond(alone, by_row, by_tile, x, a, b, rows)


def by_row(
    x: Float[Array, "M K"], a: Float[Array, "P R K"], b: Float[Array, "P R N"], rows: AdapterTiles
) -> Float[Array, "M N"]:
    """Every row with the pages of its adapter, one column of the page table after the other."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    pages = jnp.where(rows.slots[:, None] >= 0, rows.tables[rows.slots], -1)

    def one(column: Array, out: Array) -> Array:
        page = pages[:, column]
        inner = jnp.einsum("mk,mrk->mr", x, a[page], preferred_element_type=dtype)
        more = jnp.einsum("mr,mrn->mn", inner, b[page].astype(dtype), preferred_element_type=dtype)
        return out + jnp.where((page >= 0)[:, None], more, 0)

    out = vary_over(jnp.zeros((x.shape[0], b.shape[2]), dtype), varying_axes(x, a, b, *rows))
    out = jax.lax.fori_loop(0, jnp.max(jnp.sum(pages >= 0, axis=1)), one, out)
    return (out * rows.scales[rows.slots].astype(dtype)[:, None]).astype(x.dtype)


def by_tile(
    x: Float[Array, "M K"], a: Float[Array, "P R K"], b: Float[Array, "P R N"], rows: AdapterTiles
) -> Float[Array, "M N"]:
    """One step of the schedule after the other."""
    m, size, dtype = x.shape[0], tile_rows(x.shape[0]), jnp.promote_types(x.dtype, jnp.float32)
    missing = -m % size
    x, slots = jnp.pad(x, ((0, missing), (0, 0))), jnp.pad(rows.slots, (0, missing), constant_values=-1)
    out = vary_over(jnp.zeros((m + missing, b.shape[2]), dtype), varying_axes(x, a, b, *rows))

    def one(i: Array, out: Array) -> Array:
        tile, slot, column = parts_of_step(rows.steps[i], *rows.tables.shape)

        def add(out: Array) -> Array:
            page = rows.tables[slot, column]
            own = jax.lax.dynamic_slice_in_dim(slots, tile * size, size) == slot
            tokens = jax.lax.dynamic_slice_in_dim(x, tile * size, size)
            inner = jnp.einsum("mk,rk->mr", tokens, a[page], preferred_element_type=dtype)
            more = jnp.einsum("mr,rn->mn", inner, b[page].astype(dtype), preferred_element_type=dtype)
            more = jnp.where(own[:, None], more * rows.scales[slot].astype(dtype), 0)
            before = jax.lax.dynamic_slice_in_dim(out, tile * size, size)
            return jax.lax.dynamic_update_slice_in_dim(out, before + more, tile * size, 0)

        return jax.lax.cond(slot < rows.tables.shape[0], add, lambda out: out, out)

    return jax.lax.fori_loop(0, rows.first[-1], one, out)[:m].astype(x.dtype)
