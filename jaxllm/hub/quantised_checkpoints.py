"""Quantised checkpoints: tensors in FP8 blocks, MXFP4 or integer codes, dequantised lazily where they are read.

Formats, by ``quantization_config`` in ``config.json``:

- ``fp8`` with block scales (DeepSeek-V3, arXiv:2412.19437, section 3.3): float8 e4m3 values [O, I], and for each block
  of 128 x 128 of them a float32 scale in ``NAME_scale_inv``.
- ``mxfp4`` (gpt-oss; OCP Microscaling Formats 1.0): 32 four-bit values, e2m1, two to a byte with the first in the low
  half, share a power of two (e8m0). ``NAME_blocks`` [E, O, G, 16] and ``NAME_scales`` [E, O, G] are NAME [E, 32 G, O].
- ``gptq`` and ``awq``: integer codes, see ``jaxllm.hub.gptq_awq``.
- ``compressed-tensors``: integer codes of 2 to 8 bits with scales of groups, see ``jaxllm.hub.compressed_tensors``.
- ``bitsandbytes``: int8 with a scale for each row, see ``jaxllm.hub.bitsandbytes``.
- ``lookup-table``: levels of a table times scales of groups, see ``jaxllm.hub.lookup_codes``.

Legend: E experts, O rows of the matrix as stored, I columns, G groups of 32 columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from jaxllm.hub.bitsandbytes import BITSANDBYTES, Int8Rows, int8_rows
from jaxllm.hub.compressed_tensors import METHOD, PackedMatrix, packed_matrices
from jaxllm.hub.errors import HubError
from jaxllm.hub.float_codes import ValueCodes
from jaxllm.hub.gptq_awq import ColumnCodes, column_codes
from jaxllm.hub.lookup_codes import LOOKUP_METHOD, LookupCodes, lookup_codes

CONFIG_KEY = "quantization_config"
SCALE = "_scale_inv"
BLOCKS, SCALES = "_blocks", "_scales"
MXFP4_GROUP = 32
"""Number of values that share a scale in MXFP4."""
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E8M0_NAN, E8M0_BIAS = 255, 127

Index = tuple[slice, ...]


@dataclass(frozen=True, eq=False)
class QuantisedArrays:
    """Stored arrays of a quantised tensor, as they are in the file.

    Attributes:
        values, scales: arrays in the layout that the module describes.
        block: rows and columns of an FP8 block; None for MXFP4.
    """

    values: Any
    scales: Any
    block: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class DequantisedTensor:
    """Lazy float32 tensor that is dequantised slice by slice.

    Attributes:
        shape: shape of the dequantised tensor.
        read: returns a part of it; takes one slice for each dimension.
        stored: the stored arrays.
    """

    shape: tuple[int, ...]
    read: Callable[[Index], np.ndarray]
    stored: QuantisedArrays | PackedMatrix | ColumnCodes | ValueCodes | LookupCodes | Int8Rows | None = None

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the dequantised values."""
        return np.dtype(np.float32)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: slice | Index) -> np.ndarray:
        given = index if isinstance(index, tuple) else (index,)
        return self.read((*given, *(slice(None),) * (len(self.shape) - len(given))))

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("a quantised tensor is made as it is read; it cannot be a view.")
        return self[:].astype(dtype or self.dtype, copy=False)


