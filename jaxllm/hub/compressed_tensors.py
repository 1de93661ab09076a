"""compressed-tensors: matrices in integer codes with scales of groups, as vLLM and transformers read them.

``NAME.weight`` [O, I] is ``NAME.weight_packed``, int32 [O, ceil(I * bits / 32)] with the codes of a row one after
another, low bits first, each plus 2^(bits - 1); ``NAME.weight_scale`` [O, G]; for asymmetric codes
``NAME.weight_zero_point``, packed likewise along O, int32 [ceil(O * bits / 32), G]; and ``NAME.weight_shape``, [O, I].

Legend: O rows (outputs), I columns (inputs), G groups of columns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from jaxllm.hub.errors import HubError
from jaxllm.hub.float_codes import ValueCodes, value_codes, value_scheme
from jaxllm.hub.stored_codes import pack_bits, unpack_bits
from jaxllm.quant.formats.code_groups import CodeGroups
from jaxllm.quant.formats.int8_activations import Int8Activations
from jaxllm.quant.grids import IntGrid

METHOD = "compressed-tensors"
VALUE_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "mxfp4-pack-quantized")
INT8_TOKENS: dict[str, Any] = {
    "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "group_size": None, "block_structure": None,
    "dynamic": True, "actorder": None, "observer": None, "observer_kwargs": {},
}  # fmt: skip
"""Scheme of activations in int8 with scales of tokens that are found as they are multiplied."""
PACKED, SCALE, ZERO, SHAPE = "_packed", "_scale", "_zero_point", "_shape"


@dataclass(frozen=True)
class IntScheme:
    """Codes of a group of layers.

    Attributes:
        bits: of a code.
        group: columns that share a scale; None: all of a row.
        symmetric: whether there are no zero points.
        targets: layers by name, by ``re:`` and a pattern, or all ("Linear").
        activations: whether activations are rounded to int8, with dynamic scales of tokens.
    """

    bits: int
    group: int | None
    symmetric: bool
    targets: tuple[str, ...] = ("Linear",)
    activations: bool = False

    def takes(self, layer: str) -> bool:
        """Whether a layer of this name has the scheme."""
        return any(
            re.match(target[3:], layer) is not None if target.startswith("re:") else target in ("Linear", layer)
            for target in self.targets
        )


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """Stored arrays of a matrix [O, I], as they are in the file: a ``StoredCodes``."""

    scheme: IntScheme
    shape: tuple[int, int]
    packed: Any
    scale: Any
    zero: Any

    @property
    def unit(self) -> int:
        """Columns that share parameters."""
        return self.scheme.group or self.shape[1]

    def form(self, axis: int, contract: int) -> CodeGroups:
        """Format of the packed weight."""
        make = Int8Activations if self.scheme.activations else CodeGroups
        return make(IntGrid(self.scheme.bits, self.scheme.symmetric), self.scheme.group, axis, contract)

    def params(self, rows: slice) -> list[np.ndarray]:
        """Scales of some rows, and zero points of asymmetric codes."""
        scale = np.asarray(self.scale[rows])
        return [scale] if self.scheme.symmetric else [scale, self.zeros(rows).astype(scale.dtype)]

    def affine(self, rows: slice) -> tuple[Float[np.ndarray, "o G"], Float[np.ndarray, "o G"]]:
        """Scales, and the values of code 0."""
        scale = np.asarray(self.scale[rows]).astype(np.float32)
        return scale, -self.zeros(rows) * scale

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


def config_entry(schemes: Sequence[IntScheme], ignore: list[str], codebook: str = "") -> dict[str, Any]:
    """``quantization_config`` of ``config.json``.

    Args:
        schemes: of groups of layers.
        codebook: "fp8", "mxfp4" or "int8" (bytes) in place of packed codes.
        ignore: linear layers that are not quantised.
    """
    kind = value_scheme(codebook)[0] if codebook else "pack-quantized"
    return {
        "quant_method": METHOD,
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": _config_group(scheme, codebook) for i, scheme in enumerate(schemes)},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def _config_group(scheme: IntScheme, codebook: str) -> dict[str, Any]:
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
    weights |= value_scheme(codebook)[1] if codebook else {}
    return {
        "targets": list(scheme.targets),
        "weights": weights,
        "input_activations": dict(INT8_TOKENS) if scheme.activations else None,
        "output_activations": None,
    }


def schemes(given: Mapping[str, Any]) -> list[IntScheme]:
    """Schemes of a ``quantization_config``.

    Raises:
        HubError: a scheme that is not read here; says what it is.
    """
    found: list[IntScheme | None] = []
    groups = given.get("config_groups")
    for label, group in (groups if isinstance(groups, Mapping) else {}).items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if _is_of_values(given, group):
            found.append(None)
            continue
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
        activations = group.get("input_activations")
        symmetric = bool(weights.get("symmetric", True))
        if activations is not None and not (_int8_tokens(activations) and symmetric and weights["num_bits"] in (4, 8)):
            raise HubError(
                f"config.json: {label} of {METHOD} quantises activations too; read are dynamic int8 by token beside "
                "symmetric weights of 4 or 8 bits, and weights alone."
            )
        size = weights.get("group_size") if weights["strategy"] == "group" else None
        if weights["strategy"] == "group" and not (type(size) is int and size > 0):
            raise HubError(f"config.json: {label} of {METHOD} has group_size = {size!r}; legal: a positive number.")
        found.append(
            IntScheme(weights["num_bits"], size, symmetric, tuple(group.get("targets", ())), activations is not None)
        )
    if not found:
        raise HubError(f"config.json: {METHOD} has no config_groups.")
    return [one for one in found if one is not None]


def _int8_tokens(activations: Any) -> bool:
    """Whether a scheme of activations is ``INT8_TOKENS``."""
    return isinstance(activations, Mapping) and all(
        activations.get(key) == INT8_TOKENS[key] for key in ("num_bits", "type", "symmetric", "strategy", "dynamic")
    )


def _is_of_values(given: Mapping[str, Any], group: Any) -> bool:
    """Whether a group's weights are float8, int8 or MXFP4 values, see ``value_codes``.

    Raises:
        HubError: its activations have stored scales.
    """
    kind = group.get("format") or given.get("format") if isinstance(group, Mapping) else None
    if kind not in VALUE_FORMATS:
        return False
    activations = group.get("input_activations")
    if activations is not None and not activations.get("dynamic"):
        raise HubError(
            f"config.json: {METHOD} quantises activations with stored scales; read are weights alone, and activations "
            "with dynamic scales, which stay in the compute dtype."
        )
    return True


def packed_matrices(given: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, PackedMatrix | ValueCodes | Any]:
    """Tensors of a file under the names of the plain model, with a ``PackedMatrix`` or ``ValueCodes``
    for each that is quantised.

    Raises:
        HubError: arrays are missing, or of another shape or dtype than the scheme says.
    """
    known = schemes(given)
    rounds = any(_int8_tokens(group.get("input_activations")) for group in given["config_groups"].values())
    parts = (SCALE, ZERO, SHAPE, "_g_idx")
    out: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if any(name.endswith(part) and name.removesuffix(part) + PACKED in tensors for part in parts):
            continue
        if name.endswith(".weight" + SCALE) and name.removesuffix(SCALE) in tensors:
            continue
        whole = name.removesuffix(PACKED)
        if name.endswith(".weight") and (scale := tensors.get(name + SCALE)) is not None:
            out[name] = value_codes(name, tensor, scale, rounds)
            continue
        if not name.endswith(".weight" + PACKED):
            if str(tensor.dtype).startswith(("float8", "int8")):
                raise HubError(f"{name} is in {tensor.dtype}, and there is no {name}{SCALE} beside it.")
            out[name] = tensor
            continue
        if tensor.dtype == np.uint8:
            if (scale := tensors.get(whole + SCALE)) is None:
                raise HubError(f"{name} is there, and no {whole}{SCALE}.")
            out[whole] = value_codes(whole, tensor, scale)
            continue
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
