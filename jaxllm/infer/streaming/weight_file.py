"""Weight file: arrays one after another in the form in which the device has them, so that one read fills a buffer.

What somebody changed, damaged or removed is an error that names the file. Files are read and not mapped: an error of
the disk would end the process instead of a step (docs/decisions/0020).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import UInt8

from jaxllm.files import atomic

ALIGNMENT = 64
"""Bytes that arrays in a file are aligned to, with which the CPU backend uses them without a copy."""
READ_ATTEMPTS = 3
"""Attempts to read a file before the step fails."""


class TierUnavailableError(OSError):
    """Weights or a KV cache that cannot be read from a tier, or written to it; says where, and why.

    Attributes:
        code: what it is, as servers answer.
    """

    code = "tier_unavailable"


class WeightsUnavailableError(TierUnavailableError):
    """The weights of a layer cannot be read."""

    code = "weights_unavailable"


class CacheUnavailableError(TierUnavailableError):
    """A part of the KV cache cannot be read, or not be written."""

    code = "kv_cache_unavailable"


def read_bytes(
    path: Path, state: Sequence[int], what: str, checksum: int | None, begin: int = 0, size: int | None = None
) -> UInt8[np.ndarray, " n"]:
    """Bytes of a file, at an aligned address.

    Args:
        path: the file.
        state: its ``file_state`` when it was written.
        what: what the bytes are, for errors.
        checksum: of the bytes; None: they have been checked before.
        begin, size: part of the file; None: all of it.

    Raises:
        WeightsUnavailableError: it cannot be read, was changed, or is damaged.
    """
    size = state[0] if size is None else size
    changed, read, buffer = False, 0, _aligned(0)
    for attempt in range(READ_ATTEMPTS):
        try:
            changed = file_state(path) != list(state)
            buffer = _aligned(0 if changed else size)
            with path.open("rb", buffering=0) as stream:
                stream.seek(begin)
                read = 0
                while read < len(buffer) and (more := stream.readinto(buffer.data[read:])):
                    read += more
            break
        except OSError as error:
            if attempt + 1 == READ_ATTEMPTS:
                raise WeightsUnavailableError(
                    f"{path} ({what}) cannot be read: {error}. Check the disk; files that are missing "
                    "are written anew when the model is loaded again."
                ) from error
    if changed or read < size:
        raise WeightsUnavailableError(
            f"{path} ({what}) was changed while the model is in use; the file is written anew when the "
            "model is loaded again."
        )
    if checksum is not None and zlib.crc32(buffer.data) != checksum:
        raise WeightsUnavailableError(
            f"{path} ({what}) is damaged: its checksum differs. Remove it; it is written anew when "
            "the model is loaded again."
        )
    return buffer


def arrays_of(buffer: UInt8[np.ndarray, " n"], template: Any) -> Any:
    """Tree of arrays, views of bytes that ``write_arrays`` has written.

    Args:
        template: the tree, of ``jax.ShapeDtypeStruct``.
    """
    leaves, begin = [], 0
    for leaf in jax.tree.leaves(template):
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        leaves.append(buffer[begin : begin + size].view(leaf.dtype).reshape(leaf.shape))
        begin += _padded(size)
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def write_arrays(path: Path, trees: Sequence[Any]) -> list[int]:
    """Writes trees one after another, each array padded; returns the checksum of each tree."""
    checksums = []
    with atomic(path) as file:
        for tree in trees:
            checksum = 0
            for leaf in jax.tree.leaves(tree):
                data = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
                for piece in (data, np.zeros(_padded(data.size) - data.size, np.uint8)):
                    file.write(piece.data)
                    checksum = zlib.crc32(piece.data, checksum)
            checksums.append(checksum)
    return checksums


def bytes_in_file(template: Any) -> int:
    """Bytes that a tree of arrays, or of their shapes, has in a file."""
    return sum(_padded(math.prod(leaf.shape) * leaf.dtype.itemsize) for leaf in jax.tree.leaves(template))


def file_state(path: Path) -> list[int]:
    """Size and time of change of a file, which tell whether somebody has changed it."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def described(template: Any) -> list[Any]:
    """Structure, shapes and dtypes of a tree, as a JSON value."""
    return [str(jax.tree.structure(template)), *([list(x.shape), str(x.dtype)] for x in jax.tree.leaves(template))]


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _aligned(size: int) -> np.ndarray:
    """Empty bytes whose address is aligned."""
    buffer = np.empty(size + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + size]
