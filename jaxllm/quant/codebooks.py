"""Codebook grids: a code stands for a level of a table, times the scale of its group.

NF4 (arXiv:2305.14314), e2m1 with scales that are powers of two (MXFP4) and e4m3 (float8) are tables; FLUTE's LUTs
(arXiv:2407.10960) are those of a normal distribution with scales that are learned.

Legend: G elements of a group, O columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, UInt8

from jaxllm.quant.formats.nf4 import LEVELS as NF4_LEVELS
from jaxllm.quant.grids import GridParams, stored_scale

E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NF3_LEVELS = (-1.0, -0.4786292, -0.2171418, 0.0, 0.1609302, 0.3379152, 0.562617, 1.0)
"""Eight levels that are made as those of NF4 (appendix E of its paper): the "NF3" of FLUTE."""
E4M3_MOST = 448.0


@dataclass(frozen=True)
class CodebookGrid:
    """Levels of a table times a scale: ``levels[code] * scale``.

    Attributes:
        name: "nf4", "nf3", "mxfp4" or "fp8".
        scale_dtype: dtype that scales are rounded to; those of mxfp4 are powers of two.
    """

    name: str
    scale_dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.name not in CODEBOOKS:
            raise ValueError(f"codebook {self.name!r}: give one of {', '.join(CODEBOOKS)}.")

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return CODEBOOKS[self.name].size.bit_length() - 1

    @property
    def levels(self) -> tuple[float, ...]:
        """Value of each code before its scale."""
        return tuple(float(x) for x in CODEBOOKS[self.name])

    @property
    def stored(self) -> int:
        """The scale alone."""
        return 1

    def params(self, stored: Sequence[Float[Array, "..."]]) -> GridParams:
        """Parameters of groups; there is no zero point."""
        return GridParams(stored[0], jnp.zeros_like(stored[0]))

    def offset(self, params: GridParams) -> None:
        """Values are no multiples of codes."""
        return None

    def fit(self, group: Float[Array, "... G O"]) -> GridParams:
        """Parameters of the group: its largest magnitude is the largest level; a group of zeros has the scale 1.

        A scale of mxfp4 is the power of two of the largest magnitude, less 2 (MX 1.0, section 6.3).
        """
        largest = jnp.max(jnp.abs(group), axis=-2)
        if self.name == "mxfp4":
            _, exponent = jnp.frexp(largest)
            scale = jnp.ldexp(jnp.ones_like(largest), jnp.clip(exponent - 3, -127, 127))
            return self.params([jnp.where(largest > 0, scale, 1)])
        most = float(np.nanmax(np.abs(CODEBOOKS[self.name])))
        return self.params([stored_scale(largest / most, self.scale_dtype)])

    def encode(self, x: Float[Array, "..."], params: GridParams) -> UInt8[Array, "..."]:
        """Codes of the nearest levels; values beyond the largest level have it."""
        units = x / params.scale
        if self.name == "fp8":
            limited = jnp.clip(units, -E4M3_MOST, E4M3_MOST).astype(jnp.float32)
            return jax.lax.bitcast_convert_type(limited.astype(jnp.float8_e4m3fn), jnp.uint8)
        levels = CODEBOOKS[self.name]
        order = np.argsort(levels, kind="stable")
        ordered = levels[order].astype(np.float64)
        middle = jnp.asarray((ordered[1:] + ordered[:-1]) / 2, units.dtype)
        return jnp.asarray(order.astype(np.uint8))[jnp.searchsorted(middle, units, side="left")]

    def decode(self, codes: UInt8[Array, "..."], params: GridParams) -> Float[Array, "..."]:
        """Values of codes, by arithmetic or selects that XLA fuses into the matmul instead of a gather."""
        dtype = params.scale.dtype
        if self.name == "fp8":
            return float_of_e4m3(codes).astype(dtype) * params.scale
        if self.name == "mxfp4":
            return float_of_e2m1(codes).astype(dtype) * params.scale
        values: list[Array] = [jnp.asarray(level, dtype) for level in CODEBOOKS[self.name]]
        for bit in range(self.bits):
            high = (codes >> bit & 1).astype(bool)
            values = [jnp.where(high, values[2 * i + 1], values[2 * i]) for i in range(len(values) // 2)]
        return values[0] * params.scale


def float_of_e4m3(codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Values of e4m3 bytes: those of float16 with the same bits, whose exponents are 8 more. NaN is not known."""
    wide = codes.astype(jnp.uint16)
    return jax.lax.bitcast_convert_type((wide & 128) << 8 | (wide & 127) << 7, jnp.float16).astype(jnp.float32) * 256


def float_of_e2m1(codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Values of e2m1 codes: sign, two bits of exponent, one of mantissa."""
    whole = codes.astype(jnp.int32)
    exponent, mantissa = whole >> 1 & 3, whole & 1
    doubled = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    return jnp.where(whole >> 3 & 1 == 1, -doubled, doubled).astype(jnp.float32) * 0.5


CODEBOOKS: dict[str, np.ndarray] = {
    "nf4": np.asarray(NF4_LEVELS, np.float32),
    "nf3": np.asarray(NF3_LEVELS, np.float32),
    "mxfp4": np.asarray(E2M1_LEVELS, np.float32),
    "fp8": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32),
}
"""Levels by name, in the order of their codes."""
