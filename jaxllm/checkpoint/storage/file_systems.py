"""File systems of checkpoints: a local folder or an object store behind the same few operations.

Names are relative to the root, with slashes. A local folder commits by renaming. An object store cannot rename but
writes an object atomically, so there the manifest, which is written last, makes a folder a checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

import numpy as np

from jaxllm import files
from jaxllm.checkpoint.errors import CheckpointError

DIRECT_IO_BYTES = 2**22
"""Bytes per write that bypasses the page cache; smaller writes go through it."""
DIRECT_IO_ALIGNMENT = 2**12
"""Alignment in bytes of such writes."""

PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "az": "adlfs", "abfs": "adlfs"}


class LocalFiles:
    """Local folder as a file system of checkpoints."""

    renames = True

    def __init__(self, root: str | os.PathLike):
        self.path = Path(os.path.abspath(root))

    def __str__(self) -> str:
        return str(self.path)

    def make(self, name: str) -> None:
        """Creates a folder and its parents."""
        (self.path / name).mkdir(parents=True, exist_ok=True)

    def names(self, folder: str = "") -> list[str]:
        """Names in a folder; none if it does not exist."""
        try:
            return sorted(os.listdir(self.path / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def walk(self, folder: str) -> dict[str, int]:
        """Bytes of every file below a folder, by name within it."""
        root = self.path / folder
        return {p.relative_to(root).as_posix(): p.stat().st_size for p in sorted(root.rglob("*")) if p.is_file()}

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if it does not exist."""
        try:
            return os.stat(self.path / name).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Contents of a file as uint8; a read-only memory map if it is large."""
        size = os.stat(self.path / name).st_size
        end = size if end is None else min(end, size)
        if end - begin < 2**16:
            with open(self.path / name, "rb") as file:
                file.seek(begin)
                return np.frombuffer(file.read(end - begin), np.uint8)
        return np.memmap(self.path / name, np.uint8, "r")[begin:end]

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Opens a new file for writing; `sync` waits until it is on disk."""
        with open(self.path / name, "wb", buffering=0) as file:
            yield _DirectIOFile(file)  # type: ignore[misc]

    def rename(self, name: str, to: str) -> None:
        """Renames a file or folder."""
        os.rename(self.path / name, self.path / to)

    def remove(self, name: str) -> None:
        """Removes a file, or a folder with its contents; nothing if it does not exist."""
        path = self.path / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def sync(self, names: Iterable[str]) -> None:
        """Waits until files and directory entries are on disk.

        All at once, when all are written: one flush of the file system's journal serves many.
        """

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: files.sync(self.path / name), names))


class _DirectIOFile:
    """New file, written with O_DIRECT, past the page cache, where the system supports it and the write is large.

    A checkpoint is not read soon: a page for each of its bytes would cost more processor time than its hash, and push
    out the pages that training needs. The memory of the values cannot be chosen, so they go through an aligned
    buffer.
    """

    _buffers = threading.local()

    def __init__(self, file: BinaryIO):
        self._file, self._at = file, 0
        self._can = hasattr(os, "O_DIRECT")

    def write(self, data: bytes | memoryview) -> int:
        rest = memoryview(data).cast("B")
        while len(rest):
            large = self._can and self._at % DIRECT_IO_ALIGNMENT == 0 and len(rest) >= DIRECT_IO_BYTES
            count = self._direct(rest[:DIRECT_IO_BYTES]) if large else self._file.write(rest)
            self._at += count
            rest = rest[count:]
        return len(data)

    def _direct(self, data: memoryview) -> int:
        """Number of bytes written; 0, and no further attempt, if the file system refuses."""
        if not hasattr(self._buffers, "one"):
            self._buffers.one = mmap.mmap(-1, DIRECT_IO_BYTES)
        self._buffers.one[:] = data
        handle = self._file.fileno()
        flags = fcntl.fcntl(handle, fcntl.F_GETFL)
        try:
            fcntl.fcntl(handle, fcntl.F_SETFL, flags | os.O_DIRECT)
            return os.write(handle, self._buffers.one)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self._can = False
            return 0
        finally:
            fcntl.fcntl(handle, fcntl.F_SETFL, flags)


