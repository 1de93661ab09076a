"""Weight file: arrays one after another in the form in which the device has them, so that one read fills a buffer.

What somebody changed, damaged or removed is an error that names the file. Files are read and not mapped: an error of
the disk would end the process instead of a step (docs/decisions/0020).
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
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
BLOCK = 4096
"""Bytes that addresses and offsets of direct reads are multiples of."""
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
    path: Path,
    state: Sequence[int],
    what: str,
    checksum: int | None,
    begin: int = 0,
    size: int | None = None,
    *,
    direct: bool = False,
) -> UInt8[np.ndarray, " n"]:
    """Bytes of a file, at an aligned address.

    Args:
        path: the file.
        state: its ``file_state`` when it was written.
        what: what the bytes are, for errors.
        checksum: of the bytes; None: they have been checked before.
        begin, size: part of the file; None: all of it. It begins at a multiple of ``ALIGNMENT``.
        direct: past the page cache, where the file's system can do that: reading takes less of the processor, and does
            not drive out what the cache has; but what is read again soon is read from the disk again.

    Raises:
        WeightsUnavailableError: it cannot be read, was changed, or is damaged.
    """
    size = state[0] if size is None else size
    changed, buffer = False, _aligned(0)
    for attempt in range(READ_ATTEMPTS):
        try:
            changed = file_state(path) != list(state)
            buffer = _bytes_of(path, begin, 0 if changed else size, direct)
            changed = changed or file_state(path) != list(state)  # while it was read
            break
        except OSError as error:
            if attempt + 1 == READ_ATTEMPTS:
                raise WeightsUnavailableError(
                    f"{path} ({what}) cannot be read: {error}. Check the disk; files that are missing "
                    "are written anew when the model is loaded again."
                ) from error
        except MemoryError as error:
            raise WeightsUnavailableError(
                f"{path} ({what}) cannot be read: the host has no memory for its {size} bytes. Give a smaller "
                "window or fewer loaders."
            ) from error
    if changed or len(buffer) < size:
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


def _bytes_of(path: Path, begin: int, size: int, direct: bool) -> np.ndarray:
    """Bytes of a file, at an aligned address; fewer where it ends."""
    first = begin // BLOCK * BLOCK if direct else begin
    skipped = begin - first
    buffer = _aligned(_padded(skipped + size, BLOCK) if direct else size)
    handle, read = _opened(path, direct), 0
    try:
        while read < skipped + size and (more := os.preadv(handle, [buffer.data[read:]], first + read)):
            read += more
    except OSError as error:
        if direct and error.errno == errno.EINVAL:  # the disk has larger blocks
            return _bytes_of(path, begin, size, False)
        raise
    finally:
        os.close(handle)
    return buffer[skipped : min(read, skipped + size)]


def _opened(path: Path, direct: bool) -> int:
    """File descriptor; buffered where the file's system has no direct reads, such as one in memory."""
    if direct and hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):
            return os.open(path, os.O_RDONLY | os.O_DIRECT)
    return os.open(path, os.O_RDONLY)


def _padded(size: int, to: int = ALIGNMENT) -> int:
    return -(-size // to) * to


def _aligned(size: int) -> np.ndarray:
    """Empty bytes whose address is a multiple of ``BLOCK``."""
    buffer = np.empty(size + BLOCK, np.uint8)
    start = -buffer.ctypes.data % BLOCK
    return buffer[start : start + size]
