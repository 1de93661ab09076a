"""Block float8: e4m3 values with a float32 scale per block of a matrix (DeepSeek-V3, arXiv:2412.19437, 3.3)."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from sharding import LogicalAxes


@dataclass(frozen=True)
class BlockFloat8:
    """Float8 with scales of blocks of the last two dimensions.

    Attributes:
        block: rows and columns of a block; the last block may be smaller.
    """

    block: tuple[int, int] = (128, 128)

    def __str__(self) -> str:
        return f"float8 in blocks of {self.block[0]} x {self.block[1]}"

    def shape(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the dense weight."""
        return values

    def pack(self, weight: Float[Array, "*lead A B"]) -> tuple[Array, Array]:
        """Values and scales; a block's scale maps its largest magnitude to the largest e4m3 value."""
        (*lead, rows, columns), (high, wide) = weight.shape, self.block
        down, across = -(-rows // high), -(-columns // wide)
        padding = [(0, 0)] * len(lead) + [(0, down * high - rows), (0, across * wide - columns)]
        tiles = jnp.pad(weight.astype(jnp.float32), padding).reshape(*lead, down, high, across, wide)
        largest = jnp.max(jnp.abs(tiles), axis=(-3, -1))
        scales = jnp.where(largest > 0, largest, 1) / float(jnp.finfo(jnp.float8_e4m3fn).max)
        return (weight.astype(jnp.float32) / self._spread(scales, rows, columns)).astype(jnp.float8_e4m3fn), scales

    def unpack(
        self, values: Float[Array, "*lead A B"], scales: Float[Array, "*lead a b"], dtype: DTypeLike
    ) -> Float[Array, "*lead A B"]:
        """Dense weight: value times scale in float32, rounded to ``dtype``."""
        return (values.astype(jnp.float32) * self._spread(scales, *values.shape[-2:])).astype(dtype)

    def scale_axes(self, axes: LogicalAxes) -> LogicalAxes:
        """Logical axes of the scales: those of the weight."""
        return axes

    def _spread(self, scales: Array, rows: int, columns: int) -> Array:
        """Scale of every value."""
        return jnp.repeat(jnp.repeat(scales, self.block[0], axis=-2), self.block[1], axis=-1)[..., :rows, :columns]