class ObjectStore:
    """Folder of an object store, through fsspec.

    Raises:
        CheckpointError: a package that this kind of URL needs is missing.
    """

    renames = False

    def __init__(self, url: str):
        scheme = url.split("://")[0]
        missing = f"checkpoints at {url} need the package {{}}: pip install {{}}."
        try:
            import fsspec
        except ImportError as error:
            raise CheckpointError(missing.format("fsspec", "fsspec")) from error
        self.url = url.rstrip("/")
        try:
            self.fs, self._root = fsspec.core.url_to_fs(self.url)
        except ImportError as error:
            package = PACKAGES.get(scheme, "that fsspec names")
            raise CheckpointError(missing.format(package, package) + f" ({error})") from error
        except ValueError as error:
            known = ", ".join(sorted({*PACKAGES, "memory"}))
            raise CheckpointError(f"{url}: {error}. Legal: a local path, or a URL such as {known}.") from error

    def __str__(self) -> str:
        return self.url

    def make(self, name: str) -> None:
        """Does nothing: folders are only prefixes of names."""

    def names(self, folder: str = "") -> list[str]:
        """Names below a prefix."""
        try:
            self.fs.invalidate_cache()
            return sorted(
                {entry.rstrip("/").rsplit("/", 1)[-1] for entry in self.fs.ls(self._at(folder), detail=False)}
            )
        except (FileNotFoundError, NotADirectoryError):
            return []

    def walk(self, folder: str) -> dict[str, int]:
        """Bytes of every object below a prefix, by name within it."""
        root = self._at(folder)
        found = self.fs.find(root, detail=True)
        return {name.split(root, 1)[1].lstrip("/"): about["size"] for name, about in sorted(found.items())}

    def size(self, name: str) -> int | None:
        """Bytes of an object; None if it does not exist."""
        try:
            return self.fs.size(self._at(name))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def read(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Contents of an object as uint8."""
        data = self.fs.cat_file(self._at(name), start=begin or None, end=end)
        return np.frombuffer(data, np.uint8)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Opens a new object for writing; none is created if the block fails."""
        with tempfile.SpooledTemporaryFile(max_size=2**26) as waiting:
            yield waiting  # type: ignore[misc]
            waiting.seek(0)
            with self.fs.open(self._at(name), "wb") as out:
                shutil.copyfileobj(waiting, out, 2**24)

    def rename(self, name: str, to: str) -> None:
        """Moves objects by copying and deleting them, which is not atomic."""
        self.fs.mv(self._at(name), self._at(to), recursive=True)

    def remove(self, name: str) -> None:
        """Removes an object, or all objects below a prefix."""
        if self.fs.exists(self._at(name)):
            self.fs.rm(self._at(name), recursive=True)

    def sync(self, names: Iterable[str]) -> None:
        """Does nothing: a written object is durable."""

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


@runtime_checkable
class SlicingFiles(Protocol):
    """Protocol of a file system from which slices of arrays can be read without the rest of their files."""

    def read_slice(
        self, name: str, shape: Sequence[int], width: int, spans: Sequence[tuple[int, int]]
    ) -> tuple[np.ndarray, str]:
        """Bytes of a slice of a file that holds an array in C order, and the hash of the whole file where it lies.

        Args:
            shape: of the array.
            width: bytes of an element.
            spans: first index and the one after the last of each dimension.
        """
        ...


@runtime_checkable
class FileSystem(Protocol):
    """Protocol of a file system for checkpoints; `LocalFiles` documents each operation.

    `PeerStorage`, in the memory of other processes, is a third implementation. `renames`: whether a folder is renamed
    in one step that is never seen half done.
    """

    renames: bool

    def make(self, name: str) -> None:
        """Creates a folder and its parents."""
        ...

    def names(self, folder: str = "") -> list[str]:
        """Names in a folder; none if it does not exist."""
        ...

    def walk(self, folder: str) -> dict[str, int]:
        """Bytes of every file below a folder, by name within it."""
        ...

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if it does not exist."""
        ...

    def read(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Contents of a file as uint8."""
        ...

    def create(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Opens a new file for writing."""
        ...

    def rename(self, name: str, to: str) -> None:
        """Renames a file or folder."""
        ...

    def remove(self, name: str) -> None:
        """Removes a file, or a folder with its contents."""
        ...

    def sync(self, names: Iterable[str]) -> None:
        """Waits until files and directory entries are durable."""
        ...


def open_files(root: str | os.PathLike | FileSystem) -> FileSystem:
    """File system of a path or URL."""
    if not isinstance(root, str | os.PathLike):
        return root
    text = os.fspath(root)
    if "://" not in text:
        return LocalFiles(text)
    return LocalFiles(text.removeprefix("file://")) if text.startswith("file://") else ObjectStore(text)
