"""Grouped matrix product by ``jax.lax.ragged_dot``, which TPUs have in hardware-friendly form.

Legend: M rows, E groups, K columns of a row, N columns of the result.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def grouped_matmul_ragged_dot(
    lhs: Float[Array, "M K"], rhs: Float[Array, "E K N"], group_sizes: Int[Array, " E"]
) -> Float[Array, "M N"]:
    """See ``grouped_matmul``."""
    dtype = jnp.promote_types(lhs.dtype, jnp.float32)
    out = jax.lax.ragged_dot(lhs, rhs, group_sizes.astype(jnp.int32), preferred_element_type=dtype)
    return out.astype(lhs.dtype)
