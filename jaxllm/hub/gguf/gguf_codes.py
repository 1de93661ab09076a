"""Codes of GGUF tensors: the quantised values of a file as they stay packed in memory.

Codes come from the decoders of ``ggml_formats``, given blocks whose scales are 1 and whose minima are 0.

Legend: O rows, I columns, G groups, S blocks of 256 columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

from jaxllm.hub.gguf.ggml_formats import q3_k_scales, scales_and_minima
from jaxllm.quant.formats.code_groups import CodeGroups
from jaxllm.quant.formats.k_quants import BLOCK, KQuants
from jaxllm.quant.grids import IntGrid, MinimumGrid


class CodeKind(NamedTuple):
    """Codes of a GGML format, as they are kept.

    Attributes:
        bits: of a code.
        group: columns that share a scale.
        zero: what is added to a decoded value for its code; None: there are minima.
        ones: fields of a block, with the values of a scale of 1.
        signed: whether integer scales of a k-quant are signed; None: it is no k-quant.
    """

    bits: int
    group: int
    zero: int | None
    ones: dict[str, Any]
    signed: bool | None = None


SIX_BIT_ONES = [1] * 4 + [0] * 4 + [1] * 4
CODE_KINDS = {
    "Q4_0": CodeKind(4, 32, 8, {"d": 1}),
    "Q4_1": CodeKind(4, 32, None, {"d": 1, "m": 0}),
    "Q5_0": CodeKind(5, 32, 16, {"d": 1}),
    "Q5_1": CodeKind(5, 32, None, {"d": 1, "m": 0}),
    "Q8_0": CodeKind(8, 32, 128, {"d": 1}),
    "Q2_K": CodeKind(2, 16, None, {"d": 1, "m": 0, "s": 1}, False),
    "Q3_K": CodeKind(3, 16, 4, {"d": 1, "s": [0x11] * 8 + [0xAA] * 4}, True),
    "Q4_K": CodeKind(4, 32, None, {"d": 1, "m": 0, "s": SIX_BIT_ONES}, False),
    "Q5_K": CodeKind(5, 32, None, {"d": 1, "m": 0, "s": SIX_BIT_ONES}, False),
    "Q6_K": CodeKind(6, 16, 32, {"d": 1, "s": 1}, True),
}


def unchanged(rows: np.ndarray) -> np.ndarray:
    """Rows as the file has them."""
    return rows


@dataclass(frozen=True, eq=False)
class GgufCodes:
    """Codes of a tensor, a ``StoredCodes``.

    Attributes:
        tensor: the tensor of the file.
        change: reorders rows as ``TransformedTensor`` does.
    """

    tensor: Any
    change: Callable[[np.ndarray], np.ndarray] = unchanged

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, columns = self.tensor.shape
        return rows, columns

    @property
    def kind(self) -> CodeKind:
        """Codes of its format."""
        return CODE_KINDS[self.tensor.kind]

    @property
    def unit(self) -> int:
        """Columns of a block."""
        return self.kind.group if self.kind.signed is None else BLOCK

    def form(self, axis: int, contract: int) -> CodeGroups:
        """Format of the packed weight."""
        kind = self.kind
        grid = MinimumGrid(kind.bits) if kind.zero is None else IntGrid(kind.bits)
        if kind.signed is None:
            return CodeGroups(grid, kind.group, axis, contract)
        return KQuants(grid, kind.group, axis, contract, kind.signed)

    def codes(self, rows: slice) -> UInt8[np.ndarray, "o I"]:
        """Codes of some rows."""
        blocks, rows = self._blocks(rows)
        plain = blocks.copy()
        for field, value in self.kind.ones.items():
            plain[field] = value
        values = np.empty((plain.size, self.tensor.values), np.float32)
        self.tensor.decode_blocks(plain.reshape(-1), values)
        codes = (values + (self.kind.zero or 0)).astype(np.uint8).reshape(len(blocks), -1)
        return self.change(codes)[rows]

    def params(self, rows: slice) -> list[np.ndarray]:
        """Stored parameters of some rows: float16 scales and minima, or the bytes of blocks."""
        (blocks, rows), kind = self._blocks(rows), self.kind
        numbers = [blocks["d"], *([blocks["m"]] if kind.zero is None else [])]
        if kind.signed is None:
            return [self.change(x)[rows] for x in numbers]
        parts = [np.ascontiguousarray(x).view(np.uint8).reshape(*blocks.shape, 2) for x in numbers]
        parts += [x.view(np.uint8) for x in self._integers(blocks)]
        return [self.change(x)[rows] for x in np.moveaxis(np.concatenate(parts, axis=-1), -1, 0)]

    def affine(self, rows: slice) -> tuple[Float[np.ndarray, "o G"], Float[np.ndarray, "o G"]]:
        """Scales, and the values of code 0."""
        (blocks, rows), kind = self._blocks(rows), self.kind
        scale = blocks["d"].astype(np.float32)
        minimum = blocks["m"].astype(np.float32) if kind.zero is None else -kind.zero * scale
        if kind.signed is not None:
            integers = [x.astype(np.float32) for x in self._integers(blocks)]
            scale = scale[..., None] * integers[0]
            minimum = -minimum[..., None] * integers[1] if kind.zero is None else -kind.zero * scale
        return tuple(self.change(x.reshape(len(blocks), -1))[rows] for x in (scale, minimum))  # pyright: ignore[reportReturnType]

    def _blocks(self, rows: slice) -> tuple[np.ndarray, slice]:
        """Blocks of some rows, [o, I / values], and the rows that are still to be taken of them: all blocks are needed
        where rows are reordered.
        """
        blocks = self.tensor.blocks().reshape(self.shape[0], -1)
        return (blocks[rows], slice(None)) if self.change is unchanged else (blocks, rows)

    def _integers(self, blocks: np.ndarray) -> list[np.ndarray]:
        """Integer scales of the groups of each block, and minima where there are some; one byte each."""
        packed = blocks["s"].reshape(blocks.size, -1)
        name = self.tensor.kind
        if name == "Q2_K":
            found = [packed & 15, packed >> 4]
        elif name == "Q3_K":
            found = [q3_k_scales(packed).astype(np.int8)]
        elif name == "Q6_K":
            found = [packed]
        else:
            found = list(scales_and_minima(packed))
        return [x.reshape(*blocks.shape, -1) for x in found]
