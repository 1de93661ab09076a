"""Grouped low-rank matmul in plain JAX, for any backend: one step of the schedule after the other.

Legend: M rows, P pages, R ranks of a page, K columns of a row, N columns of the result.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._compat import vary_over, varying_axes
from pallas_kernels.grouped_lora.adapter_tiles import AdapterTiles, parts_of_step, tile_rows


def grouped_lora_xla(
    x: Float[Array, "M K"], a: Float[Array, "P R K"], b: Float[Array, "P R N"], rows: AdapterTiles
) -> Float[Array, "M N"]:
    """Grouped low-rank matmul in plain JAX; see ``grouped_lora``."""
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
