"""Grids: the values that a group of a weight's elements can take, and how elements are rounded to them.

A grid is fitted to a group: its parameters are a scale, and where the grid has one a zero point or a minimum. Formats
store codes and parameters; methods (``jaxllm.quant.methods``) choose codes.

Legend: G elements of a group, O columns of a matrix, each of which is fitted by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        zero: code that stands for 0; of a ``MinimumGrid`` the value of code 0.
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

    @property
    def stored(self) -> int:
        """Number of parameters of a group that are stored: 1 for the scale alone, 2 with the zero point."""
        ...

    @property
    def name(self) -> str:
        """Name for people: "int4"."""
        ...

    def params(self, stored: Sequence[Float[Array, "..."]]) -> GridParams:
        """Parameters of groups from the ``stored`` ones."""
        ...

    def offset(self, params: GridParams) -> Float[Array, "..."] | None:
        """The value of the middle code, 2^(bits - 1), of equally spaced values where it differs by group; else None."""
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
        _check_bits(self.bits)

    @property
    def stored(self) -> int:
        """A symmetric grid's zero point is known."""
        return 1 if self.symmetric else 2

    @property
    def name(self) -> str:
        """Name for people."""
        return f"int{self.bits}{'' if self.symmetric else ' with zero points'}"

    def params(self, stored: Sequence[Float[Array, "..."]]) -> GridParams:
        """Parameters of groups."""
        scale = stored[0]
        return GridParams(scale, jnp.full_like(scale, 2 ** (self.bits - 1)) if self.symmetric else stored[1])

    def offset(self, params: GridParams) -> Float[Array, "..."] | None:
        """The value of the middle code, which is 0 without zero points."""
        return None if self.symmetric else (2 ** (self.bits - 1) - params.zero) * params.scale

    def fit(self, group: Float[Array, "... G O"]) -> GridParams:
        """Parameters of the group; a group of zeros has the scale 1."""
        most = 2**self.bits - 1
        if self.symmetric:
            scale = stored_scale(2 * NUDGE / most * jnp.max(jnp.abs(group), axis=-2), self.scale_dtype)
            return self.params([scale])
        low, high = _extremes(group)
        scale = stored_scale((high - low) / most, self.scale_dtype)
        return GridParams(scale, jnp.clip(jnp.round(-low / scale), 0, most))

    def encode(self, x: Float[Array, "..."], params: GridParams) -> UInt8[Array, "..."]:
        """Codes of the nearest values, ties to even."""
        codes = jnp.round(x / params.scale) + params.zero
        return jnp.clip(codes, 0, 2**self.bits - 1).astype(jnp.uint8)

    def decode(self, codes: UInt8[Array, "..."], params: GridParams) -> Float[Array, "..."]:
        """Values of codes."""
        return (codes.astype(params.scale.dtype) - params.zero) * params.scale


@dataclass(frozen=True)
class TernaryGrid(IntGrid):
    """-1, 0 and 1 times a group's largest magnitude, in the codes of a symmetric grid of 2 bits.

    What is below half of the largest is 0, which most weights are (QMoE, arXiv:2310.16795, section 3.3, with one
    magnitude for both signs).
    """

    bits: int = 2

    @property
    def name(self) -> str:
        """Name for people."""
        return "ternary"

    @property
    def middle(self) -> int:
        """Code of 0."""
        return 2 ** (self.bits - 1)

    def fit(self, group: Float[Array, "... G O"]) -> GridParams:
        """Parameters of the group; a group of zeros has the scale 1."""
        return self.params([stored_scale(jnp.max(jnp.abs(group), axis=-2), self.scale_dtype)])

    def encode(self, x: Float[Array, "..."], params: GridParams) -> UInt8[Array, "..."]:
        """Codes of the nearest values, 1 to 3; half the largest is 0."""
        return (jnp.clip(jnp.round(x / params.scale), -1, 1) + params.zero).astype(jnp.uint8)


@dataclass(frozen=True)
class MinimumGrid:
    """Equally spaced values above a minimum: ``code * scale + minimum``, as GGML's q4_1 and q5_1 have them.

    Attributes:
        bits: bits of a code, 2 to 8.
        scale_dtype: dtype that scales and minima are rounded to.
    """

    bits: int
    scale_dtype: str = "float32"

    def __post_init__(self) -> None:
        _check_bits(self.bits)

    @property
    def stored(self) -> int:
        """Scale and minimum."""
        return 2

    @property
    def name(self) -> str:
        """Name for people."""
        return f"int{self.bits} with minima"

    def params(self, stored: Sequence[Float[Array, "..."]]) -> GridParams:
        """Parameters of groups."""
        return GridParams(stored[0], stored[1])

    def offset(self, params: GridParams) -> Float[Array, "..."] | None:
        """The value of the middle code."""
        return 2 ** (self.bits - 1) * params.scale + params.zero

    def fit(self, group: Float[Array, "... G O"]) -> GridParams:
        """Parameters of the group; a group of zeros has the scale 1."""
        low, high = _extremes(group)
        rounded = low.astype(self.scale_dtype).astype(low.dtype)
        return GridParams(stored_scale((high - low) / (2**self.bits - 1), self.scale_dtype), rounded)

    def encode(self, x: Float[Array, "..."], params: GridParams) -> UInt8[Array, "..."]:
        """Codes of the nearest values, ties to even."""
        return jnp.clip(jnp.round((x - params.zero) / params.scale), 0, 2**self.bits - 1).astype(jnp.uint8)

    def decode(self, codes: UInt8[Array, "..."], params: GridParams) -> Float[Array, "..."]:
        """Values of codes."""
        return codes.astype(params.scale.dtype) * params.scale + params.zero


@dataclass(frozen=True)
class CentredGrid:
    """Equally spaced values around 0: another grid's less the value of its middle code."""

    bits: int

    def decode(self, codes: UInt8[Array, "..."], params: GridParams) -> Float[Array, "..."]:
        """Codes less the middle one, times scales."""
        return (codes.astype(params.scale.dtype) - 2 ** (self.bits - 1)) * params.scale


def stored_scale(scale: Float[Array, "..."], dtype: str) -> Float[Array, "..."]:
    """Scales as they will be read from ``dtype``, 1 where they are 0; float64 ones stay, whose format is not stored."""
    wide = scale.dtype
    if wide != jnp.float64:
        scale = scale.astype(dtype).astype(wide)
    return jnp.where(scale > 0, scale, 1)


def _extremes(group: Float[Array, "... G O"]) -> tuple[Array, Array]:
    """The smallest and the largest element of each group, and 0 among them."""
    return jnp.minimum(jnp.min(group, axis=-2), 0), jnp.maximum(jnp.max(group, axis=-2), 0)


def _check_bits(bits: int) -> None:
    if not 2 <= bits <= 8:
        raise ValueError(f"bits = {bits}: integer codes have 2 to 8 bits.")
