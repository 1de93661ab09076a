"""Safetensors files, read in place and written whole.

Reading maps the file: a tensor is a view, and only the bytes of the slices that are asked for are read. The format is
eight bytes of header length, a JSON header (name -> dtype, shape, offsets), then the data
(https://github.com/huggingface/safetensors). bfloat16 and float8 come as ``ml_dtypes``.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.hub.errors import HubError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def open_file(file: Path) -> dict[str, np.ndarray]:
    """Every tensor of one file as a read-only view of the file.

    Raises:
        HubError: not a safetensors file, or cut short; says by how much.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(8)
            length = int.from_bytes(head, "little")
            if len(head) < 8 or length > min(size - 8, 100 * 2**20):
                raise HubError(f"{file} is not a safetensors file: its first 8 bytes give no header length.")
            header = json.loads(stream.read(length))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise HubError(f"{file} is not a safetensors file: its header is not JSON ({error}).") from error
    except OSError as error:
        raise HubError(f"{file} cannot be read: {error.strerror}.") from error
    header.pop("__metadata__", None)
    start = 8 + length
    data = np.memmap(file, np.uint8, "r", offset=start) if size > start else np.empty(0, np.uint8)
    return {name: _view(data, name, entry, file) for name, entry in header.items()}


def release(tensors: Mapping[str, Any]) -> None:
    """Lets the system take back the pages of mapped files that were read; they are read again when they are needed.

    Otherwise every byte of a file that was ever looked at counts as memory of this process.
    """
    maps = {id(m): m for tensor in tensors.values() if (m := _map_under(tensor)) is not None}
    for mapped in maps.values():
        mapped.madvise(mmap.MADV_DONTNEED)


def _map_under(array: Any) -> mmap.mmap | None:
    while isinstance(array, np.ndarray):
        array = array.base
    return array if isinstance(array, mmap.mmap) else None


def _view(data: np.ndarray, name: str, entry: Mapping[str, Any], file: Path) -> np.ndarray:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise HubError(f"{file}: the header's entry for {name} is damaged ({error}).") from error
    if dtype not in DTYPES:
        raise HubError(f"{file}: {name} has dtype {dtype}; known: {', '.join(DTYPES)}.")
    if end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise HubError(f"{file}: {name} has {end - begin} bytes, but {dtype}{list(shape)} needs another number.")
    if end > data.size:
        raise HubError(f"{file} is cut short: {name} ends at byte {end} of the data, the file has {data.size}.")
    return data[begin:end].view(DTYPES[dtype]).reshape(shape)


def open_model(directory: Path) -> dict[str, np.ndarray]:
    """Every tensor of a model's directory: one file, or shards with an index.

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
    try:
        where: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (OSError, KeyError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise HubError(f"{index} is damaged: {error}.") from error
    tensors: dict[str, np.ndarray] = {}
    for shard in sorted(set(where.values())):
        if not (directory / shard).exists():
            raise HubError(f"{directory} lacks the shard {shard}, which {INDEX} names; copy it there.")
        tensors |= open_file(directory / shard)
    if missing := sorted(set(where) - set(tensors)):
        raise HubError(f"{INDEX} promises {missing[0]} in {where[missing[0]]}, which does not have it.")
    return tensors


def write_model(
    directory: Path, tensors: Iterable[tuple[str, np.ndarray]], files: Mapping[str, str], shard_bytes: int
) -> None:
    """Writes a model's directory: shards of at most ``shard_bytes``, an index, and small text files.

    Everything goes to a temporary directory beside it, renamed when complete.

    Args:
        tensors: (name, array) one after another; each is let go before the next is asked for.
        files: name -> text.

    Raises:
        HubError: the directory exists, or the disk refuses.
    """
    if directory.exists():
        raise HubError(f"{directory} exists; choose another, or move it away.")
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        shards = list(_write_shards(temporary, tensors, shard_bytes))
        _name_shards(temporary, shards)
        for name, text in files.items():
            (temporary / name).write_text(text)
        temporary.rename(directory)
    except OSError as error:
        raise HubError(f"writing {directory} failed: {error}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_shards(
    directory: Path, tensors: Iterable[tuple[str, np.ndarray]], shard_bytes: int
) -> Iterator[dict[str, int]]:
    """Writes ``part-N`` files; yields name -> bytes of each."""
    held: dict[str, np.ndarray] = {}
    number = 0
    for name, array in tensors:
        if held and sum(a.nbytes for a in held.values()) + array.nbytes > shard_bytes:
            _write_file(directory / f"part-{number}", held)
            yield {n: a.nbytes for n, a in held.items()}
            held, number = {}, number + 1
        held[name] = np.ascontiguousarray(array)
    _write_file(directory / f"part-{number}", held)
    yield {n: a.nbytes for n, a in held.items()}


def _write_file(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in sorted(tensors.items()):
        span = [offset, offset := offset + array.nbytes]
        header[name] = {"dtype": NAMES[array.dtype], "shape": list(array.shape), "data_offsets": span}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of eight bytes
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, array in sorted(tensors.items()):
            out.write(array.reshape(-1).view(np.uint8).data)


def _name_shards(directory: Path, shards: list[dict[str, int]]) -> None:
    if len(shards) == 1:
        (directory / "part-0").rename(directory / SINGLE)
        return
    where = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"part-{i}").rename(directory / name)
        where |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": sum(map(sum, (s.values() for s in shards)))}, "weight_map": where}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
