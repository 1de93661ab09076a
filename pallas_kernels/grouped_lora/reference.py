"""Reference grouped low-rank matmul: gathers the factors of every row; defines the operation.

Legend: M rows, P pages, R ranks of a page, K columns of a row, N columns of the result, J pages of the largest adapter.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.grouped_lora.adapter_tiles import AdapterTiles


def grouped_lora_reference(
    x: Float[Array, "M K"], a: Float[Array, "P R K"], b: Float[Array, "P R N"], rows: AdapterTiles
) -> Float[Array, "M N"]:
    """Reference grouped low-rank matmul; see ``grouped_lora``."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    slot = jnp.maximum(rows.slots, 0)
    pages = jnp.where(rows.slots[:, None] >= 0, rows.tables[slot], -1)  # M J
    own = (pages >= 0)[:, :, None, None]
    left, right = (jnp.where(own, factor[jnp.maximum(pages, 0)], 0) for factor in (a, b))
    some = jnp.where((rows.slots >= 0)[:, None], x, 0)
    inner = jnp.einsum("mk,mjrk->mjr", some, left, preferred_element_type=dtype)
    out = jnp.einsum("mjr,mjrn->mn", inner, right.astype(dtype), preferred_element_type=dtype)
    return (out * rows.scales[slot][:, None]).astype(x.dtype)
