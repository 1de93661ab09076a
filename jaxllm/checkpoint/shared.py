"""One checkpoint of an array state that lives in several processes, on a file system that they share.

Process 0 owns the directory: it makes the folder, writes what is whole in every process, waits for the others, writes
the manifest and commits. Every process writes the shards that are its own, each as one zarr chunk whose bytes are the
shard's, and reports their hashes, which are taken before they are written. So nothing is gathered and no byte is sent
from one process to another.

A leaf in several chunks has a hash over the names and hashes of its chunks, which is another one for another layout.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jaxllm.checkpoint import store, tree, writer
from jaxllm.checkpoint.checkpointer import Checkpointer, Resumed
from jaxllm.checkpoint.config import CheckpointConfig
from jaxllm.checkpoint.errors import CheckpointError
from jaxllm.checkpoint.manifest import LeafRecord, hash_array, hash_chunks

_SAVE = "checkpoint/save"


@runtime_checkable
class Group(Protocol):
    """The processes that save together; ``jaxllm.parallel.distributed.Group`` is one.

    rank, size: this process, and how many there are.
    gather: every process's text by rank, in process 0; nothing in the others.
    tell: process 0's text, in every process.
    """

    rank: int
    size: int

    def gather(self, topic: str, text: str) -> list[str]: ...

    def tell(self, topic: str, text: str = "") -> str: ...


@dataclasses.dataclass(frozen=True)
class Shards:
    """What this process writes of a leaf.

    Attributes:
        shape: of the leaf.
        chunk: of one shard.
        dtype: of both.
        pieces: shards by the name of their chunk, ``"0.1"``.
    """

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: str
    pieces: Mapping[str, np.ndarray]


class SharedCheckpointer(Checkpointer):
    """A `Checkpointer` that every process of a group opens on the same directory.

    Every process calls the same methods in the same order with the same arguments; each raises what any of them met.
    """

    def __init__(self, directory: str | os.PathLike, config: CheckpointConfig | None, group: Group):
        super().__init__(directory, config, read_only=group.rank != 0)
        self._group = group

    def latest(self) -> int | None:
        """As process 0 sees it."""
        return json.loads(self._group.tell("checkpoint/latest", json.dumps(self._leads and super().latest())))

    def resume(self, abstract_state: Any) -> Resumed | None:
        """As `Checkpointer.resume`; process 0 looks for the newest good one, the others take the same."""
        self._group.gather("checkpoint/resume", "")  # nobody reads a folder that process 0 is about to rename
        found = super().resume(abstract_state) if self._leads else None
        step = json.loads(self._group.tell("checkpoint/resume", json.dumps(found and found.step)))
        return found if self._leads or step is None else Resumed(step, *self.restore(abstract_state, step))

    def set_aside_after(self, step: int) -> list[Path]:
        """As `Checkpointer.set_aside_after`; the paths are told in process 0 only."""
        self.wait()
        return super().set_aside_after(step) if self._leads else []

    @property
    def _leads(self) -> bool:
        return self._group.rank == 0

    def _admit(self, step: int, meta: Mapping[str, Any]) -> str | None:
        self.wait()
        text, problem = None, ""
        if self._leads:
            try:
                text = super()._admit(step, meta)
            except CheckpointError as error:
                problem = str(error)
        text, problem = json.loads(self._group.tell("checkpoint/admit", json.dumps([text, problem])))
        if problem:
            raise CheckpointError(problem)
        return text

    def _snapshot(self, state: Any) -> Callable[[Path], dict[str, LeafRecord]]:
        whole, shards = snapshot(state)
        return functools.partial(self._write_parts, whole, shards)

    def _write(self, step: int, meta: str, write: Callable[[Path], dict[str, LeafRecord]]) -> None:
        """Process 0 says twice how it is: when the folder is there, and in the end; a problem is the last word."""
        if self._leads:
            try:
                super()._write(step, meta, write)
            except CheckpointError as error:
                self._group.tell(_SAVE, str(error))
                raise
            self._group.tell(_SAVE)
            return
        problem = self._group.tell(_SAVE)
        if not problem:
            write(self._files.path(step, "saving"))
            problem = self._group.tell(_SAVE)
        if problem:
            raise CheckpointError(problem)

    def _write_parts(
        self, whole: Mapping[str, tree.HostLeaf], shards: Mapping[str, Shards], folder: Path
    ) -> dict[str, LeafRecord]:
        """Writes this process's part; returns in process 0 what the manifest says of all."""
        records: dict[str, LeafRecord] = {}
        if self._leads:
            records = writer.write_snapshot(whole, folder)
            for path, leaf in shards.items():
                writer.reshape(folder, path, leaf.shape, leaf.chunk).unlink()
            self._group.tell(_SAVE)
        said = [json.loads(text) for text in self._group.gather("checkpoint/chunks", _write_chunks(folder, shards))]
        problems = [f"process {rank}: {one['problem']}" for rank, one in enumerate(said) if "problem" in one]
        if problems:
            raise CheckpointError("; ".join(problems))
        for path, leaf in shards.items() if self._leads else ():
            hashes = {name: digest for one in said for name, digest in one["hashes"].get(path, {}).items()}
            _check_chunks(folder / store.leaf_folder(path), path, leaf, hashes, self._group.size)
            records[path] = LeafRecord(leaf.shape, leaf.dtype, hash_chunks(hashes))
        return records


