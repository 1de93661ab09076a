"""MXFP4: 4-bit values (e2m1) with one power-of-two scale (e8m0) per 32 (OCP MX 1.0; arXiv:2310.10537).

Two values share a byte: of neighbours along the axis, the first is in the low nibble.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from jaxllm.models.fp4_arithmetic import BIAS, GROUP, LARGEST_EXPONENT, power_of_two, round_to_e2m1
from pallas_kernels.packed_matmul import PackedCodes
from pallas_kernels.packed_matmul.codes import lane_values
from pallas_kernels.packed_matmul.native import NativeForm
from sharding import LogicalAxes

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
CODES = PackedCodes(4, E2M1)


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

    def terms(
        self, x: Float[Array, "... I"], values: UInt8[Array, "..."], scales: UInt8[Array, "..."]
    ) -> list[tuple[Float[Array, "..."], Float[Array, "..."]]]:
        """The matmul as a sum over both nibbles, whose weights XLA unpacks within it."""
        return nibble_terms(x, values, power_of_two(scales), CODES, self.axis)

    def kernel_terms(
        self, x: Float[Array, "... I"], values: UInt8[Array, "..."], scales: UInt8[Array, "..."]
    ) -> tuple[Array, Array, PackedCodes, list[tuple[Array, Array]]]:
        """Operands of ``packed_matmul``, which decodes the exponents on chip."""
        return *joined_inputs(values, scales, self.axis), CODES, []

    def native_form(self, inputs: int, scales: tuple[int, ...], contract: int) -> NativeForm | None:
        """Codes and exponents as the kernel for CPUs reads them; None where the axis is not the last of the inputs."""
        if len(scales) + self.axis != contract - 1:
            return None
        return NativeForm(4, inputs // GROUP, "exponent", E2M1)

    def scale_axes(self, axes: LogicalAxes) -> LogicalAxes:
        """Logical axes of the scales: those of the weight."""
        return axes


def joined_inputs(values: Array, scales: Array, axis: int) -> tuple[Array, Array]:
    """Bytes and scales with one dimension of all inputs, up to ``axis``, and one of outputs."""
    values_, scales_ = (a.reshape(math.prod(a.shape[: axis % a.ndim + 1]), -1) for a in (values, scales))
    return values_, scales_


def nibble_terms(
    x: Float[Array, "... I"], values: UInt8[Array, "..."], scales: Float[Array, "..."], codes: PackedCodes, axis: int
) -> list[tuple[Float[Array, "..."], Float[Array, "..."]]]:
    """A matmul as a sum over the inputs of low and of high nibbles: their inputs and weights, elementwise in the bytes.

    Args:
        scales: those of groups along ``axis``, decoded.
    """
    outs = values.shape[axis % values.ndim + 1 :]
    packed, by_group = joined_inputs(values, scales, axis)
    rows = packed.reshape(by_group.shape[0], -1, packed.shape[1])
    lanes = (lane_values(rows.astype(jnp.int32), lane, codes) * by_group[:, None] for lane in range(codes.lanes))
    return [(x[..., k :: codes.lanes], lane.reshape(-1, *outs).astype(x.dtype)) for k, lane in enumerate(lanes)]
