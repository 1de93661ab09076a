"""One checkpoint of an array state that lives in several processes, on a file system or object store that they share.

Process 0 owns the directory: it makes the folder, writes what is whole in every process, waits for the others, writes
the manifest and commits. Every process writes the shards that are its own, each as one zarr chunk whose bytes are the
shard's, and reports their hashes, which are taken before they are written. So nothing is gathered and no array's byte
is sent from one process to another.

The hash of a leaf is over its values in C order, which no process has. So when all chunks are written, each process
reads its share of the leaf's blocks back, comparing what it reads with the chunks' hashes; all this is in the
background.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from jaxllm.checkpoint import checkpoint_writer, snapshot
from jaxllm.checkpoint.checkpoint_writer import HostMemoryBudget, WrittenChunk
from jaxllm.checkpoint.checkpointer import Checkpointer
from jaxllm.checkpoint.config import CheckpointConfig
from jaxllm.checkpoint.errors import CheckpointError
from jaxllm.checkpoint.readonly import RestoredCheckpoint
from jaxllm.checkpoint.snapshot import CopyMode, SnapshotLeaf
from jaxllm.checkpoint.storage import array_store, leaf_hashing
from jaxllm.checkpoint.storage.checkpoint_manifest import FileRecord, LeafRecord
from jaxllm.checkpoint.storage.file_systems import FileSystem
from jaxllm.checkpoint.storage.stored_leaf import StoredLeaf

_SAVE = "checkpoint/save"
_T = TypeVar("_T")


@runtime_checkable
class CheckpointGroup(Protocol):
    """The processes that save together; ``jaxllm.parallel.distributed.ProcessGroup`` is one.

    rank, size: this process, and how many there are.
    gather: every process's text by rank, in process 0; nothing in the others.
    tell: process 0's text, in every process.
    """

    rank: int
    size: int

    def gather(self, topic: str, text: str) -> list[str]: ...

    def broadcast(self, topic: str, text: str = "") -> str: ...


class MultihostCheckpointer(Checkpointer):
    """A `Checkpointer` that every process of a group opens on the same directory.

    Every process calls the same methods in the same order with the same arguments; each raises what any of them met.
    """

    def __init__(
        self, directory: str | os.PathLike | FileSystem, config: CheckpointConfig | None, group: CheckpointGroup
    ):
        super().__init__(directory, config, read_only=group.rank != 0)
        self._group = group

    def latest(self) -> int | None:
        """As process 0 sees it."""
        return json.loads(self._group.broadcast("checkpoint/latest", json.dumps(self._is_lead and super().latest())))

    def resume(self, abstract_state: Any) -> RestoredCheckpoint | None:
        """As `Checkpointer.resume`; process 0 looks for the newest good one, the others take the same."""
        self._group.gather("checkpoint/resume", "")  # nobody reads a folder that process 0 is about to rename
        step = super().latest_good() if self._is_lead else None
        step = json.loads(self._group.broadcast("checkpoint/resume", json.dumps(step)))
        return None if step is None else RestoredCheckpoint(step, *self.restore(abstract_state, step))

    def set_aside_after(self, step: int) -> list[Path | str]:
        """As `Checkpointer.set_aside_after`; the paths are told in process 0 only."""
        self.wait()
        return super().set_aside_after(step) if self._is_lead else []

    @property
    def _is_lead(self) -> bool:
        return self._group.rank == 0

    def _check_save(self, step: int, meta: Mapping[str, Any]) -> str | None:
        self.wait()
        text, problem = None, ""
        if self._is_lead:
            try:
                text = super()._check_save(step, meta)
            except CheckpointError as error:
                problem = str(error)
        text, problem = json.loads(self._group.broadcast("checkpoint/admit", json.dumps([text, problem])))
        if problem:
            raise CheckpointError(problem)
        return text

    def _capture(self, state: Any, copy: CopyMode) -> dict[str, SnapshotLeaf]:
        # A copy on the devices is one program of all processes: all make it, or none.
        said = self._group.gather("checkpoint/room", copy)
        copy = self._group.broadcast("checkpoint/room", next((one for one in said if one != "device"), copy))  # type: ignore[assignment]
        leaves = snapshot.capture(state, copy=copy, multihost=True)
        return leaves if self._is_lead else {path: leaf for path, leaf in leaves.items() if leaf.split}

    def _write(self, step: int, meta: str, leaves: Mapping[str, SnapshotLeaf], one_at_a_time: bool = False) -> None:
        """Process 0 speaks three times: when the folder is there, when all chunks are, and in the end.

        What it says is JSON; one with a `problem` is its last word.
        """
        if self._is_lead:
            try:
                super()._write(step, meta, leaves, one_at_a_time)
            except CheckpointError as error:
                self._announce(problem=str(error))
                raise
            self._announce()
            return
        self._receive()
        self._write_shards(self._directory.saving_folder(step), leaves)
        self._receive()

    def _announce(self, **what: Any) -> None:
        self._group.broadcast(_SAVE, json.dumps(what))

    def _receive(self) -> dict[str, Any]:
        said = json.loads(self._group.broadcast(_SAVE))
        if "problem" in said:
            raise CheckpointError(said["problem"])
        return said

    def _write_arrays(
        self, folder: str, leaves: Mapping[str, SnapshotLeaf], budget: HostMemoryBudget
    ) -> tuple[dict[str, LeafRecord], dict[str, FileRecord]]:
        """What process 0 writes, and what the manifest says of all."""
        files = checkpoint_writer.write_metadata(self._directory.files, folder, leaves)
        self._announce()
        split = {path: leaf for path, leaf in leaves.items() if leaf.split}
        own = {path: leaf for path, leaf in leaves.items() if not leaf.split}
        try:
            written = checkpoint_writer.write_chunks(self._directory.files, folder, own, budget)
            problem = None
        except Exception as error:  # told when the others listen
            written, problem = {}, error
        records, chunks = self._write_shards(folder, split)
        if problem is not None:
            raise problem
        whole = checkpoint_writer.leaf_records(own, written)
        return {p: whole.get(p) or records[p] for p in leaves}, files | checkpoint_writer.file_records(written) | chunks

    def _write_shards(
        self, folder: str, leaves: Mapping[str, SnapshotLeaf]
    ) -> tuple[dict[str, LeafRecord], dict[str, FileRecord]]:
        """Writes this process's shards and hashes its share of the blocks of all; returns what the manifest says.

        Raises:
            CheckpointError: in process 0, naming the process that could not; the others are told in the end.
        """
        chunks = self._gather_results(
            "checkpoint/chunks",
            lambda: {
                f"{array_store.leaf_folder(path)}/{name}": [part.bytes, part.hash]
                for path, parts in write_shards(self, folder, leaves).items()
                for name, part in parts.items()
            },
        )
        every = {name: FileRecord(*about) for one in chunks for name, about in one.items()}
        if self._is_lead:
            _check_chunks(self, folder, leaves, every)
            self._announce(chunks={name: [file.bytes, file.hash] for name, file in every.items()})
        else:
            every = {name: FileRecord(*about) for name, about in self._receive()["chunks"].items()}
        return self._records(folder, leaves, every), every

    def _records(
        self, folder: str, leaves: Mapping[str, SnapshotLeaf], chunks: Mapping[str, FileRecord]
    ) -> dict[str, LeafRecord]:
        """What the manifest says of leaves whose chunks are all there; nothing in processes other than 0."""
        hashes = self._gather_results("checkpoint/blocks", lambda: self._hash_own_blocks(folder, leaves, chunks))
        records = {}
        for path, leaf in leaves.items() if self._is_lead else ():
            blocks = {int(n): digest for one in hashes for n, digest in one.get(path, {}).items()}
            records[path] = checkpoint_writer.leaf_record(leaf, [blocks[n] for n in range(len(blocks))])
        return records

    def _hash_own_blocks(
        self, folder: str, leaves: Mapping[str, SnapshotLeaf], chunks: Mapping[str, FileRecord]
    ) -> dict[str, dict[int, str]]:
        """Path -> number -> hash of the blocks that are this process's to hash."""
        out: dict[str, dict[int, str]] = {}
        turn = 0
        for path, leaf in leaves.items():
            where = array_store.leaf_folder(path)
            parts = {n.rsplit("/", 1)[1]: f for n, f in chunks.items() if array_store.folder_of(n) == where}
            head = json.dumps({"chunks": leaf.chunk}).encode()
            record = LeafRecord(leaf.shape, leaf.dtype, "", leaf.key_impl)
            stored = StoredLeaf(self._directory.files, folder, path, record, parts, head, leaf_hashing.BLOCK_BYTES)
            mine = out[path] = {}
            for number in range(stored.blocks):
                if turn % self._group.size == self._group.rank:
                    (mine[number],) = stored.block_hashes(range(number, number + 1))
                turn += 1
        return out

    def _gather_results(self, topic: str, work: Callable[[], _T]) -> list[_T]:
        """What `work` gives in each process, in process 0; nothing in the others.

        Raises:
            CheckpointError: in process 0, of those where it failed.
        """
        try:
            text = json.dumps({"result": work()})
        except Exception as error:
            text = json.dumps({"problem": f"{type(error).__name__}: {error}"})
        said = [json.loads(one) for one in self._group.gather(topic, text)]
        problems = [f"process {rank}: {one['problem']}" for rank, one in enumerate(said) if "problem" in one]
        if problems:
            raise CheckpointError("; ".join(problems))
        return [one["result"] for one in said]


