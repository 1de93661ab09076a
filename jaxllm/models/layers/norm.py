"""Norms: RMSNorm (arXiv:1910.07467), whose gain may be stored minus one, and LayerNorm (arXiv:1607.06450)."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import sharding
from jaxllm.models.params import at_least_f32, constant, use
from sharding import LogicalAxes

NormKind = Literal["rms", "rms_plus_one", "layer"]
"""RMSNorm; RMSNorm that stores its gain minus one, so that zero is neutral (Gemma); LayerNorm with a bias."""


def rms_normalize(x: Float[Array, "..."], gain: Float[Array, "..."], eps: float) -> Float[Array, "..."]:
    """RMSNorm: ``x / rms(x) * gain`` over the last ``gain.ndim`` dimensions; in at least float32, result in x.dtype."""
    h = x.astype(at_least_f32(x.dtype))
    h = h * jax.lax.rsqrt(jnp.mean(jnp.square(h), axis=_last(gain), keepdims=True) + eps)
    return (h * gain.astype(h.dtype)).astype(x.dtype)


def layer_normalize(
    x: Float[Array, "..."], gain: Float[Array, "..."], bias: Float[Array, "..."], eps: float
) -> Float[Array, "..."]:
    """LayerNorm: ``(x - mean) / sqrt(variance + eps) * gain + bias``; dimensions and dtypes as ``rms_normalize``."""
    h = x.astype(at_least_f32(x.dtype))
    h = h - jnp.mean(h, axis=_last(gain), keepdims=True)
    h = h * jax.lax.rsqrt(jnp.mean(jnp.square(h), axis=_last(gain), keepdims=True) + eps)
    return (h * gain.astype(h.dtype) + bias.astype(h.dtype)).astype(x.dtype)


def _last(gain: Array) -> tuple[int, ...]:
    return tuple(range(-gain.ndim, 0))


class Norm(nnx.Module):
    """Norm over the last dimensions, which have sizes ``shape`` and logical axes ``axes``."""

    def __init__(
        self, kind: NormKind, shape: tuple[int, ...], eps: float, dtype: jnp.dtype, axes: LogicalAxes = ("embed",)
    ):
        self.kind, self.eps = kind, eps
        self.gain = constant(0.0 if kind == "rms_plus_one" else 1.0, shape, axes, dtype, role="gain")
        if kind == "layer":
            self.bias = constant(0.0, shape, axes, dtype, role="bias")

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalised ``x``, in its dtype."""
        gain = sharding.gather_weight(self.gain[...], *self.gain.get_metadata()["logical_axes"])
        if self.kind == "layer":
            return layer_normalize(x, gain, use(self.bias, gain.dtype), self.eps)
        if self.kind == "rms_plus_one":
            gain = 1.0 + gain.astype(at_least_f32(gain.dtype))
        return rms_normalize(x, gain, self.eps)
