"""RoPE scaling: rotary frequencies for sequences that are longer than a model was first trained on.

A scaling maps the base ``theta`` and the number of rotated dims R to R/2 angular frequencies, in radians per position.
Two of the scalings depend on the length of the sequence; they are computed in the compiled program.

Legend: B batch, R rotated dims of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def geometric(theta: float, dims: int) -> np.ndarray:
    """Angular frequency of each of the ``dims // 2`` pairs (arXiv:2104.09864), float64."""
    return theta ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)


def _positive(scaling: RopeScaling, *names: str) -> None:
    for name in names:
        if getattr(scaling, name) <= 0:
            kind = type(scaling).__name__
            raise ValueError(f"rope: {name} = {getattr(scaling, name)} in {kind}; give a positive number.")


@dataclass(frozen=True)
class LinearScaling:
    """Linear RoPE scaling: positions are divided by ``factor`` (position interpolation, arXiv:2306.15595)."""

    factor: float

    def __post_init__(self) -> None:
        _positive(self, "factor")

    def frequencies(self, theta: float, dims: int) -> np.ndarray:
        """Angular frequencies, Float64[R/2], radians per position."""
        return geometric(theta, dims) / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """RoPE scaling of Llama 3.1 (arXiv:2407.21783, section 3.4.3; constants as released).

    Wavelengths above ``original_length / low_freq_factor`` are stretched by ``factor``, those below
    ``original_length / high_freq_factor`` are kept, those between are interpolated.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        _positive(self, "factor", "low_freq_factor", "high_freq_factor", "original_length")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"rope: low_freq_factor = {self.low_freq_factor} must be below "
                f"high_freq_factor = {self.high_freq_factor}."
            )

    def frequencies(self, theta: float, dims: int) -> np.ndarray:
        """Angular frequencies, Float64[R/2], radians per position."""
        freq = geometric(theta, dims)
        wavelength = 2 * math.pi / freq
        low, high = self.original_length / self.low_freq_factor, self.original_length / self.high_freq_factor
        smooth = (self.original_length / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        between = (1 - smooth) * freq / self.factor + smooth * freq
        return np.where(wavelength > low, freq / self.factor, np.where(wavelength < high, freq, between))


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071, sections 3.2 and 3.4): slow pairs are interpolated, fast ones kept, a ramp between.

    Attributes:
        factor: ratio of the new to the original context length.
        original_length: context length of the first training, in positions.
        beta_fast, beta_slow: rotations over ``original_length`` above which a pair is kept, below which interpolated.
        magnitude: factor on queries and keys; None for ``0.1 ln(factor) + 1``.
        truncate: whether the ramp begins and ends at whole pairs.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    magnitude: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _positive(self, "factor", "original_length", "beta_fast", "beta_slow")

    def frequencies(self, theta: float, dims: int) -> np.ndarray:
        """Angular frequencies, Float64[R/2], radians per position."""

        def pair_of(rotations: float) -> float:
            """Index (a real number) of the pair that makes ``rotations`` turns over the original length."""
            return dims * math.log(self.original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dims - 1)
        ramp = np.clip((np.arange(dims // 2) - low) / max(high - low, 1e-3), 0, 1)
        freq = geometric(theta, dims)
        return freq / self.factor * ramp + freq * (1 - ramp)


@dataclass(frozen=True)
class DynamicScaling:
    """Dynamic NTK-aware scaling, whose base grows with the sequence length (arXiv:2309.00071, appendix B.1).

    Up to ``original_length`` nothing changes. The length of a row of several documents is that of its longest one. Keys
    in a KV cache keep the rotation of the length at which they were written.
    """

    factor: float
    original_length: int

    def __post_init__(self) -> None:
        _positive(self, "factor", "original_length")

    def frequencies_at(
        self, theta: float, dims: int, length: Int[Array, " B"], dtype: jnp.dtype
    ) -> Float[Array, "B R2"]:
        """Angular frequencies for rows of these lengths, radians per position."""
        stretch = self.factor * jnp.maximum(length, self.original_length).astype(dtype) / self.original_length
        base = theta * (stretch - (self.factor - 1)) ** (dims / (dims - 2))
        return base[:, None] ** jnp.asarray(-np.arange(0, dims, 2) / dims, dtype)


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (arXiv:2402.13753): a wavelength factor per pair, with separate sets for short and long sequences.

    Attributes:
        short, long: factors of the pairs, up to ``original_length`` and beyond it.
        original_length: context length of the first training, in positions.
        magnitude: factor on queries and keys.

    The length of a row of several documents is that of its longest one.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_length: int
    magnitude: float = 1.0

    def __post_init__(self) -> None:
        _positive(self, "original_length", "magnitude")
        if min(*self.short, *self.long, 1.0) <= 0:
            raise ValueError("rope: a factor of LongRopeScaling is not positive.")

    def frequencies_at(
        self, theta: float, dims: int, length: Int[Array, " B"], dtype: jnp.dtype
    ) -> Float[Array, "B R2"]:
        """Angular frequencies for rows of these lengths, radians per position."""
        for name, factors in (("short", self.short), ("long", self.long)):
            if len(factors) != dims // 2:
                raise ValueError(
                    f"LongRoPE has {len(factors)} {name} factors for {dims // 2} rotated pairs; give one per pair."
                )
        freq = geometric(theta, dims)
        short, long = (
            jnp.asarray(freq / np.asarray(self.short), dtype),
            jnp.asarray(freq / np.asarray(self.long), dtype),
        )
        return jnp.where((length > self.original_length)[:, None], long, short)


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | DynamicScaling | LongRopeScaling


def magnitude(scaling: RopeScaling | None) -> float:
    """Factor on rotated queries and on rotated keys."""
    if isinstance(scaling, YarnScaling) and scaling.magnitude is None:
        return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return getattr(scaling, "magnitude", 1.0)