def write_shards(
    of: MultihostCheckpointer, folder: str, leaves: Mapping[str, SnapshotLeaf]
) -> dict[str, dict[str, WrittenChunk]]:
    """Writes this process's shards of every leaf."""
    return checkpoint_writer.write_chunks(of._directory.files, folder, leaves, HostMemoryBudget(of.config.host_bytes))


def _check_chunks(
    of: MultihostCheckpointer, folder: str, leaves: Mapping[str, SnapshotLeaf], chunks: Mapping[str, FileRecord]
) -> None:
    """Whether all chunks were written, and can be seen from here."""
    files = of._directory.files
    for path, leaf in leaves.items():
        wanted = math.prod(n // c for n, c in zip(leaf.array_shape, leaf.chunk, strict=True))
        there = [name for name in chunks if array_store.folder_of(name) == array_store.leaf_folder(path)]
        if len(there) != wanted:
            raise CheckpointError(f"leaf {path} has {wanted} shards, and the processes wrote {len(there)}.")
        unseen = [name for name in there if files.size(f"{folder}/{name}") is None]
        if unseen:
            raise CheckpointError(
                f"process 0 does not see {len(unseen)} files that the others wrote, such as {folder}/{unseen[0]} in "
                f"{files}: the {of._group.size} processes do not share a file system there. Choose a directory that "
                "they share."
            )
