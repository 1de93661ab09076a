"""Safetensors files: lazy, memory-mapped reading and streamed writing.

A tensor is a view of the mapped file, and only the bytes of the requested slices are read. The format is eight bytes of
header length, a JSON header (name -> dtype, shape, offsets), then the data
(https://github.com/huggingface/safetensors). bfloat16 and float8 come as ``ml_dtypes``.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from jaxllm.files import new_directory, release
from jaxllm.hub.errors import HubError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER = 100 * 2**20
MAX_DIMS, MAX_SIZE = 8, 2**60
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Progress = Callable[[str, int, int], None]
"""Progress callback, called with (item, done, total)."""


def open_file(file: Path) -> dict[str, np.ndarray]:
    """Every tensor of one file as a read-only view of the file; no value is read.

    Raises:
        HubError: not a safetensors file, damaged, or cut short; says how.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(8)
            length = int.from_bytes(head, "little")
            if len(head) < 8 or length > min(size - 8, MAX_HEADER):
                raise HubError(f"{file} is not a safetensors file: its first 8 bytes give no header length.")
            header = json.loads(stream.read(length))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or JSON nested without end
        if isinstance(error, HubError):
            raise
        raise HubError(f"{file} is not a safetensors file: its header is not JSON ({error}).") from error
    except OSError as error:
        raise HubError(f"{file} cannot be read: {error.strerror}.") from error
    if not isinstance(header, dict):
        raise HubError(f"{file} is not a safetensors file: its header is not a JSON object.")
    header.pop("__metadata__", None)
    start = 8 + length
    data = np.memmap(file, np.uint8, "r", offset=start) if size > start else np.empty(0, np.uint8)
    spans = {name: _span(name, entry, len(data), file) for name, entry in header.items()}
    _check_cover(spans, len(data), file)
    return {n: data[begin:end].view(dtype).reshape(shape) for n, (dtype, shape, begin, end) in spans.items()}


def _span(name: str, entry: Any, size: int, file: Path) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """Dtype and shape of a tensor, and where it begins and ends in the data."""

    def count(value: Any) -> bool:
        return type(value) is int and value >= 0

    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise HubError(f"{file}: the header's entry for {name!r} is damaged: {str(entry)[:80]}.")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise HubError(f"{file}: {name} has dtype {dtype!r}; known: {', '.join(DTYPES)}.")
    counts = isinstance(shape, list) and len(shape) <= MAX_DIMS and all(map(count, shape))
    if not counts or math.prod(max(1, n) for n in shape) > MAX_SIZE:
        raise HubError(f"{file}: {name} has shape {str(shape)[:80]}; legal: a list of at most {MAX_DIMS} counts.")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(count, offsets)) or offsets[0] > offsets[1]:
        raise HubError(f"{file}: {name} has data_offsets {str(offsets)[:80]}; legal: [begin, end].")
    begin, end = offsets
    if end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise HubError(f"{file}: {name} has {end - begin} bytes, but {dtype}{shape} needs another number.")
    if end > size:
        raise HubError(f"{file} is cut short: {name} ends at byte {end} of the data, the file has {size}.")
    return DTYPES[dtype], tuple(shape), begin, end


def _check_cover(spans: Mapping[str, tuple[Any, Any, int, int]], size: int, file: Path) -> None:
    """Checks that tensors lie one after another without gaps, as the format requires."""
    at, before = 0, "the header"
    for name, (_, _, begin, end) in sorted(spans.items(), key=lambda item: item[1][2:]):
        if begin != at:
            what = "overlaps" if begin < at else "does not follow"
            raise HubError(f"{file} is damaged: {name} begins at byte {begin} of the data and {what} {before}.")
        at, before = end, name
    if at != size:
        raise HubError(f"{file} is damaged: {size - at} bytes after {before} belong to no tensor.")


def open_model(directory: Path) -> dict[str, np.ndarray]:
    """Every tensor of a model directory: one file, or shards with an index.

    Raises:
        HubError: no such files, a shard missing, or an index that does not match its shards.
    """
    index = directory / INDEX
    if not index.exists():
        if not (directory / SINGLE).exists():
            pickles = [f.name for f in (*directory.glob("*.bin"), *directory.glob("*.pt"), *directory.glob("*.pth"))]
            why = (
                f" It has {', '.join(pickles[:3])}: pickle files can run any code when opened and are refused; "
                "save the model with safe_serialization=True."
                if pickles
                else ""
            )
            raise HubError(f"{directory} has neither {SINGLE} nor {INDEX}.{why}")
        return open_file(directory / SINGLE)
    where = read_index(index)
    tensors: dict[str, np.ndarray] = {}
    for shard in sorted(set(where.values())):
        tensors |= open_shard(directory, shard, where, tensors)
    return tensors


