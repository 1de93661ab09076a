"""Codes of a packed matrix, and what they stand for.

A tuple of n codes has neighbouring inputs of one output, the first in the lowest bits: the codes of a byte, or of three
bytes the eight codes of 3 bits or the four of 6. So the matrix is a sum over lanes: lane l of all tuples meets inputs
l, n + l, 2 n + l, ... Its values are elementwise in the tuples, and no code is moved on chip: codes are laid out
offline (as MARLIN's, arXiv:2408.11743, and FLUTE's, arXiv:2407.10960, are for tensor cores).

Legend: M rows, K inputs, n codes of a tuple, T tuples of an output (K / n), B bytes of an output, N outputs, G groups
of inputs.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped, UInt8

from pallas_kernels.packed_matmul.scales import Scales, scale_values

PackedBytes = UInt8[Array, "_ _"]
"""Bytes of a matrix in codes: [B, N], or [N, B] where they are by row."""
BITS = (2, 3, 4, 6, 8)
"""Bits that codes may have."""


class PackedCodes(NamedTuple):
    """Format of codes and what they stand for, static.

    Attributes:
        bits: of a code: 2, 3, 4, 6 or 8.
        levels: value of each code, before its group's scale; None: the code less the middle one, 2^(bits - 1).
        wide: weights are in float32 and not rounded to the activations' dtype, and so is the result: for activations
            that are integers themselves (w4a8). Without levels only.
        by_row: bytes are [N, B] and scales [N, G]: those of an output are neighbours, as in a head, whose rows are
            embeddings, too.
    """

    bits: int
    levels: tuple[float, ...] | None = None
    wide: bool = False
    by_row: bool = False

    @property
    def lanes(self) -> int:
        """Codes of a tuple."""
        return 8 // math.gcd(self.bits, 8)

    @property
    def bytes(self) -> int:
        """Bytes of a tuple."""
        return self.bits // math.gcd(self.bits, 8)


def result_dtype(dtype: DTypeLike, form: PackedCodes) -> jnp.dtype:
    """Dtype of a result for activations of ``dtype``."""
    return jnp.promote_types(dtype, jnp.float32) if form.wide else jnp.dtype(dtype)


def precision(form: PackedCodes) -> jax.lax.Precision | None:
    """Precision of a matmul in plain JAX: of wide codes, float32 operands are not rounded."""
    return jax.lax.Precision.HIGHEST if form.wide else None


def tuples(packed: UInt8[Array, "B N"], form: PackedCodes) -> Int[Array, "T N"]:
    """Tuples of codes, each in the bits of one integer."""
    wide = packed.astype(jnp.int32)
    if form.bytes == 1:
        return wide
    wide = wide.reshape(-1, form.bytes, wide.shape[1])
    return functools.reduce(operator.or_, (wide[:, i] << 8 * i for i in range(form.bytes)))


def by_column(
    packed: UInt8[Array, "..."], scales: Scales, form: PackedCodes
) -> tuple[UInt8[Array, "B n"], Float[Array, "G n"] | UInt8[Array, "G n"]]:
    """Bytes and scales with an output a column, and scales that are no blocks; for what does not read other forms."""
    if form.by_row:
        return packed.T, scales.T
    return packed, scale_values(scales, packed.shape[1]) if scales.shape[1] != packed.shape[1] else scales


def split_lanes(x: Shaped[Array, "M K"], lanes: int) -> Shaped[Array, "n M B"]:
    """Inputs of each lane."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, lanes), -1, 0)


def lane_values(tuples: Int[Array, "..."], lane: int, form: PackedCodes) -> Float[Array, "..."]:
    """Values of one lane, before scales, float32: by shifts, and selects among levels instead of a gather."""
    codes = tuples >> (form.bits * lane) & (2**form.bits - 1) if form.lanes > 1 else tuples
    if form.levels is None:
        return (codes - 2 ** (form.bits - 1)).astype(jnp.float32)
    values = [jnp.float32(level) for level in form.levels]
    for bit in range(form.bits):
        high = (codes >> bit & 1) == 1
        values = [jnp.where(high, values[2 * i + 1], values[2 * i]) for i in range(len(values) // 2)]
    return values[0]
