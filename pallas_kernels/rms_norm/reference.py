"""Reference RMS norm: defines the operation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm_reference(
    x: Float[Array, "..."], gain: Float[Array, "..."], *, eps: float, plus_one: bool
) -> Float[Array, "..."]:
    """Reference RMS norm; see ``rms_norm``."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    h, scale = x.astype(dtype), gain.astype(dtype) + (1 if plus_one else 0)
    mean = jnp.mean(jnp.square(h), axis=tuple(range(-gain.ndim, 0)), keepdims=True)
    return (h * jax.lax.rsqrt(mean + eps) * scale).astype(x.dtype)
