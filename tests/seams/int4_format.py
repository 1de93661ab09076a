"""Int4: signed 4-bit integers, -7 to 7, with one float16 scale per 16 values along the axis that a matmul sums over.

Two values share a byte: of neighbours along the axis, the first is in the low nibble.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from sharding import LogicalAxes

GROUP = 16


@dataclass(frozen=True)
class Int4:
    """Int4 along one axis, counted from the end."""

    axis: int

    def shape(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the dense weight."""
        axis = self.axis % len(values)
        return (*values[:axis], 2 * values[axis], *values[axis + 1 :])

    def pack(self, weight: Float[Array, "..."]) -> tuple[Array, Array]:
        """Values and scales, rounded to the nearest."""
        x = jnp.moveaxis(weight, self.axis, -1)
        if x.shape[-1] % GROUP:
            raise ValueError(f"int4: {GROUP} values share a scale, but {x.shape[-1]} is no multiple of {GROUP}.")
        groups = x.reshape(*x.shape[:-1], -1, GROUP)
        largest = jnp.max(jnp.abs(groups), axis=-1)
        scales = jnp.where(largest > 0, largest / 7, 1).astype(jnp.float16)
        codes = jnp.clip(jnp.round(groups / scales[..., None].astype(weight.dtype)), -7, 7) + 8
        codes = codes.astype(jnp.uint8).reshape(x.shape)
        values = codes[..., 0::2] | (codes[..., 1::2] << 4)
        return jnp.moveaxis(values, -1, self.axis), jnp.moveaxis(scales, -1, self.axis)

    def unpack(self, values: Array, scales: Array, dtype: DTypeLike) -> Float[Array, "..."]:
        """Dense weight."""
        axis = self.axis % values.ndim
        halves = jnp.stack([values & 15, values >> 4], axis=axis + 1).reshape(self.shape(values.shape))
        return (halves.astype(dtype) - 8) * jnp.repeat(scales.astype(dtype), GROUP, axis=axis)

    def scale_axes(self, axes: LogicalAxes) -> LogicalAxes:
        """Logical axes of the scales: those of the weight."""
        return axes
