"""Writing the arrays of a checkpoint, hashed before they are written: of a state in memory, or of one in pieces."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jaxllm.checkpoint import store
from jaxllm.checkpoint.manifest import LeafRecord, hash_array, hash_bytes, hash_pieces
from jaxllm.checkpoint.reader import HASHERS
from jaxllm.checkpoint.tree import HostLeaf


@dataclasses.dataclass(frozen=True)
class StreamedLeaf:
    """A leaf that need not be in memory as a whole.

    pieces: its values, one after another in C order, in pieces of any size.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: Iterable[np.ndarray]


def write_snapshot(leaves: Mapping[str, HostLeaf], checkpoint: Path) -> dict[str, LeafRecord]:
    """Hashes and writes a state that is in host memory, and returns when it is on disk."""
    with concurrent.futures.ThreadPoolExecutor(HASHERS) as pool:
        hashes = list(pool.map(lambda leaf: hash_array(leaf.array), leaves.values()))
    store.write_arrays(checkpoint, {p: leaf.array for p, leaf in leaves.items()})
    return {
        p: LeafRecord(leaf.shape, leaf.dtype, digest, leaf.key_impl)
        for (p, leaf), digest in zip(leaves.items(), hashes, strict=True)
    }


def write_streamed(leaves: Mapping[str, StreamedLeaf], checkpoint: Path) -> dict[str, LeafRecord]:
    """Writes the same files for the same values, holding one piece at a time, and returns when they are on disk.

    Orbax makes the tree with one element a leaf, so every file is as it makes them; then each leaf gets its shape, and
    its one chunk its bytes.

    Raises:
        ValueError: the pieces of a leaf are not of its type, or too few or too many.
    """
    small = {p: np.zeros([min(1, n) for n in leaf.shape], leaf.dtype) for p, leaf in leaves.items()}
    store.write_arrays(checkpoint, small)
    records = {}
    for path, leaf in leaves.items():
        record = LeafRecord(tuple(leaf.shape), str(leaf.dtype), hash_bytes(b""))
        if not record.empty:
            with _chunk(checkpoint, path, leaf.shape) as out:
                record = dataclasses.replace(record, hash=hash_pieces(_written(out, path, leaf)))
                out.flush()
                os.fsync(out.fileno())
        records[path] = record
    return records


def _written(out: BinaryIO, path: str, leaf: StreamedLeaf) -> Iterator[memoryview]:
    """Writes the pieces; gives their bytes on."""
    for piece in leaf.pieces:
        if piece.dtype != leaf.dtype:
            raise ValueError(f"leaf {path} is {leaf.dtype}, and a piece of it is {piece.dtype}.")
        data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
        out.write(data)
        yield data
    if out.tell() != (size := math.prod(leaf.shape) * leaf.dtype.itemsize):
        raise ValueError(f"leaf {path} has {size} bytes, and its pieces have {out.tell()}.")


def _chunk(checkpoint: Path, path: str, shape: tuple[int, ...]) -> BinaryIO:
    """Gives a leaf of one element its shape, and opens its chunk to be written."""
    return reshape(checkpoint, path, shape, shape).open("wb")


def reshape(checkpoint: Path, path: str, shape: tuple[int, ...], chunk: tuple[int, ...]) -> Path:
    """Gives a leaf that Orbax wrote with one element its real shape, in chunks; returns the file of its one chunk."""
    folder = checkpoint / store.leaf_folder(path)
    head = folder / ".zarray"
    about = json.loads(head.read_text())
    head.write_text(json.dumps(about | {"shape": shape, "chunks": chunk}, separators=(",", ":")))
    (file,) = (file for file in folder.iterdir() if file != head)
    return file
