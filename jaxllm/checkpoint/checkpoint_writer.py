"""Checkpoint writer: hashes and writes arrays at the same time, within a budget of host memory."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jaxllm.checkpoint.snapshot_leaf import SnapshotLeaf, single_chunk_leaf
from jaxllm.checkpoint.storage import array_store, leaf_hashing
from jaxllm.checkpoint.storage.checkpoint_manifest import FileRecord, LeafRecord
from jaxllm.checkpoint.storage.file_systems import FileSystem
from jaxllm.checkpoint.storage.leaf_hashing import as_bytes, hash_bytes, split_pieces

SYNC_ALONE_BYTES = 2**23
"""Size in bytes from which on a file is synced alone; smaller files are synced together at the end."""
WRITER_THREADS = 4
"""Files written at a time: while one waits for the disk, the others proceed."""


@dataclasses.dataclass(frozen=True)
class StreamedLeaf:
    """Leaf that is written in pieces, and need not be in memory as a whole.

    shape, dtype: of the whole leaf.
    pieces: its values one after another in C order, in pieces of any size.
    key: (dtype, implementation) of typed PRNG keys; the other fields then describe the key data.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: Iterable[np.ndarray]
    key: tuple[str, str] | None = None


def streamed_leaves(leaves: Mapping[str, StreamedLeaf]) -> dict[str, SnapshotLeaf]:
    """Converts streamed leaves to the form in which snapshots are written."""
    return {
        p: single_chunk_leaf(tuple(leaf.shape), np.dtype(leaf.dtype), lambda leaf=leaf: leaf.pieces, leaf.key)
        for p, leaf in leaves.items()
    }


@dataclasses.dataclass(frozen=True)
class WrittenChunk:
    """Chunk of a leaf that has been written.

    bytes: its size.
    blocks: hashes of the blocks of its bytes.
    """

    bytes: int
    blocks: list[str]

    @property
    def hash(self) -> str:
        """Content hash of the whole chunk."""
        return leaf_hashing.combine_block_hashes(self.blocks)


class HostMemoryBudget:
    """Budget of host memory in bytes: `with budget(n)` waits until n bytes fit, or until nothing else is in use."""

    def __init__(self, most: int):
        self._most, self._used = most, 0
        self._change = threading.Condition()

    @contextlib.contextmanager
    def __call__(self, size: int) -> Iterator[None]:
        with self._change:
            self._change.wait_for(lambda: self._used == 0 or self._used + size <= self._most)
            self._used += size
        try:
            yield
        finally:
            with self._change:
                self._used -= size
                self._change.notify_all()


def write_metadata(files: FileSystem, folder: str, leaves: Mapping[str, SnapshotLeaf]) -> dict[str, FileRecord]:
    """Creates the folders of leaves and writes the metadata files (those without array data); their records."""
    described = array_store.metadata_files(
        {
            p: (leaf.array_shape, array_store.stored_dtype(leaf.array_dtype), leaf.chunk)
            for p, leaf in nonempty(leaves).items()
        }
    )
    for name in sorted({name.rsplit("/", 1)[0] for name in described} | {array_store.STATE_FOLDER}):
        files.make(f"{folder}/{name}")
    with ThreadPoolExecutor(WRITER_THREADS) as pool:
        return dict(pool.map(lambda item: (item[0], write_file(files, folder, *item)), described.items()))


def write_file(files: FileSystem, folder: str, name: str, data: bytes) -> FileRecord:
    """Writes a small file of a checkpoint; returns its size and content hash."""
    with files.create(f"{folder}/{name}") as out:
        out.write(data)
    return FileRecord(len(data), hash_bytes(data))


