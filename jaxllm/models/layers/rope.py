"""Rotary position embedding (arXiv:2104.09864), half-split layout, over all of a head or its first dimensions.

Legend: B batch, S sequence, N heads, H head dim, R rotated dims of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.models.layers.rope_scaling import DynamicScaling, LongRopeScaling, RopeScaling, geometric, magnitude
from jaxllm.models.params import at_least_f32


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding.

    Attributes:
        theta: base of the geometric series of wavelengths.
        scaling: how frequencies change for longer sequences.
        fraction: how much of each head is rotated, from its beginning; the rest passes unchanged (partial rotary).
        interleaved: the pairs that turn together are neighbours, as in the paper (DeepSeek); else one of each half.
    """

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    fraction: float = 1.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.theta <= 0:
            raise ValueError(f"rope: theta = {self.theta}; give a positive number.")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"rope: fraction = {self.fraction}; give a number above 0 and up to 1.")

    def dims(self, head_dim: int) -> int:
        """R: how many of a head's dimensions are rotated.

        Raises:
            ValueError: not a positive even number, or too few for the scaling.
        """
        dims = int(head_dim * self.fraction)
        least = 4 if isinstance(self.scaling, DynamicScaling) else 2
        if dims % 2 or dims < least:
            raise ValueError(
                f"rope: {dims} of {head_dim} dimensions would be rotated; rotary pairs need an even number, "
                f"{least} or more."
            )
        return dims


def frequencies(
    config: RopeConfig, head_dim: int, positions: Int[Array, "B S"], dtype: jnp.dtype
) -> Float[Array, "..."]:
    """Angular frequency of each pair, radians per position: Float[R/2], or Float[B 1 R/2] where length matters."""
    dims, s = config.dims(head_dim), config.scaling
    if isinstance(s, (DynamicScaling, LongRopeScaling)):
        return s.frequencies_at(config.theta, dims, positions.max(axis=1) + 1, dtype)[:, None]
    return jnp.asarray(geometric(config.theta, dims) if s is None else s.frequencies(config.theta, dims), dtype)


def rotation(
    config: RopeConfig, positions: Int[Array, "B S"], head_dim: int, dtype: jnp.dtype
) -> tuple[Float[Array, "B S R2"], Float[Array, "B S R2"]]:
    """Cosine and sine of every pair's angle at every position, times the scaling's magnitude, in at least float32."""
    dtype = at_least_f32(dtype)
    angle = positions[..., None].astype(dtype) * frequencies(config, head_dim, positions, dtype)
    size = magnitude(config.scaling)
    return size * jnp.cos(angle), size * jnp.sin(angle)


def rotate(
    x: Float[Array, "B S N H"], cos: Float[Array, "B S R2"], sin: Float[Array, "B S R2"], *, interleaved: bool = False
) -> Float[Array, "B S N H"]:
    """Rotates the pairs ``(x[i], x[i + R/2])`` by their angle; computed in at least float32, returned in x's dtype.

    Args:
        interleaved: the pairs are ``(x[2 i], x[2 i + 1])``. They come out as the others do, half by half: queries and
            keys alike, their products do not tell.
    """
    half = cos.shape[-1]
    pairs = (
        (x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]) if interleaved else (x[..., :half], x[..., half : 2 * half])
    )
    a, b = (part.astype(cos.dtype) for part in pairs)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    turned = [(a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype)]
    return jnp.concatenate([*turned, x[..., 2 * half :]], axis=-1)
