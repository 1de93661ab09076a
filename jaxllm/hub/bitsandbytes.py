"""bitsandbytes: int8 matrices with a scale for each row, for LLM.int8() (arXiv:2208.07339).

``NAME.weight`` [O, I] in int8; ``NAME.SCB`` float32 [O], the largest magnitude of each row, which the value 127 stands
for; ``NAME.weight_format`` uint8 [], 0: rows as they are. ``llm_int8_threshold`` of ``quantization_config`` is the
magnitude from which on an activation is multiplied in the compute dtype.

Legend: O rows (outputs), I columns (inputs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from jaxllm.hub.errors import HubError
from jaxllm.quant.formats.code_groups import CodeGroups
from jaxllm.quant.formats.outlier_columns import THRESHOLD, OutlierColumns
from jaxllm.quant.grids import IntGrid

BITSANDBYTES = "bitsandbytes"
LARGEST, LAYOUT = "SCB", "weight_format"


@dataclass(frozen=True, eq=False)
class Int8Rows:
    """Stored arrays of a matrix, as they are in the file: a ``StoredCodes``.

    Attributes:
        shape: rows and columns.
        values: int8 values.
        largest: largest magnitude of each row.
        threshold: magnitude from which on an activation is an outlier; 0: none is.
    """

    shape: tuple[int, int]
    values: Any
    largest: Any
    threshold: float

    @property
    def unit(self) -> int:
        """Columns that share a scale."""
        return self.shape[1]

    def form(self, axis: int, contract: int) -> CodeGroups:
        """Format of the packed weight."""
        return OutlierColumns(IntGrid(8), None, axis, contract, self.threshold or float("inf"))

    def codes(self, rows: slice) -> UInt8[np.ndarray, "o I"]:
        """Codes of some rows."""
        return np.ascontiguousarray(self.values[rows]).view(np.uint8) ^ 128

    def params(self, rows: slice) -> list[np.ndarray]:
        """Scales of some rows."""
        return [np.asarray(self.largest[rows]).astype(np.float32)[:, None] / 127]

    def affine(self, rows: slice) -> tuple[Float[np.ndarray, "o G"], Float[np.ndarray, "o G"]]:
        """Scales, and the values of code 0."""
        scale = self.params(rows)[0]
        return scale, -128 * scale

    def dense(self, rows: slice, columns: slice) -> Float[np.ndarray, "o i"]:
        """Dequantised part of the matrix, float32."""
        return np.asarray(self.values[rows])[:, columns].astype(np.float32) * self.params(rows)[0]


def int8_tensors(stem: str, codes: UInt8[np.ndarray, "O I"], scale: Float[np.ndarray, "O 1"]) -> dict[str, np.ndarray]:
    """Tensors of a file for the layer called ``stem``."""
    return {
        f"{stem}.weight": np.ascontiguousarray(codes ^ 128).view(np.int8),
        f"{stem}.{LARGEST}": scale[:, 0].astype(np.float32) * 127,
        f"{stem}.{LAYOUT}": np.zeros((), np.uint8),
    }


def int8_entry(plain: Sequence[str]) -> dict[str, Any]:
    """``quantization_config`` of ``config.json``; ``plain``: linear layers that are not quantised."""
    return {
        "quant_method": BITSANDBYTES,
        "load_in_8bit": True,
        "load_in_4bit": False,
        "llm_int8_threshold": THRESHOLD,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": list(plain),
    }


def int8_rows(given: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors under the names of the plain model, with an ``Int8Rows`` for each int8 matrix.

    Raises:
        HubError: 4-bit codes, which are not read here, or arrays that are missing or of another shape or dtype.
    """
    if not given.get("load_in_8bit"):
        raise HubError(f"config.json: {BITSANDBYTES} is read with load_in_8bit alone; 4-bit codes are not read here.")
    threshold = given.get("llm_int8_threshold", THRESHOLD)
    if not isinstance(threshold, int | float) or threshold < 0:
        raise HubError(f"config.json: llm_int8_threshold = {threshold!r}; legal: 0 or a positive number.")
    out: dict[str, Any] = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if last in (LARGEST, LAYOUT):
            if last == LAYOUT and int(np.asarray(tensor[...] if tensor.shape == () else tensor[:]).reshape(())) != 0:
                raise HubError(f"{name} is not 0: read are rows as they are, without tiles.")
            continue
        if str(tensor.dtype) != "int8":
            out[name] = tensor
            continue
        largest = tensors.get(f"{stem}.{LARGEST}")
        if largest is None or tuple(largest.shape) != tuple(tensor.shape[:1]) or len(tensor.shape) != 2:
            have = "there is none" if largest is None else f"it is {list(largest.shape)}"
            raise HubError(f"{name} is int8{list(tensor.shape)} and wants {stem}.{LARGEST} of its rows; {have}.")
        rows, columns = tensor.shape
        out[name] = Int8Rows((rows, columns), tensor, largest, float(threshold))
    return out
