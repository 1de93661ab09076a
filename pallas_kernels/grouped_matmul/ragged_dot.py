"""Grouped matmul through ``jax.lax.ragged_dot``, which XLA lowers to a TPU kernel of its own.

Legend: M rows, E groups, K columns of a row, N columns of the result.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def grouped_matmul_ragged_dot(
    lhs: Float[Array, "M K"], rhs: Float[Array, "E K N"], group_sizes: Int[Array, " E"]
) -> Float[Array, "M N"]:
    """Grouped matmul by ``jax.lax.ragged_dot``; see ``grouped_matmul``."""
    dtype = jnp.promote_types(lhs.dtype, jnp.float32)
    out = jax.lax.ragged_dot(lhs, rhs, group_sizes.astype(jnp.int32), preferred_element_type=dtype)
    return out.astype(lhs.dtype)
