"""Grids: the values that a group of a weight's elements can take, and how elements are rounded to them.

A grid is fitted to a group: its parameters are a scale, and where the grid has one a zero point. Formats store codes
and parameters; methods (``jaxllm.quant.methods``) choose codes.

Legend: G elements of a group, O columns of a matrix, each of which is fitted by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

NUDGE = 1 + 2**-16
"""Factor of a symmetric grid's scale: without it the largest element is half way between two codes, and which of them
it has depends on the last bit of a division."""


class GridParams(NamedTuple):
    """Parameters of fitted groups, two arrays of one shape.

    Attributes:
        scale: distance between neighbouring values, or the largest value.
        zero: code that stands for 0.
    """

    scale: Float[Array, "..."]
    zero: Float[Array, "..."]


@runtime_checkable
class Grid(Protocol):
    """Values that elements are rounded to, static and hashable."""

    @property
    def bits(self) -> int:
        """Bits of a code."""
        ...

    def fit(self, group: Float[Array, "... G O"]) -> GridParams:
        """Parameters, [..., O], with which the group's largest elements are values of the grid."""
        ...

    def encode(self, x: Float[Array, "..."], params: GridParams) -> UInt8[Array, "..."]:
        """Codes of the nearest values; the shapes of ``x`` and the parameters broadcast."""
        ...

    def decode(self, codes: UInt8[Array, "..."], params: GridParams) -> Float[Array, "..."]:
        """Values of codes, in the dtype of the scales."""
        ...


@dataclass(frozen=True)
class IntGrid:
    """Equally spaced values: ``(code - zero) * scale``.

    Attributes:
        bits: bits of a code, 2 to 8.
        symmetric: the zero point is in the middle, 2^(bits - 1); else the group's smallest and largest elements have
            the first and the last code.
        scale_dtype: dtype that scales are rounded to, because they are stored in it.
    """

    bits: int
    symmetric: bool = True
    scale_dtype: str = "float32"

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"bits = {self.bits}: integer codes have 2 to 8 bits.")

    def fit(self, group: Float[Array, "... G O"]) -> GridParams:
        """Parameters of the group; a group of zeros has the scale 1."""
        most = 2**self.bits - 1
        if self.symmetric:
            scale = self._stored(2 * NUDGE / most * jnp.max(jnp.abs(group), axis=-2))
            return GridParams(scale, jnp.full_like(scale, 2 ** (self.bits - 1)))
        low, high = jnp.minimum(jnp.min(group, axis=-2), 0), jnp.maximum(jnp.max(group, axis=-2), 0)
        scale = self._stored((high - low) / most)
        return GridParams(scale, jnp.clip(jnp.round(-low / scale), 0, most))

    def encode(self, x: Float[Array, "..."], params: GridParams) -> UInt8[Array, "..."]:
        """Codes of the nearest values, ties to even."""
        codes = jnp.round(x / params.scale) + params.zero
        return jnp.clip(codes, 0, 2**self.bits - 1).astype(jnp.uint8)

    def decode(self, codes: UInt8[Array, "..."], params: GridParams) -> Float[Array, "..."]:
        """Values of codes."""
        return (codes.astype(params.scale.dtype) - params.zero) * params.scale

    def _stored(self, scale: Array) -> Array:
        """Scales as they will be read: float64 ones stay, whose format is not stored."""
        wide = scale.dtype
        if wide != jnp.float64:
            scale = scale.astype(self.scale_dtype).astype(wide)
        return jnp.where(scale > 0, scale, 1)
