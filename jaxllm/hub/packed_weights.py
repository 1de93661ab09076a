"""Packed weights of checkpoints: quantised matrices, placed on a mesh as they are stored instead of dequantised.

Experts in block-FP8 or MXFP4, and any matrix in integer codes.

Legend: E experts, O rows of the matrix as stored, I columns, G groups of 32 columns; matrices of the model are [I, O].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np

from jaxllm.hub.compressed_tensors import PackedMatrix
from jaxllm.hub.errors import HubError
from jaxllm.hub.quantised_checkpoints import E8M0_NAN, MXFP4_GROUP, DequantisedTensor, QuantisedArrays
from jaxllm.hub.weight_mapping import SWAPPED, TensorPart, WeightPiece
from jaxllm.models import PackedWeight
from jaxllm.quant.formats.block_float8 import BlockFloat8
from jaxllm.quant.formats.code_groups import WORDS, CodeGroups
from jaxllm.quant.formats.mxfp4 import MXFP4
from jaxllm.quant.grids import IntGrid

EXPERTS = ("mlp/experts/gate", "mlp/experts/up", "mlp/experts/down")


PackedOrPlain = Literal["plain", "packed"]


def packed_leaf_paths(sources: Mapping[str, list[tuple[Any, TensorPart]]]) -> set[str]:
    """Paths of the leaves that can stay packed, made of quantised tensors alone.

    Raises:
        HubError: there is none.
    """

    def stays(path: str, tensor: Any, part: TensorPart) -> bool:
        if not isinstance(tensor, DequantisedTensor) or tensor.stored is None:
            return False
        if isinstance(tensor.stored, PackedMatrix):
            return _packs(tensor.stored, part)
        return path.endswith(EXPERTS)

    kept = {path for path, parts in sources.items() if all(stays(path, *source) for source in parts)}
    if not kept:
        raise HubError("no weights of this model are quantised, so that none can stay packed; load it plain.")
    return kept


def place_packed(leaf: Any, sources: list[tuple[Any, TensorPart]], path: str) -> PackedWeight:
    """Places a packed leaf of experts on the devices that ``leaf`` is for, sharded as the dense weight would be.

    Raises:
        HubError: a value is not finite, or values that share a scale would lie in two shards.
    """
    stack = leaf.shape[: len(sources[0][1].at)]
    if isinstance(sources[0][0].stored, PackedMatrix):
        return _place_integers(leaf, stack, sources, path)
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


def _packs(stored: PackedMatrix, part: TensorPart) -> bool:
    """Whether a matrix's codes can be cut into whole bytes along the last of its inputs."""
    inputs = part.piece.groups[1] if len(part.piece.groups) == 2 else ()
    bits = stored.scheme.bits
    if not inputs or inputs != tuple(range(len(inputs))) or part.axis or part.step != 1 or bits not in WORDS:
        return False
    return part.shape[inputs[-1]] % WORDS[bits][0] == 0


def _place_integers(
    leaf: Any, stack: tuple[int, ...], sources: list[tuple[Any, TensorPart]], path: str
) -> PackedWeight:
    """Places integer codes: the bytes of the file, in the order of the model's dimensions."""
    schemes = {tensor.stored.scheme for tensor, _ in sources}
    if len({(one.bits, one.group, one.symmetric) for one in schemes}) > 1:
        raise HubError(f"{path}: its layers have codes of several kinds; load the model plain.")
    scheme = next(iter(schemes))
    values = scales = np.empty(0)
    contract = 1
    for tensor, part in sources:
        stored, piece = tensor.stored, part.piece
        outputs, inputs = piece.groups
        contract, last = len(inputs), inputs[-1]
        rows = slice(part.begin, part.begin + math.prod(part.shape[dim] for dim in outputs))
        words = np.ascontiguousarray(np.asarray(stored.packed[rows])).view(np.uint8)
        shape = list(part.shape)
        shape[last] = shape[last] * scheme.bits // 8
        data = words[:, : math.prod(shape[dim] for dim in inputs)]
        one = piece.from_hf(data, tuple(shape))
        merged = WeightPiece(path, (tuple(dim - contract + 1 for dim in outputs), (0,)))
        of_groups = (stored.scale.shape[1], *(part.shape[dim] for dim in sorted(outputs)))
        params = [np.asarray(stored.scale[rows])]
        if not scheme.symmetric:
            params.append(stored.zeros(rows).astype(params[0].dtype))
        if not np.isfinite(params[0].astype(np.float32)).all():
            raise HubError(f"{path} (row {part.at[0]}) has scales that are not finite; the file is damaged.")
        one_scales = np.stack([merged.from_hf(x, of_groups) for x in params])
        if not values.size:
            values = np.empty((*stack, *one.shape), one.dtype)
            scales = np.empty((*stack, *one_scales.shape), one_scales.dtype)
        values[part.at], scales[part.at] = one, one_scales
    first = len(stack)
    form = CodeGroups(
        IntGrid(scheme.bits, scheme.symmetric), scheme.group, first + contract - 1 - len(leaf.shape), contract
    )
    mesh, spec = leaf.sharding.mesh, leaf.sharding.spec
    spec = (*spec, *(None,) * (len(leaf.shape) - len(spec)))
    placed = jax.sharding.NamedSharding(mesh, jax.P(*form.scale_axes(spec)))
    split = leaf.shape[first] // leaf.sharding.shard_shape(leaf.shape)[first]
    inputs = math.prod(leaf.shape[first : first + contract])
    if split > 1 and inputs % (split * (scheme.group or inputs)):
        raise HubError(
            f"{path}: the mesh splits {inputs} inputs {split} ways, but {scheme.group or inputs} of them share a "
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
