"""RMS norm in plain JAX with a custom VJP whose residuals are x and one inverse root mean square per row.

JAX's autodiff would save the float32 intermediates, which without gradient checkpointing are most of a layer's saved
activations. No kernel is needed: see docs/decisions/0004-small-ops.md.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm_xla(
    x: Float[Array, "..."], gain: Float[Array, "..."], *, eps: float, plus_one: bool
) -> Float[Array, "..."]:
    """RMS norm with small residuals; see ``rms_norm``."""
    return _norm(eps, plus_one, x, gain)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _norm(eps: float, plus_one: bool, x: Array, gain: Array) -> Array:
    return _forward(eps, plus_one, x, gain)[0]


def _forward(eps: float, plus_one: bool, x: Array, gain: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    h, scale = _wide(x), _scale(gain, plus_one, x)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(h), axis=_last(gain), keepdims=True) + eps)
    return (h * inverse * scale).astype(x.dtype), (x, inverse, gain)


def _backward(eps: float, plus_one: bool, residuals: tuple[Array, Array, Array], d_out: Array) -> tuple[Array, Array]:
    del eps  # already included in the inverse root mean square
    x, inverse, gain = residuals
    normed, d_out = _wide(x) * inverse, _wide(d_out)
    d_gain = jnp.sum(d_out * normed, axis=tuple(range(x.ndim - gain.ndim)))
    d_normed = d_out * _scale(gain, plus_one, x)
    along = jnp.mean(d_normed * normed, axis=_last(gain), keepdims=True)
    return (inverse * (d_normed - normed * along)).astype(x.dtype), d_gain.astype(gain.dtype)


_norm.defvjp(_forward, _backward)


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _scale(gain: Array, plus_one: bool, x: Array) -> Array:
    return gain.astype(jnp.promote_types(x.dtype, jnp.float32)) + (1 if plus_one else 0)


def _last(gain: Array) -> tuple[int, ...]:
    return tuple(range(-gain.ndim, 0))
