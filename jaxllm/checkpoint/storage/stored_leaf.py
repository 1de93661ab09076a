"""Stored leaf: verified slices of one leaf on disk, reading only the files and blocks that a slice lies in."""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections.abc import Iterator

import numpy as np

from jaxllm.checkpoint.storage import array_store
from jaxllm.checkpoint.storage.checkpoint_manifest import FileRecord, LeafRecord
from jaxllm.checkpoint.storage.file_systems import FileSystem, SlicingFiles
from jaxllm.checkpoint.storage.leaf_hashing import combine_block_hashes, hash_array, hash_mapped

Index = tuple[slice, ...]


class CorruptDataError(Exception):
    """Data on disk differs from what was saved."""

    def __init__(self, what: str, file: str | None = None):
        super().__init__(what)
        self.what, self.file = what, file


class StoredLeaf:
    """Values of one leaf on disk.

    Args:
        folder: folder of the checkpoint.
        parts: its files of array data, by the name of the chunk.
        head: its `.zarray`, verified; None if the leaf has no elements.
        block: bytes of a block of its hash.

    Attributes:
        bytes_read: bytes of files read so far.
    """

    def __init__(
        self,
        files: FileSystem,
        folder: str,
        path: str,
        record: LeafRecord,
        parts: dict[str, FileRecord],
        head: bytes | None,
        block: int,
    ):
        self._files, self.path, self.record = files, path, record
        self._folder = f"{folder}/{array_store.leaf_folder(path)}"
        self._parts, self._block = parts, block
        self.shape, self.dtype = record.stored_shape, record.stored_dtype
        self.chunk = self.shape if head is None else tuple(json.loads(head)["chunks"])
        self.bytes_read = 0
        self._checked: set[str | int] = set()
        self._lock = threading.Lock()
        if record.empty:
            return
        grid = [range(-(-n // c)) for n, c in zip(self.shape, self.chunk, strict=True)]
        if set(parts) != {".".join(map(str, at)) or "0" for at in itertools.product(*grid)}:
            raise CorruptDataError(f"it has the chunks {', '.join(sorted(parts))}, and not those of its shape")

    @property
    def blocks(self) -> int:
        """Number of blocks of its hash."""
        return max(1, -(-self.record.nbytes // self._block))

    def read(self, index: Index | None = None) -> np.ndarray:
        """A slice of the values, as a fresh array.

        Raises:
            CorruptDataError: the data differs from what was saved.
        """
        index = tuple(slice(None) for _ in self.shape) if index is None else index
        spans = [range(*part.indices(n)) for part, n in zip(index, self.shape, strict=True)]
        out = np.empty([len(span) for span in spans], self.dtype)
        if not out.size:
            return out
        slicing = self._files if isinstance(self._files, SlicingFiles) else None
        if self.chunk == self.shape and slicing is None:
            out[...] = self._slice_of_one(spans)[index]
            return out
        overlaps = [range(span.start // c, -(-span.stop // c)) for span, c in zip(spans, self.chunk, strict=True)]
        for at in itertools.product(*overlaps):
            source, target = [], []
            for i, span, c in zip(at, spans, self.chunk, strict=True):
                begin, end = max(span.start, i * c), min(span.stop, (i + 1) * c)
                source.append(slice(begin - i * c, end - i * c))
                target.append(slice(begin - span.start, end - span.start))
            name = ".".join(map(str, at)) or "0"
            if slicing is None or [part.stop - part.start for part in source] == list(self.chunk):
                out[tuple(target)] = self._whole_chunk(name)[tuple(source)]
            else:
                out[tuple(target)] = self._slice_of_chunk(slicing, name, source)
        return out

    def mapped(self) -> np.ndarray:
        """All values, verified; a read-only memory map if the leaf is one file."""
        if self.record.empty or self.chunk != self.shape:
            return self.read()
        for number in range(self.blocks):
            self._verified_block(number)
        return self._view()

    def verify(self) -> None:
        """Reads all values and compares them with the leaf's hash."""
        if not self.record.hash:  # a snapshot's, in several chunks that have their own
            self.read()
        elif combine_block_hashes(self.block_hashes(range(self.blocks))) != self.record.hash:
            raise CorruptDataError("its values do not match the hash in the manifest")

    def block_hashes(self, numbers: range) -> list[str]:
        """Hashes of some blocks of the values in C order, computed from disk."""
        out = []
        for number in numbers:
            if self.record.empty:
                data = np.empty(0, np.uint8)
            elif self.chunk == self.shape:
                data = self._verified_block(number)
            else:
                data = self._read_block(number)
            out.append(hash_mapped(data))
        return out

    def _view(self) -> np.ndarray:
        return self._data(0, None).view(self.dtype).reshape(self.shape)

    def _slice_of_one(self, spans: list[range]) -> np.ndarray:
        """An array of the leaf's shape in which at least the wanted slice is read and verified."""
        strides = np.cumprod([1, *self.shape[::-1]])[-2::-1] if self.shape else []
        first = sum(span.start * int(s) for span, s in zip(spans, strides, strict=True)) * self.dtype.itemsize
        last = sum((span.stop - 1) * int(s) for span, s in zip(spans, strides, strict=True)) * self.dtype.itemsize
        low, high = first // self._block, (last + self.dtype.itemsize - 1) // self._block
        blocks = [self._verified_block(number) for number in range(low, high + 1)]
        if self._files.renames:
            return self._view()
        if (low, high) == (0, self.blocks - 1):
            data = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        else:
            data = np.zeros(self.record.nbytes, np.uint8)  # pages that are never touched take no memory
            for number, block in zip(range(low, high + 1), blocks, strict=True):
                data[number * self._block : number * self._block + len(block)] = block
        return data.view(self.dtype).reshape(self.shape)

    def _verified_block(self, number: int) -> np.ndarray:
        data = self._bytes(number)
        if number not in self._checked:
            wanted = self.record.blocks[number] if self.record.blocks else self.record.hash
            if hash_mapped(data) != wanted:
                raise CorruptDataError("its values do not match the hash in the manifest", self._single_chunk())
            with self._lock:
                self._checked.add(number)
                self.bytes_read += len(data)
        return data

    def _bytes(self, number: int) -> np.ndarray:
        return self._data(number * self._block, min((number + 1) * self._block, self.record.nbytes))

    def _data(self, begin: int, end: int | None) -> np.ndarray:
        return self._files.read(f"{self._folder}/{self._single_chunk()}", begin, end)

    def _whole_chunk(self, name: str) -> np.ndarray:
        """A chunk, verified by its own hash, or by the leaf's if it is the only one."""
        data = self._files.read(f"{self._folder}/{name}")
        if name not in self._checked:
            if hash_array(data) != (self._parts[name].hash or self.record.hash):
                raise CorruptDataError("its bytes do not match the manifest", name)
            with self._lock:
                self._checked.add(name)
                self.bytes_read += len(data)
        return data.view(self.dtype).reshape(self.chunk)

    def _slice_of_chunk(self, files: SlicingFiles, name: str, part: list[slice]) -> np.ndarray:
        """A slice of a chunk, which its file system verifies as a whole."""
        spans = [(one.start, one.stop) for one in part]
        data, found = files.read_slice(f"{self._folder}/{name}", self.chunk, self.dtype.itemsize, spans)
        if found != (self._parts[name].hash or self.record.hash):
            raise CorruptDataError("its bytes do not match the manifest", name)
        with self._lock:
            self.bytes_read += len(data)
        return data.view(self.dtype).reshape([end - begin for begin, end in spans])

    def _read_block(self, number: int) -> np.ndarray:
        """Bytes of one block of a leaf in several chunks, read by the rows that it lies in."""
        begin, end = number * self._block, min((number + 1) * self._block, self.record.nbytes)
        out = np.empty(end - begin, np.uint8)
        done = begin
        for spans, low in self._rows(begin, end):
            rows = self.read(tuple(spans)).reshape(-1).view(np.uint8)
            part = rows[max(0, begin - low) : end - low]
            out[done - begin : done - begin + len(part)] = part
            done += len(part)
        return out

    def _rows(self, begin: int, end: int) -> Iterator[tuple[list[slice], int]]:
        """Slices along the first dimension that hold the bytes from `begin` to `end`, a few at a time."""
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        several = max(1, min(self._block, end - begin) // row)
        for first in range(begin // row, -(-end // row), several):
            stop = min(first + several, -(-end // row))
            yield [slice(first, stop), *(slice(None) for _ in self.shape[1:])], first * row

    def _single_chunk(self) -> str:
        return next(iter(self._parts))