def open_shard(
    directory: Path, shard: str, where: Mapping[str, str], others: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Tensors of one shard: all that the index lists there, and none of those in ``others``.

    Raises:
        HubError: it is missing, damaged, or does not match the index.
    """
    if not (directory / shard).exists():
        raise HubError(f"{directory} lacks the shard {shard}, which {INDEX} names; copy it there.")
    tensors = open_file(directory / shard)
    if twice := sorted(tensors.keys() & others.keys()):
        raise HubError(f"{directory / shard}: {twice[0]} is in an earlier shard too.")
    if missing := sorted(name for name, file in where.items() if file == shard and name not in tensors):
        raise HubError(f"{INDEX} promises {missing[0]} in {shard}, which does not have it.")
    return tensors


def read_index(index: Path) -> dict[str, str]:
    """Shard of every tensor, from the index file.

    Raises:
        HubError: it is damaged, or names a file outside the directory.
    """
    try:
        where = json.loads(index.read_text())["weight_map"]
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise HubError(f"{index} is damaged: {type(error).__name__}: {error}.") from error
    if not isinstance(where, dict) or not all(isinstance(shard, str) for shard in where.values()):
        raise HubError(f"{index} is damaged: weight_map is not an object of file names.")
    for shard in set(where.values()):
        if shard in ("", ".", "..") or "/" in shard or "\\" in shard or "\0" in shard:
            raise HubError(f"{index} names the shard {shard!r}; shards lie beside the index, nowhere else.")
    return where


@dataclass(frozen=True, eq=False)
class LazyTensor:
    """Lazy array: it is computed each time that it is converted, ``np.asarray(lazy)``."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.make(), dtype or self.dtype)


def write_model(directory: Path, tensors: Mapping[str, Any], files: Mapping[str, str], shard_bytes: int) -> None:
    """Writes a model directory: shards of at most ``shard_bytes``, an index, and small text files.

    Everything goes to a temporary directory beside it, which is renamed when complete.

    Args:
        tensors: arrays by name, or ``LazyTensor`` ones; each is made and released before the next.
        files: name -> text.

    Raises:
        HubError: the directory exists, or the disk refuses.
    """
    with hub_directory(directory) as temporary:
        write_shards(temporary, tensors, shard_bytes)
        for name, text in files.items():
            (temporary / name).write_text(text)


@contextlib.contextmanager
def hub_directory(directory: Path) -> Iterator[Path]:
    """``new_directory`` whose failures are raised as ``HubError``."""
    try:
        with new_directory(directory) as temporary:
            yield temporary
    except OSError as error:
        raise HubError(f"{directory} cannot be written: {error}.") from error


def write_shards(
    directory: Path, tensors: Mapping[str, Any], shard_bytes: int, progress: Progress | None = None
) -> None:
    """Writes the tensors in the order of their names, one in memory at a time.

    Args:
        shard_bytes: of a file's tensors at most, unless it holds one only.
        progress: called for every tensor.
    """
    shards: list[dict[str, int]] = [{}]
    for name in sorted(tensors):
        size = math.prod(tensors[name].shape) * tensors[name].dtype.itemsize
        if shards[-1] and sum(shards[-1].values()) + size > shard_bytes:
            shards.append({})
        shards[-1][name] = size
    count, done = len(shards), 0
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        where |= dict.fromkeys(shard, file)
        with (directory / file).open("wb") as out:
            out.write(_header({name: tensors[name] for name in shard}))
            for name in shard:
                if progress is not None:
                    progress(name, done, len(tensors))
                array = np.asarray(tensors[name])
                _write(out, array, tensors[name])
                release([array])
                done += 1
    if count > 1:
        index = {"metadata": {"total_size": sum(sum(s.values()) for s in shards)}, "weight_map": where}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_file(file: Path, tensors: Mapping[str, Any]) -> None:
    """Writes tensors to one file, in the order of the library safetensors: wider dtypes first, then by name."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    with file.open("wb") as out:
        out.write(_header({name: tensors[name] for name in order}))
        for name in order:
            _write(out, np.asarray(tensors[name]), tensors[name])


def _header(tensors: Mapping[str, Any]) -> bytes:
    """The header of a file with these tensors, in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        span = [offset, offset := offset + math.prod(tensor.shape) * tensor.dtype.itemsize]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of eight bytes
    return len(text).to_bytes(8, "little") + text


def _write(out: BinaryIO, array: np.ndarray, promised: Any) -> None:
    assert (array.shape, array.dtype) == (tuple(promised.shape), promised.dtype), (array.shape, array.dtype)
    out.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
