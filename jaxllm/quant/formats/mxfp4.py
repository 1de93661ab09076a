"""MXFP4: 4-bit values (e2m1) with one power-of-two scale (e8m0) per 32 (OCP MX 1.0; arXiv:2310.10537).

Two values share a byte: of neighbours along the axis, the first is in the low nibble.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from jaxllm.models.fp4_arithmetic import BIAS, GROUP, LARGEST_EXPONENT, power_of_two, round_to_e2m1
from sharding import LogicalAxes

E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


@dataclass(frozen=True)
class MXFP4:
    """MXFP4 along one axis.

    Attributes:
        axis: dimension that values share scales along, counted from the end.
    """

    axis: int = -2

    def __str__(self) -> str:
        return "mxfp4"

    def shape(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the dense weight."""
        axis = self.axis % len(values)
        return (*values[:axis], 2 * values[axis], *values[axis + 1 :])

    def pack(self, weight: Float[Array, "..."]) -> tuple[UInt8[Array, "..."], UInt8[Array, "..."]]:
        """Values and scales; a group's scale is the power of two of its largest magnitude, less 2 (MX 1.0, 6.3).

        Values are rounded to the nearest, ties to even, and saturate.

        Raises:
            ValueError: the axis is no multiple of 32.
        """
        x = jnp.moveaxis(weight.astype(jnp.float32), self.axis, -1)
        if x.shape[-1] % GROUP:
            raise ValueError(f"mxfp4: {GROUP} values share a scale, but {x.shape[-1]} is no multiple of {GROUP}.")
        groups = x.reshape(*x.shape[:-1], -1, GROUP)
        largest = jnp.max(jnp.abs(groups), axis=-1)
        _, exponent = jnp.frexp(largest)  # largest = m * 2 ** exponent with 0.5 <= m < 1
        biased = jnp.where(largest > 0, exponent - 1 - LARGEST_EXPONENT + BIAS, 0).clip(0, 254)
        scaled = groups / power_of_two(biased)[..., None]
        magnitude = jnp.abs(scaled).clip(max=6.0)
        rounded = round_to_e2m1(magnitude)
        codes = jnp.searchsorted(jnp.asarray(E2M1[:8], jnp.float32), rounded).astype(jnp.uint8)
        codes = (codes | (jnp.signbit(scaled).astype(jnp.uint8) << 3)).reshape(x.shape)
        values = codes[..., 0::2] | (codes[..., 1::2] << 4)
        return jnp.moveaxis(values, -1, self.axis), jnp.moveaxis(biased.astype(jnp.uint8), -1, self.axis)

    def unpack(self, values: UInt8[Array, "..."], scales: UInt8[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
        """Dense weight: value times scale in float32, rounded to ``dtype``."""
        axis = self.axis % values.ndim
        halves = jnp.stack([values & 15, values >> 4], axis=axis + 1).reshape(self.shape(values.shape))
        dense = jnp.asarray(E2M1, jnp.float32)[halves]
        return (dense * jnp.repeat(power_of_two(scales), GROUP, axis=axis)).astype(dtype)

    def scale_axes(self, axes: LogicalAxes) -> LogicalAxes:
        """Logical axes of the scales: those of the weight."""
        return axes
