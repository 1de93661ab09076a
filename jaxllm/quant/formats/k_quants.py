"""K-quants of GGML: codes whose scales (and minima) of groups are integers times a float16 of 256 inputs.

A block of 256 inputs has, as bytes: d (and dmin) in float16, an integer scale for each group and, where there are
minima, an integer minimum for each. A value is ``d * s * (q - zero)``, or ``d * s * q - dmin * m``.

Legend: S blocks of 256 inputs, G groups, P bytes of a block, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from jaxllm.quant.formats.code_groups import CodeGroups
from jaxllm.quant.grids import GridParams, MinimumGrid
from pallas_kernels.packed_matmul.native import NativeKind

BLOCK = 256


@dataclass(frozen=True)
class KQuants(CodeGroups):
    """Codes of k-quants; the array of parameters is uint8 [..., P, S, *out]. They are read from files, never made."""

    signed: bool = False
    """Whether the scales are signed bytes."""

    def __str__(self) -> str:
        return f"{self.grid.bits}-bit k-quant, groups of {self.group} in blocks of {BLOCK}"

    def pack(self, weight: Float[Array, "..."]) -> tuple[UInt8[Array, "..."], Array]:
        """Refused.

        Raises:
            ValueError: always.
        """
        raise ValueError("k-quants are read from GGUF files and not made here; give int4 or int8.")

    def _groups(self, stored: int) -> int:
        """Groups of so many blocks."""
        return stored * (BLOCK // (self.group or BLOCK))

    def _native_kind(self, kind: NativeKind) -> NativeKind:
        """Bytes of blocks."""
        return "blocks_with_minima" if kind == "minimum" else "signed_blocks" if self.signed else "blocks"

    def params(self, scales: UInt8[Array, "..."], dtype: DTypeLike) -> GridParams:
        """Parameters of groups, from the bytes of blocks."""
        wide = jnp.promote_types(dtype, jnp.float32)
        parts, minima = BLOCK // (self.group or BLOCK), isinstance(self.grid, MinimumGrid)
        axis = scales.ndim + self.axis  # of the blocks

        def number(at: int) -> Array:
            low, high = (jax.lax.index_in_dim(scales, at + i, axis - 1).astype(jnp.uint16) for i in range(2))
            return jax.lax.bitcast_convert_type(low | high << 8, jnp.float16).astype(wide)

        def integers(at: int, kind: DTypeLike) -> Array:
            found = jax.lax.slice_in_dim(scales, at, at + parts, axis=axis - 1)
            return jax.lax.bitcast_convert_type(found, kind).astype(wide)

        def of_groups(x: Array) -> Array:
            x = jnp.swapaxes(x, axis - 1, axis)
            return x.reshape(*x.shape[: axis - 1], -1, *x.shape[axis + 1 :])

        begin = 4 if minima else 2
        scale = of_groups(number(0) * integers(begin, jnp.int8 if self.signed else jnp.uint8))
        if not minima:
            return self.grid.params([scale])
        return self.grid.params([scale, of_groups(-number(2) * integers(begin + parts, jnp.uint8))])