def without_quantisation(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """The ``config.json`` of the dequantised model.

    Raises:
        HubError: an unknown kind of quantisation; names the known ones.
    """
    given = source.get(CONFIG_KEY)
    if given is None:
        return source
    kind = given.get("quant_method") if isinstance(given, Mapping) else None
    if kind not in KINDS:
        raise HubError(f"config.json: {CONFIG_KEY} has quant_method {kind!r}; known: {', '.join(sorted(KINDS))}.")
    return {name: value for name, value in source.items() if name != CONFIG_KEY}


def dequantise_tensors(source: Mapping[str, Any], tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Tensors of a model with this ``config.json`` under the names of the plain model.

    Raises:
        HubError: scales are missing or of another shape, or a quantised tensor has none.
    """
    given = source.get(CONFIG_KEY)
    return tensors if given is None else KINDS[given["quant_method"]](given, tensors)


def _fp8(given: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    block = given.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise HubError(f"config.json: {CONFIG_KEY} has weight_block_size = {block!r}; legal: two positive numbers.")
    out: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALE) and name.removesuffix(SCALE) in tensors:
            continue
        scale = tensors.get(name + SCALE)
        if scale is not None:
            out[name] = fp8_tensor(name, tensor, scale, (block[0], block[1]))
        elif str(tensor.dtype).startswith("float8"):
            raise HubError(f"{name} is in float8, and there is no {name}{SCALE} beside it.")
        else:
            out[name] = tensor
    return out


def fp8_tensor(name: str, tensor: Any, scale: Any, block: tuple[int, int]) -> DequantisedTensor:
    """Dequantises an FP8 matrix with the scales of its blocks; the last blocks may be cut short.

    Raises:
        HubError: not a matrix of float8, or not one scale for each block.
    """
    shape = tuple(tensor.shape)
    if len(shape) != 2 or not str(tensor.dtype).startswith("float8"):
        raise HubError(f"{name} has scales of blocks; it is {tensor.dtype}{list(shape)} and not a matrix in float8.")
    wanted = tuple(-(-size // each) for size, each in zip(shape, block, strict=True))
    if tuple(scale.shape) != wanted:
        raise HubError(f"{name}{SCALE} has shape {list(scale.shape)}; blocks of {list(block)} make it {list(wanted)}.")

    def read(index: Index) -> np.ndarray:
        rows, columns = (np.arange(size)[part] // each for size, part, each in zip(shape, index, block, strict=True))
        scales = np.asarray(scale[:]).astype(np.float32)[np.ix_(rows, columns)]
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(tensor[index]).astype(np.float32) * scales

    return DequantisedTensor(shape, read, QuantisedArrays(tensor, scale, block))


def _mxfp4(given: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name.endswith(BLOCKS):
            whole = name.removesuffix(BLOCKS)
            if (scales := tensors.get(whole + SCALES)) is None:
                raise HubError(f"{name} is there, and no {whole}{SCALES}.")
            out[whole] = mxfp4_tensor(whole, tensor, scales)
        elif not (name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in tensors):
            out[name] = tensor
    return out


def mxfp4_tensor(name: str, blocks: Any, scales: Any) -> DequantisedTensor:
    """Dequantises stacked MXFP4 matrices, transposed as gpt-oss stores them.

    Raises:
        HubError: not bytes of these shapes.
    """
    shape = tuple(blocks.shape)
    bytes_ = blocks.dtype == np.uint8 and scales.dtype == np.uint8
    if not bytes_ or len(shape) != 4 or shape[3] * 2 != MXFP4_GROUP or tuple(scales.shape) != shape[:3]:
        raise HubError(
            f"{name}{BLOCKS} is {blocks.dtype}{list(shape)}, {name}{SCALES} {scales.dtype}{list(scales.shape)}; "
            "MXFP4 has bytes [E, O, G, 16] and [E, O, G]."
        )
    experts, rows, groups, _ = shape

    def read(index: Index) -> np.ndarray:
        of_expert, of_column, of_row = index
        part = np.asarray(blocks[of_expert, of_row])
        values = decode_mxfp4(part, np.asarray(scales[of_expert, of_row]))
        return values.reshape(*part.shape[:2], groups * MXFP4_GROUP)[:, :, of_column].swapaxes(1, 2)

    return DequantisedTensor((experts, groups * MXFP4_GROUP, rows), read, QuantisedArrays(blocks, scales))


def decode_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decodes MXFP4: float32[..., G, 32] from bytes [..., G, 16] and scales [..., G]; a scale of 255 is NaN."""
    values = np.stack([E2M1[blocks & 15], E2M1[blocks >> 4]], axis=-1).reshape(*blocks.shape[:-1], MXFP4_GROUP)
    with np.errstate(over="ignore"):
        values = np.ldexp(values, scales.astype(np.int32)[..., None] - E8M0_BIAS)
    return np.where(scales[..., None] == E8M0_NAN, np.float32(np.nan), values)


def _integers(given: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    readers = {METHOD: packed_matrices, LOOKUP_METHOD: lookup_codes, BITSANDBYTES: int8_rows}
    read = readers.get(given["quant_method"], column_codes)
    return {
        name: DequantisedTensor(one.shape, lambda index, one=one: one.dense(*index), one)
        if isinstance(one, PackedMatrix | ColumnCodes | ValueCodes | LookupCodes | Int8Rows)
        else one
        for name, one in read(given, tensors).items()
    }


KINDS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    METHOD: _integers,
    "gptq": _integers,
    "awq": _integers,
    LOOKUP_METHOD: _integers,
    BITSANDBYTES: _integers,
}
