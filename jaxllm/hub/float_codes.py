"""8-bit and 4-bit values of compressed-tensors: float8 and int8 by channel, and MXFP4.

"float-quantized", "int-quantized" and "naive-quantized": ``NAME.weight`` [O, I] in float8 e4m3 or int8, and
``NAME.weight_scale`` [O, 1], or one for the matrix. "mxfp4-pack-quantized": ``NAME.weight_packed`` uint8 [O, I / 2],
two e2m1 codes in a byte, the first in the low half; ``NAME.weight_scale`` uint8 [O, I / 32], exponents of 2 plus 127.

Legend: O rows (outputs), I columns (inputs), G groups of columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float, UInt8

from jaxllm.hub.errors import HubError
from jaxllm.quant.codebooks import CODEBOOKS, CodebookGrid
from jaxllm.quant.formats.code_groups import CodeGroups
from jaxllm.quant.formats.int8_activations import Int8Activations
from jaxllm.quant.grids import IntGrid

MX_GROUP = 32
E8M0_BIAS, E8M0_NAN = 127, 255


@dataclass(frozen=True, eq=False)
class ValueCodes:
    """Stored arrays of a matrix of float8, int8 or MXFP4 values: a ``StoredCodes``.

    Attributes:
        name: "fp8", "int8" or "mxfp4".
        shape: rows and columns.
        values: values, or packed codes, as they are in the file.
        scale: scales, as they are in the file.
        activations: whether activations are rounded to int8 with scales of tokens, which int8 alone has.
    """

    name: str
    shape: tuple[int, int]
    values: Any
    scale: Any
    activations: bool = False

    @property
    def unit(self) -> int:
        """Columns that share parameters."""
        return MX_GROUP if self.name == "mxfp4" else self.shape[1]

    def form(self, axis: int, contract: int) -> CodeGroups:
        """Format of the packed weight."""
        grid = IntGrid(8) if self.name == "int8" else CodebookGrid(self.name)
        if self.activations and self.name == "int8":
            return Int8Activations(grid, None, axis, contract)
        return CodeGroups(grid, MX_GROUP if self.name == "mxfp4" else None, axis, contract)

    def codes(self, rows: slice) -> UInt8[np.ndarray, "o I"]:
        """Codes of some rows."""
        part = np.ascontiguousarray(self.values[rows])
        if self.name == "mxfp4":
            return np.stack([part & 15, part >> 4], axis=2).reshape(len(part), -1)
        return part.view(np.uint8) ^ (128 if self.name == "int8" else 0)

    def params(self, rows: slice) -> list[np.ndarray]:
        """Scales of some rows; those of MXFP4 in bfloat16, which has all of them."""
        if self.name == "mxfp4":
            exponents = np.asarray(self.scale[rows])
            scale = np.ldexp(np.float32(1), exponents.astype(np.int32) - E8M0_BIAS)
            return [np.where(exponents == E8M0_NAN, np.float32(np.nan), scale).astype(ml_dtypes.bfloat16)]
        scale = np.asarray(self.scale[:]).reshape(-1, 1)
        return [np.ascontiguousarray(np.broadcast_to(scale, (self.shape[0], 1))[rows])]

    def affine(self, rows: slice) -> tuple[Float[np.ndarray, "o G"], Float[np.ndarray, "o G"]]:
        """Scales, and the values of code 0, which int8 alone has."""
        scale = self.params(rows)[0].astype(np.float32)
        return scale, -128 * scale if self.name == "int8" else np.zeros_like(scale)

    def dense(self, rows: slice, columns: slice) -> Float[np.ndarray, "o i"]:
        """Dequantised part of the matrix, float32."""
        codes, scale = self.codes(rows)[:, columns], self.params(rows)[0].astype(np.float32)
        levels = np.arange(-128, 128, dtype=np.float32) if self.name == "int8" else CODEBOOKS[self.name]
        return levels[codes] * scale[:, np.arange(self.shape[1])[columns] // self.unit]


def value_codes(name: str, values: Any, scale: Any, activations: bool = False) -> ValueCodes:
    """The matrix ``name`` [O, I] of float8 or int8 values, or of MXFP4 codes (uint8).

    Args:
        activations: whether those of int8 are rounded to int8 too.

    Raises:
        HubError: values of another dtype, or scales of another shape.
    """
    kinds = {"float8_e4m3fn": "fp8", "int8": "int8", "uint8": "mxfp4"}
    kind = kinds.get(str(values.dtype))
    if kind is None or len(values.shape) != 2:
        raise HubError(f"{name} is {values.dtype}{list(values.shape)}; read are matrices of {', '.join(kinds)}.")
    rows, columns = values.shape[0], values.shape[1] * (2 if kind == "mxfp4" else 1)
    legal = [(rows, columns // MX_GROUP)] if kind == "mxfp4" else [(rows, 1), (rows,), (1,), (1, 1), ()]
    if tuple(scale.shape) not in legal or (kind == "mxfp4" and (columns % MX_GROUP or scale.dtype != np.uint8)):
        raise HubError(
            f"{name}_scale is {scale.dtype}{list(scale.shape)}; {kind} of [{rows}, {columns}] has scales {legal[0]}."
        )
    return ValueCodes(kind, (rows, columns), values, scale, activations)


def value_tensors(
    name: str, kind: str, codes: UInt8[np.ndarray, "O I"], scale: Float[np.ndarray, "O G"]
) -> dict[str, np.ndarray]:
    """Tensors of a file for the matrix called ``name``, whose codes are those of "fp8", "mxfp4" or "int8"."""
    if kind == "int8":
        return {name: np.ascontiguousarray(codes ^ 128).view(np.int8), f"{name}_scale": scale}
    if kind == "fp8":
        return {name: np.ascontiguousarray(codes).view(ml_dtypes.float8_e4m3fn), f"{name}_scale": scale}
    exponents = np.frexp(scale.astype(np.float32))[1] - 1 + E8M0_BIAS
    return {
        f"{name}_packed": np.ascontiguousarray(codes[:, 0::2] | codes[:, 1::2] << 4),
        f"{name}_scale": exponents.astype(np.uint8),
    }


def value_scheme(kind: str) -> tuple[str, dict[str, Any]]:
    """(format, fields of the weights' scheme) of compressed-tensors for "fp8", "mxfp4" or "int8"."""
    if kind == "int8":
        return "int-quantized", {"strategy": "channel", "group_size": None}
    if kind == "fp8":
        return "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None}
    return "mxfp4-pack-quantized", {
        "num_bits": 4, "type": "float", "strategy": "group", "group_size": MX_GROUP, "scale_dtype": "torch.uint8",
        "zp_dtype": "torch.uint8",
    }  # fmt: skip
