"""compressed-tensors: matrices in integer codes with scales of groups, as vLLM and transformers read them.

``NAME.weight`` [O, I] is ``NAME.weight_packed``, int32 [O, ceil(I * bits / 32)] with the codes of a row one after
another, low bits first, each plus 2^(bits - 1); ``NAME.weight_scale`` [O, G]; for asymmetric codes
``NAME.weight_zero_point``, packed likewise along O, int32 [ceil(O * bits / 32), G]; and ``NAME.weight_shape``, [O, I].

Legend: O rows (outputs), I columns (inputs), G groups of columns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int32, UInt8

from jaxllm.hub.errors import HubError

METHOD = "compressed-tensors"
PACKED, SCALE, ZERO, SHAPE = "_packed", "_scale", "_zero_point", "_shape"


@dataclass(frozen=True)
class IntScheme:
    """Codes of a group of layers.

    Attributes:
        bits: of a code.
        group: columns that share a scale; None: all of a row.
        symmetric: whether there are no zero points.
        targets: layers by name, by ``re:`` and a pattern, or all ("Linear").
    """

    bits: int
    group: int | None
    symmetric: bool
    targets: tuple[str, ...] = ("Linear",)

    def takes(self, layer: str) -> bool:
        """Whether a layer of this name has the scheme."""
        return any(
            re.match(target[3:], layer) is not None if target.startswith("re:") else target in ("Linear", layer)
            for target in self.targets
        )


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """Stored arrays of a matrix [O, I], as they are in the file."""

    scheme: IntScheme
    shape: tuple[int, int]
    packed: Any
    scale: Any
    zero: Any

    def codes(self, rows: slice = slice(None)) -> UInt8[np.ndarray, "O I"]:
        """Codes of some rows, 0 to 2^bits - 1."""
        return unpack_bits(np.asarray(self.packed[rows]), self.scheme.bits, self.shape[1])

    def zeros(self, rows: slice = slice(None)) -> Float[np.ndarray, "O G"]:
        """Zero points of some rows: the codes that stand for 0."""
        if self.zero is None:
            count = len(range(*rows.indices(self.shape[0])))
            return np.full((count, self.scale.shape[1]), 2.0 ** (self.scheme.bits - 1), np.float32)
        found = unpack_bits(np.asarray(self.zero[:]).T, self.scheme.bits, self.shape[0])
        return found.T[rows].astype(np.float32)

    def dense(self, rows: slice, columns: slice) -> Float[np.ndarray, "o i"]:
        """Dequantised part of the matrix, float32."""
        place = np.arange(self.shape[1])[columns] // (self.scheme.group or self.shape[1])
        scale = np.asarray(self.scale[rows]).astype(np.float32)
        return (self.codes(rows)[:, columns] - self.zeros(rows)[:, place]) * scale[:, place]


def pack_bits(codes: UInt8[np.ndarray, "R C"], bits: int) -> Int32[np.ndarray, "R W"]:
    """Codes of each row as a stream of bits, low ones first, in words of 32."""
    stream = (codes[:, :, None] >> np.arange(bits, dtype=np.uint8)) & 1
    stream = stream.reshape(len(codes), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return np.packbits(stream, axis=1, bitorder="little").view("<i4")


def unpack_bits(words: Int32[np.ndarray, "R W"], bits: int, count: int) -> UInt8[np.ndarray, "R C"]:
    """The first ``count`` codes of each row of words; the inverse of ``pack_bits``."""
    data = np.ascontiguousarray(words.astype("<i4", copy=False)).view(np.uint8)
    if bits == 8:
        return data[:, :count]
    stream = np.unpackbits(data, axis=1, bitorder="little", count=count * bits).reshape(len(words), count, bits)
    return (stream << np.arange(bits, dtype=np.uint8)).sum(axis=2, dtype=np.uint8)


def packed_tensors(
    name: str,
    codes: UInt8[np.ndarray, "O I"],
    scale: Float[np.ndarray, "O G"],
    zero: Float[np.ndarray, "O G"] | None,
    bits: int,
) -> dict[str, np.ndarray]:
    """Tensors of a file for the matrix called ``name``."""
    out = {
        name + PACKED: pack_bits(codes, bits),
        name + SCALE: scale,
        name + SHAPE: np.asarray(codes.shape, np.int64),
    }
    if zero is not None:
        out[name + ZERO] = np.ascontiguousarray(pack_bits(zero.astype(np.uint8).T, bits).T)
    return out


def config_entry(scheme: IntScheme, ignore: list[str]) -> dict[str, Any]:
    """``quantization_config`` of ``config.json``.

    Args:
        ignore: linear layers that are not quantised.
    """
    weights = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "channel" if scheme.group is None else "group",
        "group_size": scheme.group,
        "block_structure": None,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    group = {"targets": list(scheme.targets), "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": METHOD,
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def schemes(given: Mapping[str, Any]) -> list[IntScheme]:
    """Schemes of a ``quantization_config``.

    Raises:
        HubError: a scheme that is not read here; says what it is.
    """
    found = []
    groups = given.get("config_groups")
    for label, group in (groups if isinstance(groups, Mapping) else {}).items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if (
            not isinstance(weights, Mapping)
            or weights.get("type") != "int"
            or weights.get("num_bits") not in range(2, 9)
        ):
            raise HubError(
                f"config.json: {label} of {METHOD} has weights {weights!r}; read are integers of 2 to 8 bits."
            )
        if weights.get("strategy") not in ("group", "channel"):
            raise HubError(
                f"config.json: {label} of {METHOD} has scales by {weights.get('strategy')!r}; read: group, channel."
            )
        if group.get("input_activations") is not None:
            raise HubError(f"config.json: {label} of {METHOD} quantises activations too; read are weights alone.")
        size = weights.get("group_size") if weights["strategy"] == "group" else None
        if weights["strategy"] == "group" and not (type(size) is int and size > 0):
            raise HubError(f"config.json: {label} of {METHOD} has group_size = {size!r}; legal: a positive number.")
        found.append(
            IntScheme(weights["num_bits"], size, bool(weights.get("symmetric", True)), tuple(group.get("targets", ())))
        )
    if not found:
        raise HubError(f"config.json: {METHOD} has no config_groups.")
    return found


def packed_matrices(given: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, PackedMatrix | Any]:
    """Tensors of a file under the names of the plain model, with a ``PackedMatrix`` for each that is packed.

    Raises:
        HubError: arrays are missing, or of another shape or dtype than the scheme says.
    """
    known = schemes(given)
    parts = (SCALE, ZERO, SHAPE, "_g_idx")
    out: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if any(name.endswith(part) and name.removesuffix(part) + PACKED in tensors for part in parts):
            continue
        if not name.endswith(".weight" + PACKED):
            out[name] = tensor
            continue
        whole = name.removesuffix(PACKED)
        layer = whole.removesuffix(".weight")
        scheme = next((one for one in known if one.takes(layer)), None)
        if scheme is None:
            raise HubError(f"{name} is packed, and no group of config.json has {layer} as a target.")
        out[whole] = _matrix(whole, scheme, tensors)
    return out


def _matrix(name: str, scheme: IntScheme, tensors: Mapping[str, Any]) -> PackedMatrix:
    missing = [name + part for part in (SCALE, SHAPE) if name + part not in tensors]
    if not scheme.symmetric and name + ZERO not in tensors:
        missing.append(name + ZERO)
    if missing:
        raise HubError(f"{name}{PACKED} is there, and no {', '.join(missing)}.")
    if name + "_g_idx" in tensors:
        raise HubError(f"{name}_g_idx: groups of columns that are not neighbours are not read here.")
    packed, scale = tensors[name + PACKED], tensors[name + SCALE]
    rows, columns = (int(size) for size in np.asarray(tensors[name + SHAPE][:]).reshape(-1))
    groups = -(-columns // scheme.group) if scheme.group else 1
    wanted = (rows, math.ceil(columns * scheme.bits / 32))
    if packed.dtype != np.int32 or tuple(packed.shape) != wanted or tuple(scale.shape) != (rows, groups):
        raise HubError(
            f"{name}{PACKED} is {packed.dtype}{list(packed.shape)} and {name}{SCALE} {list(scale.shape)}; "
            f"{scheme.bits} bits in groups of {scheme.group or columns} of [{rows}, {columns}] are int32{list(wanted)} "
            f"and {[rows, groups]}."
        )
    zero = tensors.get(name + ZERO)
    if zero is not None and tuple(zero.shape) != (math.ceil(rows * scheme.bits / 32), groups):
        raise HubError(f"{name}{ZERO} has shape {list(zero.shape)}, which is not that of its scales, packed.")
    return PackedMatrix(scheme, (rows, columns), packed, scale, zero)
