"""State file: an unnamed file of parts with checksums, written and read without the page cache where that is possible.

The file has no name from the beginning (O_TMPFILE), so the system frees it when the last reference to it is gone, also
after SIGKILL: no later start can find it and take it for a checkpoint. Where a file system has no O_TMPFILE, the file
is made with a name, which is removed before anything is written; a kill between the two leaves an empty file, which the
next start removes. Its contents are worth nothing without the process, so nothing is synced; a damaged part is found by
its checksum when it is read.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import os
import tempfile
import weakref
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

BLOCK = 4096
"""Bytes that offsets, lengths and addresses are multiples of, as direct I/O requires."""

PREFIX = "jaxllm-state-"
"""Names of files begin with it, where a file system has no O_TMPFILE, until the names are removed."""

SPARE_HANDLES = 64
"""Files that a process may open beside these, before its limit is raised."""


class DiskTierError(RuntimeError):
    """The files of the disk tier cannot be written or read, or are damaged; says which part, where, and what to do."""


class FileLayout:
    """Layout of a state file: parts of fixed sizes, each at a multiple of ``BLOCK``.

    Attributes:
        name: what the file has, for messages.
        labels: name of each part, for messages.
        sizes: bytes of each part.
        offsets: where each begins.
        size: bytes of the file.
    """

    def __init__(self, name: str, labels: Sequence[str], sizes: Sequence[int]):
        self.name, self.labels, self.sizes = name, tuple(labels), tuple(sizes)
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + padded(size))
        self.offsets, self.size = tuple(offsets[:-1]), offsets[-1]

    def part(self, buffer: np.ndarray, number: int) -> np.ndarray:
        """View of a part of a buffer with the contents of the file, [bytes] uint8."""
        return buffer[self.offsets[number] : self.offsets[number] + self.sizes[number]]


class StateFile:
    """Unnamed file with the parts of a layout.

    Args:
        directory: on the disk; the file's blocks are reserved at once.
        layout: of the file.

    Attributes:
        frozen: a checkpoint reads the file: it is not written any more.

    Raises:
        DiskTierError: the directory has no room or cannot be written.
    """

    def __init__(self, directory: Path, layout: FileLayout):
        self.directory, self.layout, self.frozen = directory, layout, False
        self._sums: list[int | None] = [None] * len(layout.sizes)
        try:
            self.handle = handle = unnamed_file(directory)
            weakref.finalize(self, os.close, handle)
            raise_open_files(handle)
            if layout.size and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, layout.size)
        except OSError as error:
            raise self._failed("reserving", error) from error
        bypass_page_cache(handle)

    def write(self, buffer: np.ndarray) -> None:
        """Writes all parts from an aligned buffer of ``layout.size`` bytes."""
        for number in range(len(self.layout.sizes)):
            self._sums[number] = zlib.crc32(self.layout.part(buffer, number).data)
        self._transfer("writing", buffer, 0)

    def read(self, buffer: np.ndarray, ranges: Sequence[tuple[int, int]] | None = None) -> None:
        """Reads all parts into an aligned buffer, and verifies them.

        Args:
            buffer: of ``layout.size`` bytes.
            ranges: (begin, end) of the bytes that are read, in whole blocks; the buffer has the others. None: all.
        """
        for begin, end in [(0, self.layout.size)] if ranges is None else ranges:
            self._transfer("reading", buffer[begin:end], begin)
        for number in range(len(self.layout.sizes)):
            self._verify(number, self.layout.part(buffer, number))

    def write_part(self, number: int, data: np.ndarray) -> None:
        """Writes one part, [bytes] uint8."""
        buffer = aligned_buffer(padded(data.size))
        buffer[: data.size] = data
        self._sums[number] = zlib.crc32(buffer[: data.size].data)
        self._transfer("writing", buffer, self.layout.offsets[number])

    def read_part(self, number: int) -> np.ndarray:
        """One part, verified, [bytes] uint8."""
        size = self.layout.sizes[number]
        buffer = aligned_buffer(padded(size))
        self._transfer("reading", buffer, self.layout.offsets[number])
        self._verify(number, buffer[:size])
        return buffer[:size]

    def _transfer(self, doing: Literal["reading", "writing"], buffer: np.ndarray, offset: int) -> None:
        rest = buffer.data.cast("B")
        while len(rest):
            try:
                if doing == "writing":
                    count = os.pwrite(self.handle, rest, offset)
                else:
                    count = os.preadv(self.handle, [rest], offset)
                if count <= 0:
                    raise OSError(f"the file ends {len(rest)} bytes early")
            except OSError as error:
                raise self._failed(doing, error, offset) from error
            rest, offset = rest[count:], offset + count

    def _verify(self, number: int, data: np.ndarray) -> None:
        if zlib.crc32(data.data) != self._sums[number]:
            raise DiskTierError(
                f"{self.layout.name}: {self.layout.labels[number]} is damaged in the files of "
                f"{self.directory}: its checksum is not that of what was written. Check the disk, or give another "
                "disk.directory."
            )

    def _failed(self, doing: str, error: OSError, offset: int | None = None) -> DiskTierError:
        """Error that names the layer, and the array at an offset of the file."""
        layout = self.layout
        label = "" if offset is None else f": {layout.labels[bisect.bisect_right(layout.offsets, offset) - 1]}"
        advice = "Give a disk.directory with room, on a disk that works."
        if error.errno in (errno.EMFILE, errno.ENFILE):
            advice = (
                "Each layer has a file, and with disk.activations each layer of each micro-batch: raise the limit of "
                "open files (`ulimit -n`, up to `ulimit -Hn`), or set accumulate or disk.activation_layers lower."
            )
        return DiskTierError(
            f"{layout.name}{label}: {doing} {layout.size} bytes in {self.directory} failed: {error}. {advice}"
        )


def unnamed_file(directory: Path) -> int:
    """Opens a new file without a name in a directory, for reading and writing; the handle.

    Raises:
        OSError: that fails.
    """
    if hasattr(os, "O_TMPFILE"):
        with contextlib.suppress(OSError):  # a file system without it; what else is wrong is said below
            return os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_EXCL, 0o600)
    handle, path = tempfile.mkstemp(prefix=PREFIX, dir=directory)
    with contextlib.suppress(FileNotFoundError):  # another process has removed the empty file
        os.unlink(path)
    return handle


def remove_leftovers(directory: Path) -> None:
    """Removes empty files that killed processes have left; one whose process is about to remove its name needs none."""
    for path in directory.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.stat().st_size == 0:
                path.unlink()


def raise_open_files(handle: int) -> None:
    """Raises this process's limit of open files towards the system's, when a new file's handle comes near to it."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or handle + SPARE_HANDLES < soft:
        return
    more = 2 * max(soft, SPARE_HANDLES)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (more if hard == resource.RLIM_INFINITY else min(more, hard), hard))


def bypass_page_cache(handle: int) -> None:
    """Turns on direct I/O for an open file, where its file system has it.

    The page cache would hold a second copy of the state, and buffered writes are slower by the copy into it.
    """
    if not hasattr(os, "O_DIRECT"):
        return
    import fcntl

    with contextlib.suppress(OSError):
        fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | os.O_DIRECT)


def buffer_bytes(layouts: Sequence[FileLayout], window: int, aside: Collection[int] = ()) -> int:
    """Most bytes of buffers with the contents of files.

    Args:
        layouts: of the files.
        window: files that have one at a time.
        aside: numbers of files that have one of their own beside the window.
    """
    others = sorted((one.size for number, one in enumerate(layouts) if number not in aside), reverse=True)
    return sum(others[:window]) + sum(layouts[number].size for number in aside)


def padded(size: int) -> int:
    """The size, rounded up to whole blocks."""
    return -(-size // BLOCK) * BLOCK


def aligned_buffer(size: int) -> np.ndarray:
    """Empty bytes whose address is a multiple of ``BLOCK``, [size] uint8."""
    buffer = np.empty(size + BLOCK, np.uint8)
    start = -buffer.ctypes.data % BLOCK
    return buffer[start : start + size]