def write_chunks(
    files: FileSystem, folder: str, leaves: Mapping[str, SnapshotLeaf], budget: HostMemoryBudget
) -> dict[str, dict[str, WrittenChunk]]:
    """Writes this process's chunks of every leaf; returns when they are on disk.

    Returns:
        Path -> name of the chunk -> what was written.

    Raises:
        ValueError: the pieces of a leaf have another dtype, or too few or too many bytes.
    """
    jobs = [(path, name) for path, leaf in nonempty(leaves).items() for name in leaf.parts]
    with ThreadPoolExecutor(WRITER_THREADS) as pool, ThreadPoolExecutor(leaf_hashing.HASH_THREADS) as hashers:

        def write(job: tuple[str, str]) -> WrittenChunk:
            path, chunk = job
            leaf = leaves[path]
            size = math.prod(leaf.chunk) * leaf.array_dtype.itemsize
            name = f"{folder}/{array_store.leaf_folder(path)}/{chunk}"
            with budget(size), files.create(name) as out:
                part = _write(out.write, leaf.parts[chunk](), path, leaf, size, hashers)
            if size >= SYNC_ALONE_BYTES:
                files.sync([name])  # while other files are written and hashed
            return part

        running = [pool.submit(write, job) for job in jobs]
        done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_EXCEPTION)
        if failed := [future for future in done if future.exception()]:
            pool.shutdown(wait=False, cancel_futures=True)
            failed[0].result()
        out: dict[str, dict[str, WrittenChunk]] = {path: {} for path in leaves}
        for (path, chunk), future in zip(jobs, running, strict=True):
            out[path][chunk] = future.result()
    small = [name for name, file in file_records(out).items() if file.bytes < SYNC_ALONE_BYTES]
    files.sync(f"{folder}/{name}" for name in small)
    return out


def leaf_records(
    leaves: Mapping[str, SnapshotLeaf], written: Mapping[str, Mapping[str, WrittenChunk]]
) -> dict[str, LeafRecord]:
    """Manifest records of leaves that one process wrote."""
    out = {}
    for path, leaf in leaves.items():
        blocks = next((part.blocks for part in written[path].values()), [hash_bytes(b"")])
        out[path] = leaf_record(leaf, blocks)
    return out


def file_records(written: Mapping[str, Mapping[str, WrittenChunk]], hashed: bool = False) -> dict[str, FileRecord]:
    """Manifest records of files with array data; `hashed` adds each file's own hash, for leaves in several chunks."""
    return {
        f"{array_store.leaf_folder(path)}/{name}": FileRecord(part.bytes, part.hash if hashed else None)
        for path, parts in written.items()
        for name, part in parts.items()
    }


def leaf_record(leaf: SnapshotLeaf, blocks: list[str]) -> LeafRecord:
    """Manifest record of a leaf, from the hashes of its blocks."""
    several = tuple(blocks) if len(blocks) > 1 else ()
    return LeafRecord(leaf.shape, leaf.dtype, leaf_hashing.combine_block_hashes(blocks), leaf.key_impl, several)


def nonempty(leaves: Mapping[str, SnapshotLeaf]) -> dict[str, SnapshotLeaf]:
    """Leaves that have a file: a leaf without elements has none."""
    return {path: leaf for path, leaf in leaves.items() if 0 not in leaf.array_shape}


def _write(
    put: Callable[..., object],
    pieces: Iterable[np.ndarray],
    path: str,
    leaf: SnapshotLeaf,
    size: int,
    hashers: ThreadPoolExecutor,
) -> WrittenChunk:
    """Writes one chunk; each piece is hashed while it is written."""
    hasher, written = leaf_hashing.BlockHasher(), 0
    for piece in pieces:
        if piece.dtype != leaf.array_dtype:
            raise ValueError(f"leaf {path} is {leaf.array_dtype}, and a piece of it is {piece.dtype}.")
        for part in split_pieces(as_bytes(piece), leaf_hashing.PIECE_BYTES):
            hashed = hashers.submit(hasher.update, part)
            rest = part.data
            while len(rest):  # an unbuffered file may write only a part
                count = put(rest)
                rest = rest[count if isinstance(count, int) else len(rest) :]
            hashed.result()
            written += len(part)
        if written > size:
            break
        del piece, part, rest, hashed  # frees this piece before the next one is created
    if written != size:
        raise ValueError(f"leaf {path} has {size} bytes, and its pieces have {written}.")
    return WrittenChunk(size, hasher.blocks())
