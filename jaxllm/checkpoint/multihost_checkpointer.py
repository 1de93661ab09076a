"""Multi-host checkpointing: several processes save one sharded state to a shared file system or object store.

Process 0 owns the directory: it creates the folder, writes the leaves that every process has as a whole, waits for the
others, writes the manifest and commits. Every process writes its own shards, each as one zarr chunk with the bytes of
the shard, and reports their content hashes, which are taken before writing. So nothing is gathered, and no array data
is sent from one process to another.

The hash of a leaf is over its values in C order, which no process has as a whole. So when all chunks are written, each
process reads back its share of the leaf's blocks, and compares what it reads with the hashes of the chunks. All this
happens in the background.
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
from jaxllm.checkpoint.snapshot import CopyMode
from jaxllm.checkpoint.snapshot_leaf import SnapshotLeaf
from jaxllm.checkpoint.storage import array_store, leaf_hashing
from jaxllm.checkpoint.storage.checkpoint_manifest import FileRecord, LeafRecord
from jaxllm.checkpoint.storage.file_systems import FileSystem
from jaxllm.checkpoint.storage.stored_leaf import StoredLeaf

_SAVE = "checkpoint/save"
_T = TypeVar("_T")


@runtime_checkable
class CheckpointGroup(Protocol):
    """Group of processes that save together; ``jaxllm.parallel.distributed.ProcessGroup`` is one.

    rank: index of this process. size: number of processes.
    """

    rank: int
    size: int

    def gather(self, topic: str, text: str) -> list[str]:
        """Texts of all processes by rank, in process 0; an empty list in the others."""
        ...

    def broadcast(self, topic: str, text: str = "") -> str:
        """Text of process 0, in every process."""
        ...


class MultihostCheckpointer(Checkpointer):
    """Multi-host `Checkpointer`: every process of a group opens it on the same directory.

    All processes call the same methods in the same order with the same arguments; an error in one is raised in all.
    """

    def __init__(
        self, directory: str | os.PathLike | FileSystem, config: CheckpointConfig | None, group: CheckpointGroup
    ):
        super().__init__(directory, config, read_only=group.rank != 0)
        self._group = group

    def latest(self) -> int | None:
        """Newest complete checkpoint's step as seen by process 0; None if there is none."""
        return json.loads(self._group.broadcast("checkpoint/latest", json.dumps(self._is_lead and super().latest())))

    def resume(self, abstract_state: Any) -> RestoredCheckpoint | None:
        """Same as `Checkpointer.resume`; process 0 finds the newest good checkpoint, and the others use the same."""
        self._group.gather("checkpoint/resume", "")  # barrier: no process reads a folder that process 0 may rename
        step = super().latest_good() if self._is_lead else None
        step = json.loads(self._group.broadcast("checkpoint/resume", json.dumps(step)))
        return None if step is None else RestoredCheckpoint(step, *self.restore(abstract_state, step))

    def set_aside_after(self, step: int) -> list[Path | str]:
        """Same as `Checkpointer.set_aside_after`; only process 0 gets the paths."""
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
        # A copy on the devices is one program of all processes: either all run it, or none.
        said = self._group.gather("checkpoint/room", copy)
        copy = self._group.broadcast("checkpoint/room", next((one for one in said if one != "device"), copy))  # type: ignore[assignment]
        leaves = snapshot.capture(state, copy=copy, multihost=True)
        return leaves if self._is_lead else {path: leaf for path, leaf in leaves.items() if leaf.split}

    def _write(self, step: int, meta: str, leaves: Mapping[str, SnapshotLeaf], one_at_a_time: bool = False) -> None:
        """Writes and commits one checkpoint together.

        Process 0 broadcasts three times: when the folder exists, when all chunks are written, and at the end. The
        messages are JSON; a message with a `problem` is the last one.
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
        """Writes the metadata and the whole leaves in process 0; returns the manifest records of all leaves."""
        files = checkpoint_writer.write_metadata(self._directory.files, folder, leaves)
        self._announce()
        split = {path: leaf for path, leaf in leaves.items() if leaf.split}
        own = {path: leaf for path, leaf in leaves.items() if not leaf.split}
        try:
            written = checkpoint_writer.write_chunks(self._directory.files, folder, own, budget)
            problem = None
        except Exception as error:  # raised after the collective calls, so that the other processes do not hang
            written, problem = {}, error
        records, chunks = self._write_shards(folder, split)
        if problem is not None:
            raise problem
        whole = checkpoint_writer.leaf_records(own, written)
        return {p: whole.get(p) or records[p] for p in leaves}, files | checkpoint_writer.file_records(written) | chunks

    def _write_shards(
        self, folder: str, leaves: Mapping[str, SnapshotLeaf]
    ) -> tuple[dict[str, LeafRecord], dict[str, FileRecord]]:
        """Writes this process's shards and hashes its share of all blocks; returns the manifest records.

        Raises:
            CheckpointError: in process 0, naming the process that failed; the others receive it at the end.
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
        """Manifest records of leaves whose chunks are all written; empty in processes other than 0."""
        hashes = self._gather_results("checkpoint/blocks", lambda: self._hash_own_blocks(folder, leaves, chunks))
        records = {}
        for path, leaf in leaves.items() if self._is_lead else ():
            blocks = {int(n): digest for one in hashes for n, digest in one.get(path, {}).items()}
            records[path] = checkpoint_writer.leaf_record(leaf, [blocks[n] for n in range(len(blocks))])
        return records

    def _hash_own_blocks(
        self, folder: str, leaves: Mapping[str, SnapshotLeaf], chunks: Mapping[str, FileRecord]
    ) -> dict[str, dict[int, str]]:
        """Path -> block number -> hash, for the blocks that this process hashes (round robin)."""
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
        """Results of `work` of all processes, in process 0; an empty list in the others.

        Raises:
            CheckpointError: in process 0, naming the processes in which `work` failed.
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
    """Raises CheckpointError unless all chunks were written and are visible to this process."""
    files = of._directory.files
    for path, leaf in leaves.items():
        wanted = math.prod(n // c for n, c in zip(leaf.array_shape, leaf.chunk, strict=True))
        there = [name for name in chunks if array_store.folder_of(name) == array_store.leaf_folder(path)]
        if len(there) != wanted:
            raise CheckpointError(f"leaf {path} has {wanted} shards, and the processes wrote {len(there)}.")
        unseen = [name for name in there if files.size(f"{folder}/{name}") is None]
        if unseen:
            raise CheckpointError(
                f"process 0 does not see {len(unseen)} files that other processes wrote, such as {folder}/{unseen[0]} "
                f"in {files}: the {of._group.size} processes do not share a file system there. Choose a directory on "
                "a shared file system."
            )
