"""Stored codes: matrices of files in a few bits, with parameters of groups of columns, in whatever layout the file has.

Legend: O rows (outputs), I columns (inputs), G groups of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int32, UInt8

from jaxllm.quant.formats.code_groups import CodeGroups
from jaxllm.quant.grids import MinimumGrid


@runtime_checkable
class StoredCodes(Protocol):
    """A matrix [O, I] of a file whose codes can stay packed."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        ...

    @property
    def unit(self) -> int:
        """Columns that share parameters, and which devices cannot split."""
        ...

    def form(self, axis: int, contract: int) -> CodeGroups:
        """Format of the packed weight, see ``CodeGroups``."""
        ...

    def codes(self, rows: slice) -> UInt8[np.ndarray, "o I"]:
        """Codes of some rows."""
        ...

    def params(self, rows: slice) -> list[np.ndarray]:
        """Stored parameters of some rows, [o, G] each, in the order and dtype of the packed weight."""
        ...

    def affine(self, rows: slice) -> tuple[Float[np.ndarray, "o G"], Float[np.ndarray, "o G"]]:
        """(scale, value of code 0) of some rows in float32; a group is of ``form(...).group`` columns."""
        ...


class CommonCodes:
    """A matrix whose codes are widened to a format that holds those of other layers too: scales and minima in float32.

    The layers of a model can have several formats (GGUF's Q4_K_M has Q4_K and Q6_K), and are stacked in one array.
    """

    def __init__(self, of: StoredCodes, bits: int, group: int):
        self.of, self.bits, self.group = of, bits, group
        self.shape, self.unit = of.shape, max(of.unit, group)

    def form(self, axis: int, contract: int) -> CodeGroups:
        """Format of the packed weight."""
        return CodeGroups(MinimumGrid(self.bits), self.group, axis, contract)

    def codes(self, rows: slice) -> UInt8[np.ndarray, "o I"]:
        """Codes of some rows."""
        return self.of.codes(rows)

    def params(self, rows: slice) -> list[np.ndarray]:
        """Scales and minima of some rows."""
        repeats = (self.of.form(-2, 1).group or self.shape[1]) // self.group
        return [np.repeat(x, repeats, axis=1) for x in self.of.affine(rows)]

    def affine(self, rows: slice) -> tuple[Float[np.ndarray, "o G"], Float[np.ndarray, "o G"]]:
        """Scales and minima of some rows."""
        scale, minimum = self.params(rows)
        return scale, minimum


def in_one_format(stored: Sequence[StoredCodes]) -> Sequence[StoredCodes] | None:
    """The matrices in one format: as they are if they have one, else widened; None if there is none that holds all."""
    forms = [one.form(-2, 1) for one in stored]
    if len(set(forms)) == 1:
        return stored
    sizes = [form.group or one.shape[1] for form, one in zip(forms, stored, strict=True)]
    bits, group = max(form.grid.bits for form in forms), min(sizes)
    if any(form.grid.name.startswith(("nf", "mxfp", "fp")) for form in forms) or any(size % group for size in sizes):
        return None
    return [CommonCodes(one, bits, group) for one in stored]


def pack_rows(codes: UInt8[np.ndarray, "R C"], bits: int) -> UInt8[np.ndarray, "R B"]:
    """Codes of each row as a stream of bits, low ones first, in bytes."""
    if bits == 8:
        return codes
    if bits == 4 and codes.shape[1] % 2 == 0:
        return codes[:, 0::2] | codes[:, 1::2] << 4
    stream = (codes[:, :, None] >> np.arange(bits, dtype=np.uint8)) & 1
    return np.packbits(stream.reshape(len(codes), -1), axis=1, bitorder="little")


def pack_bits(codes: UInt8[np.ndarray, "R C"], bits: int) -> Int32[np.ndarray, "R W"]:
    """``pack_rows`` in words of 32 bits."""
    data = pack_rows(codes, bits)
    return np.ascontiguousarray(np.pad(data, ((0, 0), (0, -data.shape[1] % 4)))).view("<i4")


def unpack_bits(words: Int32[np.ndarray, "R W"], bits: int, count: int) -> UInt8[np.ndarray, "R C"]:
    """The first ``count`` codes of each row of words; the inverse of ``pack_bits``."""
    return unpack_rows(np.ascontiguousarray(words.astype("<i4", copy=False)).view(np.uint8), bits, count)


def unpack_rows(data: UInt8[np.ndarray, "R B"], bits: int, count: int) -> UInt8[np.ndarray, "R C"]:
    """The first ``count`` codes of each row of bytes; the inverse of ``pack_rows``."""
    if bits == 8:
        return data[:, :count]
    if bits == 4:
        return np.stack([data & 15, data >> 4], axis=2).reshape(len(data), -1)[:, :count]
    stream = np.unpackbits(data, axis=1, bitorder="little", count=count * bits).reshape(len(data), count, bits)
    return (stream << np.arange(bits, dtype=np.uint8)).sum(axis=2, dtype=np.uint8)
