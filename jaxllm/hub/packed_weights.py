"""Packed weights of checkpoints: quantised matrices, placed on a mesh as they are stored instead of dequantised.

Experts in block-FP8 or MXFP4, and any matrix in integer codes, embedding and head among them.

Legend: E experts, O rows of the matrix as stored, I columns, G groups of 32 columns; matrices of the model are [I, O].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from jaxllm.hub.errors import HubError
from jaxllm.hub.quantised_checkpoints import E8M0_NAN, MXFP4_GROUP, QuantisedArrays
from jaxllm.hub.stored_codes import StoredCodes, in_one_format, pack_rows
from jaxllm.hub.weight_mapping import SWAPPED, TensorPart, WeightPiece
from jaxllm.models import PackedWeight
from jaxllm.models.functional import VOCABULARY
from jaxllm.models.packed_weight import ActivationFormat, scale_spec
from jaxllm.quant.formats.block_float8 import BlockFloat8
from jaxllm.quant.formats.code_groups import WORDS, CodeGroups
from jaxllm.quant.formats.mxfp4 import MXFP4

EXPERTS = ("mlp/experts/gate", "mlp/experts/up", "mlp/experts/down")
ROWS = 4096
"""Rows of a vocabulary whose codes are unpacked at a time."""

PackedOrPlain = Literal["plain", "packed"]


def packed_leaf_paths(sources: Mapping[str, list[tuple[Any, TensorPart]]]) -> set[str]:
    """Paths of the leaves that can stay packed, made of quantised tensors alone.

    Raises:
        HubError: there is none.
    """

    def stays(path: str, sources: list[tuple[Any, TensorPart]]) -> bool:
        stored = [getattr(tensor, "stored", None) for tensor, _ in sources]
        if all(isinstance(one, QuantisedArrays) for one in stored):
            return path.endswith(EXPERTS)
        codes = [one for one in stored if isinstance(one, StoredCodes) and getattr(one, "order", None) is None]
        if len(codes) < len(stored) or (whole := in_one_format(codes)) is None:
            return False
        form = whole[0].form(-2, 1)
        if path in VOCABULARY and isinstance(form, ActivationFormat):
            return False  # activations are not rounded for it
        bits = form.grid.bits
        return all(_packs(bits, part, path in VOCABULARY) for _, part in sources)

    kept = {path for path, parts in sources.items() if stays(path, parts)}
    if not kept:
        raise HubError("no weights of this model are quantised, so that none can stay packed; load it plain.")
    return kept


@dataclass(frozen=True)
class _InFormat:
    """A tensor whose codes are in another format, that of all layers."""

    stored: StoredCodes


def in_common_formats(sources: list[tuple[Any, TensorPart]]) -> list[tuple[Any, TensorPart]]:
    """Sources of a leaf that stays packed, in the one format that holds all of its layers, to be placed one by one."""
    if not all(isinstance(tensor.stored, StoredCodes) for tensor, _ in sources):
        return sources
    whole = in_one_format([tensor.stored for tensor, _ in sources])
    assert whole is not None
    return [(_InFormat(stored), part) for stored, (_, part) in zip(whole, sources, strict=True)]


def place_packed(leaf: Any, sources: list[tuple[Any, TensorPart]], path: str) -> PackedWeight:
    """Places a packed leaf of experts on the devices that ``leaf`` is for, sharded as the dense weight would be.

    Raises:
        HubError: a value is not finite, or values that share a scale would lie in two shards.
    """
    stack = leaf.shape[: len(sources[0][1].at)]
    if path in VOCABULARY:
        return _place_rows(leaf, sources[0][0].stored, path)
    if not isinstance(sources[0][0].stored, QuantisedArrays):
        return _place_codes(leaf, stack, sources, path)
    values = scales = np.empty(0)
    block = 0, 0
    for tensor, part in sources:
        one, one_scales, block = _part_arrays(tensor.stored, part)
        with np.errstate(invalid="ignore"):
            known = (one_scales != E8M0_NAN) if one.dtype == np.uint8 else np.isfinite(one_scales)
        if not (known.all() and (one.dtype == np.uint8 or np.isfinite(one.astype(np.float32)).all())):
            where = " ".join(f"{name} {i}" for i, name in zip(part.at, ("row", "expert"), strict=False))
            raise HubError(f"{path} ({where}) holds values that are not finite; the file is damaged.")
        if not values.size:
            values, scales = (
                np.empty((*stack, *one.shape), one.dtype),
                np.empty((*stack, *one_scales.shape), one_scales.dtype),
            )
        values[part.at], scales[part.at] = one, one_scales
    shard = leaf.sharding.shard_shape(leaf.shape)
    for size, part, many in zip(leaf.shape[-2:], shard[-2:], block, strict=True):
        if part < size and part % many:
            raise HubError(
                f"{path}: the mesh splits a dimension of {size} into shards of {part}, but {many} values along it "
                "share a scale; split it over fewer devices, or load the model plain."
            )
    form = MXFP4() if values.dtype == np.uint8 else BlockFloat8(block)

    def placed(x: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(x.shape, leaf.sharding, x.__getitem__)

    return PackedWeight(placed(values), placed(scales), form)


def _packs(bits: int, part: TensorPart, of_vocabulary: bool) -> bool:
    """Whether a matrix's codes can be cut into whole bytes along the last of its inputs."""
    inputs = part.piece.groups[1] if len(part.piece.groups) == 2 else ()
    first = int(of_vocabulary)
    if not inputs or inputs != tuple(range(first, first + len(inputs))) or part.axis or part.step != 1:
        return False
    return part.shape[inputs[-1]] % WORDS[bits][0] == 0


