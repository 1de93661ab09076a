"""GPTQ and AWQ files: matrices in integer codes with inputs along the first dimension, read and written.

GPTQ (AutoGPTQ, GPTQModel): ``NAME.qweight`` int32 [I b / 32, O], codes along the inputs, low bits first; ``qzeros``
int32 [G, O b / 32]; ``scales`` float16 [G, O]; ``g_idx`` int32 [I], the group of each input. Version 1 stores zero
points less one, modulo 2^b ("checkpoint_format": "gptq"); version 2 ("gptq_v2") as they are.

AWQ (AutoAWQ): ``qweight`` int32 [I, O / 8], ``qzeros`` [G, O / 8], ``scales`` [G, O]; nibble i of a word is that of
output ``ORDER[i]`` of 8.

Legend: O outputs, I inputs, G groups of inputs, b bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int32, UInt8

from jaxllm.hub.errors import HubError
from jaxllm.hub.stored_codes import pack_bits, unpack_bits
from jaxllm.quant.formats.code_groups import CodeGroups
from jaxllm.quant.grids import IntGrid

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GPTQ_BITS = (2, 3, 4, 8)
PARTS = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(frozen=True, eq=False)
class ColumnCodes:
    """A matrix of a GPTQ or AWQ file, a ``StoredCodes``.

    Attributes:
        arrays: arrays of the file by their last name.
        bits: of a code.
        group: inputs that share a scale, as ``g_idx`` has them.
        shape: outputs and inputs.
        awq: whether the layout is AWQ's.
        less_one: whether zero points are stored less one.
        order: group of each input where these are not neighbours (GPTQ's act-order without static groups); else None.
    """

    arrays: Mapping[str, Any]
    bits: int
    group: int
    shape: tuple[int, int]
    awq: bool = False
    less_one: bool = False
    order: np.ndarray | None = None

    @property
    def unit(self) -> int:
        """Inputs that share parameters."""
        return self.group

    def form(self, axis: int, contract: int) -> CodeGroups:
        """Format of the packed weight."""
        return CodeGroups(IntGrid(self.bits, False), self.group, axis, contract)

    def codes(self, rows: slice) -> UInt8[np.ndarray, "o I"]:
        """Codes of some rows."""
        words = np.asarray(self.arrays["qweight"][:])
        if self.awq:
            return _from_awq(words, self.shape[0]).T[rows]
        return unpack_bits(np.ascontiguousarray(words[:, rows].T), self.bits, self.shape[1])

    def zeros(self, rows: slice) -> Float[np.ndarray, "o G"]:
        """Zero points of some rows."""
        words = np.asarray(self.arrays["qzeros"][:])
        found = _from_awq(words, self.shape[0]) if self.awq else unpack_bits(words, self.bits, self.shape[0])
        return ((found + self.less_one) & 2**self.bits - 1).T[rows].astype(np.float32)

    def params(self, rows: slice) -> list[np.ndarray]:
        """Scales and zero points of some rows."""
        scale = np.asarray(self.arrays["scales"][:]).T[rows]
        return [scale, self.zeros(rows).astype(scale.dtype)]

    def affine(self, rows: slice) -> tuple[Float[np.ndarray, "o G"], Float[np.ndarray, "o G"]]:
        """Scales, and the values of code 0."""
        scale, zero = (x.astype(np.float32) for x in self.params(rows))
        return scale, -zero * scale

    def dense(self, rows: slice, columns: slice) -> Float[np.ndarray, "o i"]:
        """Dequantised part of the matrix, float32."""
        scale, zero = (x.astype(np.float32) for x in self.params(rows))
        place = np.arange(self.shape[1]) // self.group if self.order is None else self.order
        return (self.codes(rows)[:, columns] - zero[:, place[columns]]) * scale[:, place[columns]]


def _from_awq(words: Int32[np.ndarray, "R W"], count: int) -> UInt8[np.ndarray, "R C"]:
    nibbles = unpack_bits(np.ascontiguousarray(words), 4, 8 * words.shape[1]).reshape(*words.shape, 8)
    return nibbles[..., np.argsort(ORDER)].reshape(len(words), -1)[:, :count]


def _to_awq(codes: UInt8[np.ndarray, "R C"]) -> Int32[np.ndarray, "R W"]:
    return pack_bits(np.ascontiguousarray(codes.reshape(len(codes), -1, 8)[..., ORDER]).reshape(codes.shape), 4)


def column_codes(given: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors of a GPTQ or AWQ model under the names of the plain one, with a ``ColumnCodes`` for each in codes.

    Raises:
        HubError: a setting that is not read here, or arrays that are missing or of another shape or dtype.
    """
    awq = given["quant_method"] == "awq"
    bits = given.get("bits", given.get("w_bit"))
    label = "config.json: quantization_config"
    if bits not in ((4,) if awq else GPTQ_BITS):
        raise HubError(f"{label} has bits = {bits!r}; read: {'4' if awq else ', '.join(map(str, GPTQ_BITS))}.")
    kind = given.get("version", "gemm") if awq else given.get("checkpoint_format", "gptq")
    if str(kind).lower() not in (("gemm",) if awq else ("gptq", "gptq_v2")):
        raise HubError(f"{label} has the layout {kind!r}; read: {'gemm' if awq else 'gptq, gptq_v2'}.")
    less_one = not awq and kind == "gptq"
    out: dict[str, Any] = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if last == "qweight":
            out[f"{stem}.weight"] = _matrix(stem, tensors, int(bits), awq, less_one)
        elif not (last in PARTS and f"{stem}.qweight" in tensors) and not _is_zero_bias(name, tensors):
            out[name] = tensor
    return out


def _is_zero_bias(name: str, tensors: Mapping[str, Any]) -> bool:
    """Whether a tensor is the bias of zeros that some writers add to every quantised layer."""
    stem, _, last = name.rpartition(".")
    return last == "bias" and f"{stem}.qweight" in tensors and not np.asarray(tensors[name][:]).any()


def _matrix(stem: str, tensors: Mapping[str, Any], bits: int, awq: bool, less_one: bool) -> ColumnCodes:
    wanted = PARTS[:3]
    if missing := [f"{stem}.{part}" for part in wanted if f"{stem}.{part}" not in tensors]:
        raise HubError(f"{stem}.qweight is there, and no {', '.join(missing)}.")
    arrays = {part: tensors[f"{stem}.{part}"] for part in PARTS if f"{stem}.{part}" in tensors}
    words, zeros, scales = (arrays[part] for part in wanted)
    if len(words.shape) != 2 or len(scales.shape) != 2 or words.dtype != np.int32 or zeros.dtype != np.int32:
        raise HubError(f"{stem}: qweight and qzeros are matrices of int32, scales a matrix.")
    groups, outputs = scales.shape
    inputs = words.shape[0] if awq else words.shape[0] * 32 // bits
    shapes = ((inputs, outputs // 8), (groups, outputs // 8)) if awq else (
        (inputs * bits // 32, outputs), (groups, outputs * bits // 32)
    )  # fmt: skip
    group = -(-inputs // groups)
    if (tuple(words.shape), tuple(zeros.shape)) != shapes or groups != -(-inputs // group):
        raise HubError(
            f"{stem}: qweight {list(words.shape)}, qzeros {list(zeros.shape)} and scales {list(scales.shape)} are not "
            f"of one matrix in {bits} bits; the scales make them {list(shapes[0])} and {list(shapes[1])}."
        )
    order = np.asarray(arrays["g_idx"][:]) if "g_idx" in arrays and not awq else None
    if order is not None:
        if order.shape != (inputs,) or order.min() < 0 or order.max() >= groups:
            raise HubError(f"{stem}.g_idx does not name a group of {groups} for each of {inputs} inputs.")
        if np.array_equal(order, np.arange(inputs) // group):
            order = None
    return ColumnCodes(arrays, bits, group, (outputs, inputs), awq, less_one, order)


def gptq_tensors(
    stem: str,
    codes: UInt8[np.ndarray, "O I"],
    scale: Float[np.ndarray, "O G"],
    zero: Float[np.ndarray, "O G"],
    bits: int,
) -> dict[str, np.ndarray]:
    """Tensors of a GPTQ file (version 1) for the layer called ``stem``.

    Raises:
        HubError: words of 32 bits cannot hold the codes of the inputs or the outputs.
    """
    outputs, inputs = codes.shape
    if inputs * bits % 32 or outputs * bits % 32:
        raise HubError(f"{stem}: GPTQ has words of 32 bits, which [{outputs}, {inputs}] in {bits} bits do not fill.")
    groups = scale.shape[1]
    less = ((zero.astype(np.int32) - 1) & 2**bits - 1).astype(np.uint8)
    return {
        f"{stem}.qweight": np.ascontiguousarray(pack_bits(codes, bits).T),
        f"{stem}.qzeros": pack_bits(np.ascontiguousarray(less.T), bits),
        f"{stem}.scales": np.ascontiguousarray(scale.T).astype(np.float16),
        f"{stem}.g_idx": (np.arange(inputs) // -(-inputs // groups)).astype(np.int32),
    }


def awq_tensors(
    stem: str, codes: UInt8[np.ndarray, "O I"], scale: Float[np.ndarray, "O G"], zero: Float[np.ndarray, "O G"]
) -> dict[str, np.ndarray]:
    """Tensors of an AWQ file for the layer called ``stem``.

    Raises:
        HubError: the outputs are no multiple of 8.
    """
    if codes.shape[0] % 8:
        raise HubError(f"{stem}: AWQ packs 8 outputs in a word, and {codes.shape[0]} is no multiple of 8.")
    return {
        f"{stem}.qweight": _to_awq(np.ascontiguousarray(codes.T)),
        f"{stem}.qzeros": _to_awq(np.ascontiguousarray(zero.astype(np.uint8).T)),
        f"{stem}.scales": np.ascontiguousarray(scale.T).astype(np.float16),
    }
