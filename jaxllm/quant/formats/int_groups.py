"""Integer codes in 2, 3, 4 or 8 bits, with a scale and a zero point for each group of inputs of each column.

A group is of consecutive elements along the dimensions that a matmul sums over, taken as one dimension of I inputs. The
last group may be shorter. Codes are packed along the last of these dimensions, the first in the lowest bits.

Legend: I inputs, G groups, O outputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from jaxllm.quant.grids import GridParams, IntGrid
from sharding import LogicalAxes

WORDS = {2: (4, 1), 3: (8, 3), 4: (2, 1), 8: (1, 1)}
"""Codes that are packed together, and the bytes that they take, by bits of a code."""


@dataclass(frozen=True)
class IntGroups:
    """Integer codes with parameters of groups: one array, [..., G, *out, P] of scales and, if asymmetric, zero points.

    Attributes:
        grid: codes and their values.
        group: elements that share a scale; None: all inputs of a column.
        axis: last dimension that a matmul sums over, counted from the end.
        contract: number of dimensions that it sums over.
    """

    grid: IntGrid
    group: int | None = 128
    axis: int = -2
    contract: int = 1

    def __post_init__(self) -> None:
        if self.grid.bits not in WORDS:
            raise ValueError(f"{self.grid.bits} bits: codes are packed in {', '.join(map(str, WORDS))} bits.")

    def shape(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the dense weight."""
        codes, size = WORDS[self.grid.bits]
        axis = self.axis % len(values)
        return (*values[:axis], values[axis] // size * codes, *values[axis + 1 :])

    def pack(self, weight: Float[Array, "..."]) -> tuple[UInt8[Array, "..."], Float[Array, "..."]]:
        """Codes and parameters, rounded to the nearest.

        Raises:
            ValueError: the last input dimension cannot be packed into whole bytes.
        """
        flat = self.flatten(weight.astype(jnp.float32))
        params = self.fit(flat)
        codes = self.grid.encode(flat, self.spread(params, flat.shape[self.axis]))
        return self.pack_codes(codes, weight.shape), self.join(params)

    def unpack(self, values: UInt8[Array, "..."], scales: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
        """Dense weight: ``(code - zero) * scale`` in at least float32, rounded to ``dtype``."""
        shape = self.shape(values.shape)
        codes = self.flatten(self.unpack_codes(values))
        wide = jnp.promote_types(scales.dtype, jnp.float32)
        scale = scales[..., 0].astype(wide)
        middle = jnp.asarray(2 ** (self.grid.bits - 1), wide)
        params = GridParams(
            scale, jnp.broadcast_to(middle, scale.shape) if self.grid.symmetric else scales[..., 1].astype(wide)
        )
        dense = self.grid.decode(codes, self.spread(params, codes.shape[self.axis]))
        return dense.reshape(shape).astype(dtype)

    def scale_axes(self, axes: LogicalAxes) -> LogicalAxes:
        """Logical axes of the parameters: those of the weight, with one for all inputs, which is split like the first
        of them.
        """
        first, last = self._span(len(axes))
        return (*axes[: first + 1], *axes[last + 1 :], None)

    def flatten(self, x: Array) -> Array:
        """``x[..., *in, *out]`` with one dimension for all inputs."""
        first, last = self._span(x.ndim)
        return x.reshape(*x.shape[:first], -1, *x.shape[last + 1 :])

    def fit(self, flat: Float[Array, "... I *out"]) -> GridParams:
        """Parameters of every group, [..., G, *out]."""
        axis = self.axis % flat.ndim
        x = jnp.moveaxis(flat, axis, 0)
        size, groups = self.sizes(x.shape[0])
        # Repeating the last element of a short group changes neither its smallest nor its largest.
        x = jnp.concatenate([x, jnp.broadcast_to(x[-1:], (size * groups - x.shape[0], *x.shape[1:]))])
        x = x.reshape(groups, size, -1)
        params = self.grid.fit(x)
        back = lambda y: jnp.moveaxis(y.reshape(groups, *flat.shape[:axis], *flat.shape[axis + 1 :]), 0, axis)  # noqa: E731
        return GridParams(back(params.scale), back(params.zero))

    def sizes(self, inputs: int) -> tuple[int, int]:
        """(size of a group, number of groups) for so many inputs."""
        size = self.group or inputs
        return size, -(-inputs // size)

    def spread(self, params: GridParams, inputs: int) -> GridParams:
        """Parameters of every input."""
        axis = self.axis % params.scale.ndim
        size, groups = self.sizes(inputs)
        if groups != params.scale.shape[axis]:
            raise ValueError(
                f"{inputs} inputs in groups of {size} have {groups} scales, not {params.scale.shape[axis]}: the mesh "
                "splits a group; split the inputs over fewer devices."
            )
        place = jnp.arange(inputs) // size
        return GridParams(jnp.take(params.scale, place, axis=axis), jnp.take(params.zero, place, axis=axis))

    def join(self, params: GridParams) -> Float[Array, "..."]:
        """The stored array of parameters."""
        return jnp.stack(params[: self._stored], axis=-1)

    def pack_codes(self, codes: UInt8[Array, "..."], shape: tuple[int, ...]) -> UInt8[Array, "..."]:
        """Packed codes of a weight of ``shape``.

        Raises:
            ValueError: the last input dimension cannot be packed into whole bytes.
        """
        bits, axis = self.grid.bits, self.axis % len(shape)
        count, size = WORDS[bits]
        if shape[axis] % count:
            raise ValueError(f"int{bits}: {count} codes share bytes, and {shape[axis]} is no multiple of {count}.")
        x = codes.reshape(*shape[:axis], -1, count, *shape[axis + 1 :]).astype(jnp.int32)
        word = sum(jnp.take(x, i, axis=axis + 1) << bits * i for i in range(count))
        parts = jnp.stack([word >> 8 * i & 255 for i in range(size)], axis=axis + 1)
        return parts.reshape(*shape[:axis], -1, *shape[axis + 1 :]).astype(jnp.uint8)

    def unpack_codes(self, values: UInt8[Array, "..."]) -> UInt8[Array, "..."]:
        """Codes in the shape of the dense weight."""
        bits, shape, axis = self.grid.bits, values.shape, self.axis % values.ndim
        count, size = WORDS[bits]
        if count == size == 1:
            return values
        x = values.reshape(*shape[:axis], -1, size, *shape[axis + 1 :])
        x = x if size == 1 else x.astype(jnp.int32)
        word = sum(jnp.take(x, i, axis=axis + 1) << 8 * i for i in range(size)) if size > 1 else x.squeeze(axis + 1)
        codes = jnp.stack([word >> bits * i & 2**bits - 1 for i in range(count)], axis=axis + 1)
        return codes.reshape(self.shape(shape)).astype(jnp.uint8)

    def nbytes(self, shape: tuple[int, ...], width: int = 4) -> int:
        """Bytes of a packed weight of ``shape``, whose parameters have ``width`` bytes each."""
        count, size = WORDS[self.grid.bits]
        first, last = self._span(len(shape))
        inputs = math.prod(shape[first : last + 1])
        return math.prod(shape) * size // count + self._stored * width * self.sizes(inputs)[1] * (
            math.prod(shape) // inputs
        )

    @property
    def _stored(self) -> int:
        """Parameters of a group that are stored: a symmetric grid's zero point is known."""
        return 1 if self.grid.symmetric else 2

    def _span(self, dims: int) -> tuple[int, int]:
        """First and last dimension that a matmul sums over."""
        last = self.axis % dims
        return last - self.contract + 1, last
