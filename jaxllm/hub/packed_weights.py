"""Packed experts: quantised expert weights, placed on a mesh as they are stored instead of dequantised.

Legend: E experts, O rows of the matrix as stored, I columns, G groups of 32 columns; matrices of the model are [I, O].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np

from jaxllm.hub.errors import HubError
from jaxllm.hub.quantised_checkpoints import E8M0_NAN, MXFP4_GROUP, DequantisedTensor, QuantisedArrays
from jaxllm.hub.weight_mapping import SWAPPED, TensorPart
from jaxllm.models import PackedWeight
from jaxllm.quant.formats.block_float8 import BlockFloat8
from jaxllm.quant.formats.mxfp4 import MXFP4

EXPERTS = ("mlp/experts/gate", "mlp/experts/up", "mlp/experts/down")


PackedOrPlain = Literal["plain", "packed"]


def packed_leaf_paths(sources: Mapping[str, list[tuple[Any, TensorPart]]]) -> set[str]:
    """Paths of the expert leaves that are made of quantised tensors alone.

    Raises:
        HubError: there is none.
    """
    kept = {
        path
        for path, parts in sources.items()
        if path.endswith(EXPERTS) and all(isinstance(t, DequantisedTensor) and t.stored is not None for t, _ in parts)
    }
    if not kept:
        raise HubError("no experts of this model are quantised, so that none can stay packed; load it plain.")
    return kept


def place_packed(leaf: Any, sources: list[tuple[Any, TensorPart]], path: str) -> PackedWeight:
    """Places a packed leaf of experts on the devices that ``leaf`` is for, sharded as the dense weight would be.

    Raises:
        HubError: a value is not finite, or values that share a scale would lie in two shards.
    """
    stack = leaf.shape[: len(sources[0][1].at)]
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