def _place_codes(leaf: Any, stack: tuple[int, ...], sources: list[tuple[Any, TensorPart]], path: str) -> PackedWeight:
    """Places codes: their bytes and parameters, in the order of the model's dimensions."""
    whole = in_one_format([tensor.stored for tensor, _ in sources])
    assert whole is not None
    contract = len(sources[0][1].piece.groups[1])
    form = whole[0].form(len(stack) + contract - 1 - len(leaf.shape), contract)
    values = scales = np.empty(0)
    for stored, (_, part) in zip(whole, sources, strict=True):
        piece = part.piece
        outputs, inputs = piece.groups
        rows = slice(part.begin, part.begin + math.prod(part.shape[dim] for dim in outputs))
        shape = list(part.shape)
        shape[inputs[-1]] = shape[inputs[-1]] * form.grid.bits // 8
        one = piece.from_hf(pack_rows(stored.codes(rows), form.grid.bits), tuple(shape))
        merged = WeightPiece(path, (tuple(dim - contract + 1 for dim in outputs), (0,)))
        params = stored.params(rows)
        of_groups = (params[0].shape[1], *(part.shape[dim] for dim in sorted(outputs)))
        if not all(np.isfinite(x.astype(np.float32)).all() for x in (*params, *stored.affine(rows))):
            raise HubError(f"{path} (row {part.at[0]}) has scales that are not finite; the file is damaged.")
        one_scales = np.stack([merged.from_hf(x, of_groups) for x in params])
        if not values.size:
            values = np.empty((*stack, *one.shape), one.dtype)
            scales = np.empty((*stack, *one_scales.shape), one_scales.dtype)
        values[part.at], scales[part.at] = one, one_scales
    return _placed(leaf, form, values, scales, len(stack), max(one.unit for one in whole), path)


def _place_rows(leaf: Any, stored: StoredCodes, path: str) -> PackedWeight:
    """Places an embedding or output matrix, whose rows have codes and parameters of their own."""
    form = stored.form(-1, 1)
    many = leaf.shape[0]
    spans = [slice(begin, min(begin + ROWS, many)) for begin in range(0, many, ROWS)]
    values = np.concatenate([pack_rows(stored.codes(rows), form.grid.bits) for rows in spans])
    scales = np.concatenate([np.stack(stored.params(rows), axis=1) for rows in spans])
    if not all(np.isfinite(x.astype(np.float32)).all() for rows in spans for x in stored.affine(rows)):
        raise HubError(f"{path} has scales that are not finite; the file is damaged.")
    return _placed(leaf, form, values, scales, 1, stored.unit, path)


def _placed(
    leaf: Any, form: CodeGroups, values: np.ndarray, scales: np.ndarray, first: int, unit: int, path: str
) -> PackedWeight:
    """A packed weight sharded as ``leaf``.

    Args:
        first: first dimension of its inputs.
        unit: inputs that devices cannot split.
    """
    mesh, spec = leaf.sharding.mesh, leaf.sharding.spec
    spec = (*spec, *(None,) * (len(leaf.shape) - len(spec)))
    placed = jax.sharding.NamedSharding(mesh, scale_spec(form, spec))
    split = leaf.shape[first] // leaf.sharding.shard_shape(leaf.shape)[first]
    inputs = math.prod(leaf.shape[first : first + form.contract])
    if split > 1 and form.group is None:  # every shard has the one scale of all inputs
        scales = np.repeat(scales, split, axis=first + 1)
    elif split > 1 and inputs % (split * unit):
        raise HubError(
            f"{path}: the mesh splits {inputs} inputs {split} ways, but {unit} of them share a "
            "scale; split them over fewer devices, or load the model plain."
        )
    return PackedWeight(
        jax.make_array_from_callback(values.shape, leaf.sharding, values.__getitem__),
        jax.make_array_from_callback(scales.shape, placed, scales.__getitem__),
        form,
    )


def _part_arrays(stored: QuantisedArrays, part: TensorPart) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    """Values, scales and block of a part, in the order of the model's dimensions."""
    if stored.block is not None:
        assert part.piece.groups == SWAPPED
        scales = np.asarray(stored.scales[:]).astype(np.float32)
        rows, columns = stored.block
        return np.asarray(stored.values[:]).T, scales.T, (columns, rows)
    rows = slice(part.begin, None, part.step)  # gate and up by turns
    values, scales = np.asarray(stored.values[:, rows]), np.asarray(stored.scales[:, rows])
    return values.reshape(*values.shape[:2], -1).swapaxes(1, 2), scales.swapaxes(1, 2), (MXFP4_GROUP, 1)