def snapshot(state: Any) -> tuple[dict[str, tree.HostLeaf], dict[str, Shards]]:
    """Copies to host memory what this process has of a state.

    Returns:
        (leaves, shards): of a leaf in several processes, the first holds one element, or none, and the second the
        shards that are this process's to write.
    """
    split: dict[str, Shards] = {}
    leaves = tree.leaf_paths(state)
    for path, leaf in leaves.items():
        if not isinstance(leaf, jax.Array) or leaf.is_deleted() or leaf.is_fully_addressable:
            continue  # as in one process
        if leaf.is_fully_replicated:
            leaves[path] = leaf.addressable_data(0)
            continue
        chunk = leaf.sharding.shard_shape(leaf.shape)
        own = [s for s in leaf.addressable_shards if s.replica_id == 0 and s.data is not None]
        for shard in own:
            shard.data.copy_to_host_async()
        split[path] = Shards(leaf.shape, chunk, str(leaf.dtype), {_name(s.index, chunk): s.data for s in own})
        leaves[path] = np.zeros([min(1, n) for n in leaf.shape], leaf.dtype)
    host = tree.snapshot(jax.tree.unflatten(jax.tree.structure(state), leaves.values()))
    arrays = {
        path: dataclasses.replace(one, pieces={name: np.array(data, order="C") for name, data in one.pieces.items()})
        for path, one in split.items()
    }
    return host, arrays


def _name(index: tuple[slice, ...], chunk: tuple[int, ...]) -> str:
    """The zarr chunk that a shard is."""
    return ".".join(str((part.start or 0) // size) for part, size in zip(index, chunk, strict=True))


def _write_chunks(folder: Path, shards: Mapping[str, Shards]) -> str:
    """Writes this process's shards; JSON of their hashes, or of what went wrong."""
    hashes: dict[str, dict[str, str]] = {}
    try:
        for path, leaf in shards.items():
            hashes[path] = {}
            for name, piece in leaf.pieces.items():
                hashes[path][name] = hash_array(piece)
                with open(folder / store.leaf_folder(path) / name, "wb") as file:
                    file.write(piece.reshape(-1).view(np.uint8).data)
                    file.flush()
                    os.fsync(file.fileno())
    except Exception as error:
        return json.dumps({"problem": f"{type(error).__name__}: {error}"})
    return json.dumps({"hashes": hashes})


def _check_chunks(folder: Path, path: str, leaf: Shards, hashes: Mapping[str, str], processes: int) -> None:
    """Whether all chunks were written, and can be seen from here."""
    grid = [whole // part for whole, part in zip(leaf.shape, leaf.chunk, strict=True)]
    if len(hashes) != math.prod(grid):
        raise CheckpointError(f"leaf {path} has {math.prod(grid)} shards, and the processes wrote {len(hashes)}.")
    unseen = [name for name in hashes if not (folder / name).exists()]
    if unseen:
        raise CheckpointError(
            f"process 0 does not see {len(unseen)} files that the others wrote, such as {folder / unseen[0]}: "
            f"the {processes} processes do not share a file system there. Choose a directory that they share."
        )
