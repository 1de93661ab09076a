"""Reference grouped matmul: multiplies every row by every matrix and masks; defines the operation.

Legend: M rows, E groups, K columns of a row, N columns of the result.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def grouped_matmul_reference(
    lhs: Float[Array, "M K"], rhs: Float[Array, "E K N"], group_sizes: Int[Array, " E"]
) -> Float[Array, "M N"]:
    """Reference grouped matmul; see ``grouped_matmul``."""
    dtype = jnp.promote_types(lhs.dtype, jnp.float32)
    ends = jnp.cumsum(group_sizes)
    rows = jnp.arange(lhs.shape[0])[:, None]
    inside = (rows < ends) & (rows >= ends - group_sizes)  # M E
    every = jnp.einsum("mk,ekn->men", lhs, rhs, preferred_element_type=dtype)
    return jnp.where(inside[:, :, None], every, 0.0).sum(1).astype(lhs.dtype)
