"""Rotary position embedding (RoPE, arXiv:2104.09864), half-split layout, over all of a head or its first dimensions.

Legend: B batch, S sequence, N heads, H head dim, R rotated dims of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.models.layers.rope_scaling import DynamicScaling, LongRopeScaling, RopeScaling, geometric, magnitude
from jaxllm.models.params import at_least_f32


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: base of the geometric series of wavelengths.
        scaling: frequency scaling for longer sequences; None for none.
        fraction: fraction of each head's dims that is rotated, from the first; the rest passes unchanged (partial
            rotary).
        interleaved: rotated pairs are neighbours, as in the paper (DeepSeek); else one element of each half.
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
        """Number of rotated dims of a head, R.

        Raises:
            ValueError: R is not a positive even number, or is too small for the scaling.
        """
        dims = int(head_dim * self.fraction)
        least = 4 if isinstance(self.scaling, DynamicScaling) else 2
        if dims % 2 or dims < least:
            raise ValueError(
                f"rope: {dims} of {head_dim} dimensions would be rotated; rotary pairs need an even number, "
                f"{least} or more."
            )
        return dims


@dataclass(frozen=True)
class OrderedRopeConfig(RopeConfig):
    """Rotary position embedding of a model whose channels of queries and keys are reordered, see ``channel_order``.

    Attributes:
        pair_order: the pair whose frequency each pair has; all pairs once.
    """

    pair_order: tuple[int, ...] = ()


def frequencies(
    config: RopeConfig, head_dim: int, positions: Int[Array, "B S"], dtype: jnp.dtype
) -> Float[Array, "..."]:
    """Angular frequency of each pair, radians per position: Float[R/2], or Float[B 1 R/2] if it depends on length."""
    dims, s = config.dims(head_dim), config.scaling
    if isinstance(s, (DynamicScaling, LongRopeScaling)):
        return s.frequencies_at(config.theta, dims, positions.max(axis=1) + 1, dtype)[:, None]
    return jnp.asarray(geometric(config.theta, dims) if s is None else s.frequencies(config.theta, dims), dtype)


def rotation(
    config: RopeConfig, positions: Int[Array, "B S"], head_dim: int, dtype: jnp.dtype
) -> tuple[Float[Array, "B S R2"], Float[Array, "B S R2"]]:
    """Cosine and sine of the angle of each pair at each position, times the scaling's magnitude; at least float32."""
    dtype = at_least_f32(dtype)
    turns = frequencies(config, head_dim, positions, dtype)
    if isinstance(config, OrderedRopeConfig):
        turns = turns[..., np.asarray(config.pair_order)]
    angle = positions[..., None].astype(dtype) * turns
    size = magnitude(config.scaling)
    return size * jnp.cos(angle), size * jnp.sin(angle)


def rotate(
    x: Float[Array, "B S N H"], cos: Float[Array, "B S R2"], sin: Float[Array, "B S R2"], *, interleaved: bool = False
) -> Float[Array, "B S N H"]:
    """Rotated ``x``: pairs ``(x[i], x[i + R/2])`` turn by their angle; computed in at least float32, in x's dtype.

    Args:
        interleaved: the pairs are ``(x[2 i], x[2 i + 1])``. The result still has the half-split layout, in queries and
            keys alike, so that scores are the same.
    """
    half = cos.shape[-1]
    pairs = (
        (x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]) if interleaved else (x[..., :half], x[..., half : 2 * half])
    )
    a, b = (part.astype(cos.dtype) for part in pairs)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    turned = [(a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype)]
    return jnp.concatenate([*turned, x[..., 2 * half :]], axis=-1)


def turn(config: RopeConfig, keys: Float[Array, "*any H"], by: Int[Array, "*by"]) -> Float[Array, "*any H"]:
    """Rotated keys, in the half-split layout, as they are at positions that are ``by`` later; at least float32.

    Args:
        by: one number for all keys, or one for each of them.

    Raises:
        ValueError: the angles depend on the length of the sequence too.
    """
    if isinstance(config.scaling, (DynamicScaling, LongRopeScaling)):
        raise ValueError(f"{type(config.scaling).__name__} has angles that depend on the length of the sequence")
    cos, sin = rotation(config, by.reshape(1, -1), keys.shape[-1], keys.dtype)
    size = magnitude(config.scaling)
    flat = keys.astype(cos.dtype).reshape(1, by.size, -1, keys.shape[-1])
    return rotate(flat, cos / size, sin / size).reshape(keys.shape)
