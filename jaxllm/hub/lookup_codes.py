"""Lookup-table checkpoints: matrices in codes of 3 or 4 bits, whose values are levels of a table times a scale.

``quantization_config`` has ``quant_method`` "lookup-table", ``bits``, ``group_size`` and the ``levels`` of the table.
``NAME.weight_packed`` uint8 [O, I * bits / 8] has the codes of a row as a stream of bits, low ones first;
``NAME.weight_scale`` [O, G] the scales of groups of columns. Only this package reads the layout.

Legend: O rows (outputs), I columns (inputs), G groups of columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from jaxllm.hub.errors import HubError
from jaxllm.hub.stored_codes import pack_rows, unpack_rows
from jaxllm.quant.codebooks import CODEBOOKS, CodebookGrid
from jaxllm.quant.formats.code_groups import CodeGroups

LOOKUP_METHOD = "lookup-table"
PACKED, SCALE = "_packed", "_scale"
TABLE_NAMES = ("nf4", "nf3")
"""Tables that files have."""


@dataclass(frozen=True, eq=False)
class LookupCodes:
    """Stored arrays of a matrix, as they are in the file: a ``StoredCodes``.

    Attributes:
        name: table.
        group: columns that share a scale.
        shape: rows and columns.
        packed: codes.
        scale: scales.
    """

    name: str
    group: int
    shape: tuple[int, int]
    packed: Any
    scale: Any

    @property
    def unit(self) -> int:
        """Columns that share a scale."""
        return self.group

    def form(self, axis: int, contract: int) -> CodeGroups:
        """Format of the packed weight."""
        return CodeGroups(CodebookGrid(self.name), self.group, axis, contract)

    def codes(self, rows: slice) -> UInt8[np.ndarray, "o I"]:
        """Codes of some rows."""
        return unpack_rows(np.ascontiguousarray(self.packed[rows]), CodebookGrid(self.name).bits, self.shape[1])

    def params(self, rows: slice) -> list[np.ndarray]:
        """Scales of some rows."""
        return [np.asarray(self.scale[rows])]

    def affine(self, rows: slice) -> tuple[Float[np.ndarray, "o G"], Float[np.ndarray, "o G"]]:
        """Scales; levels are no multiples of codes."""
        scale = self.params(rows)[0].astype(np.float32)
        return scale, np.zeros_like(scale)

    def dense(self, rows: slice, columns: slice) -> Float[np.ndarray, "o i"]:
        """Dequantised part of the matrix, float32."""
        place = np.arange(self.shape[1])[columns] // self.group
        return CODEBOOKS[self.name][self.codes(rows)[:, columns]] * self.affine(rows)[0][:, place]


def lookup_tensors(
    name: str, codes: UInt8[np.ndarray, "O I"], scale: Float[np.ndarray, "O G"], bits: int
) -> dict[str, np.ndarray]:
    """Tensors of a file for the matrix called ``name``."""
    return {name + PACKED: np.ascontiguousarray(pack_rows(codes, bits)), name + SCALE: scale}


def lookup_entry(table: str, group: int | None) -> dict[str, Any]:
    """``quantization_config`` of ``config.json``; without groups, ``group_size`` is -1."""
    levels = [float(x) for x in CODEBOOKS[table]]
    return {
        "quant_method": LOOKUP_METHOD, "bits": CodebookGrid(table).bits, "group_size": group or -1, "levels": levels,
    }  # fmt: skip


def lookup_codes(given: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors under the names of the plain model, with a ``LookupCodes`` for each matrix in codes.

    Raises:
        HubError: levels of another table, or arrays that are missing or of another shape or dtype.
    """
    levels, group = given.get("levels"), given.get("group_size")
    table = next((t for t in TABLE_NAMES if levels == lookup_entry(t, None)["levels"]), None)
    if table is None:
        raise HubError(f"config.json: the levels of {LOOKUP_METHOD} are those of no table that is known here: "
                       f"{', '.join(TABLE_NAMES)}.")  # fmt: skip
    if type(group) is not int or not (group > 0 or group == -1):
        raise HubError(f"config.json: {LOOKUP_METHOD} has group_size = {group!r}; legal: a positive number, or -1.")
    bits = CodebookGrid(table).bits
    out: dict[str, Any] = {}
    for name, tensor in tensors.items():
        whole = name.removesuffix(PACKED)
        if name.endswith(".weight" + SCALE) and name.removesuffix(SCALE) + PACKED in tensors:
            continue
        if whole == name:
            out[name] = tensor
            continue
        scale = tensors.get(whole + SCALE)
        if scale is None:
            raise HubError(f"{name} is there, and no {whole}{SCALE}.")
        rows, columns = tensor.shape[0], tensor.shape[1] * 8 // bits
        size = columns if group == -1 else group
        if tensor.dtype != np.uint8 or tuple(scale.shape) != (rows, -(-columns // size)):
            raise HubError(
                f"{name} is {tensor.dtype}{list(tensor.shape)} and {whole}{SCALE} {list(scale.shape)}; {bits} bits of "
                f"[{rows}, {columns}] in groups of {size} are uint8, and scales {[rows, -(-columns // size)]}."
            )
        out[whole] = LookupCodes(table, size, (rows, columns), tensor, scale)
    return out
