"""Checkpointer: asynchronous checkpointing with atomic commit, retention and verified restore."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.checkpoint import checkpoint_writer, snapshot
from jaxllm.checkpoint.checkpoint_reader import META
from jaxllm.checkpoint.checkpoint_writer import HostMemoryBudget, StreamedLeaf
from jaxllm.checkpoint.config import CheckpointConfig
from jaxllm.checkpoint.errors import CheckpointError
from jaxllm.checkpoint.readonly import ReadOnlyCheckpointer, RestoredCheckpoint
from jaxllm.checkpoint.snapshot import CopyMode
from jaxllm.checkpoint.snapshot_leaf import SnapshotLeaf
from jaxllm.checkpoint.storage import array_store, leaf_hashing
from jaxllm.checkpoint.storage import checkpoint_manifest as manifest_lib
from jaxllm.checkpoint.storage.checkpoint_manifest import FileRecord, LeafRecord, Manifest
from jaxllm.checkpoint.storage.file_systems import FileSystem

__all__ = ["Checkpointer", "RestoredCheckpoint"]

COPY_MODES: dict[str, CopyMode] = {"lazy": "device", "overlapped": "later", "eager": "host", "blocking": "none"}


class Checkpointer(ReadOnlyCheckpointer):
    """Checkpointer of one run: saves and restores its state in one directory.

    Args:
        directory: contains one folder per step: a path, or a URL (gs://, s3://, memory://, ...).
        config: retention and saving mode.
        read_only: True for readers (evaluation, serving): nothing is created, locked, cleaned or renamed. A writer
            locks the directory at once and removes leftovers of killed writers.

    Attributes:
        stalls: step -> seconds for which its save blocked the caller.

    Raises:
        CheckpointBusyError: another writer has the directory.
    """

    def __init__(
        self,
        directory: str | os.PathLike | FileSystem,
        config: CheckpointConfig | None = None,
        *,
        read_only: bool = False,
    ):
        super().__init__(directory)
        self.config = config if config is not None else CheckpointConfig()
        self.read_only = read_only
        self.stalls: dict[int, float] = {}
        self._writer: threading.Thread | None = None
        self._failure: Exception | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._closed = False
        if not read_only:
            self._directory.acquire()

    # Saving

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> bool:
        """Saves `state` as the checkpoint of `step`.

        Returns as soon as its arrays may be donated (`config.saving`); of an overlapped save, they may be only after
        `wait_copied`. Readers see the checkpoint once all of it is on
        disk, never a part. A save in flight is waited for first; if it failed, this raises its error and saves nothing.

        Args:
            step: finished steps.
            state: any pytree of jax arrays (any dtype and sharding), typed PRNG keys, numpy arrays.
            meta: JSON: data cursor, config, fingerprints, versions.

        Returns:
            False if that step is on disk already (nothing is written); else True.

        Raises:
            CheckpointError: the state is not savable (the message names the leaf), `meta` is not JSON, later steps are
                on disk, or the disk refused.
        """
        began = time.monotonic()
        if (text := self._check_save(step, meta)) is None:
            return False
        step, how = int(step), self.config.saving
        if how == "auto":
            how = "lazy" if snapshot.has_room_for_copy(state) else "eager"
        leaves = self._capture(state, COPY_MODES[how])
        if how == "blocking":
            self._write(step, text, leaves)
        else:
            target = self._write_caught
            if how == "overlapped":
                self._copied.clear()
                target = self._fetch_and_write
            self._writer = threading.Thread(target=target, args=(step, text, leaves), name=f"save-{step}")
            del leaves  # the thread has the only reference to the arrays, and drops it once they are copied
            self._writer.start()
        self.stalls[step] = time.monotonic() - began
        return True

    def save_streamed(self, step: int, leaves: Mapping[str, StreamedLeaf], meta: Mapping[str, Any]) -> bool:
        """Saves a state that is never in memory as a whole: leaves by path, each in pieces.

        The checkpoint is the same as that of `save` for the same values. It is on disk when this returns.

        Raises:
            CheckpointError: as in `save`; its cause is the exception of a piece's iterator, if that raised.
        """
        if (text := self._check_save(step, meta)) is None:
            return False
        self._write(int(step), text, checkpoint_writer.streamed_leaves(leaves), one_at_a_time=True)
        return True

    def wait_copied(self) -> None:
        """Waits until the arrays of an overlapped save are in host memory, so that they may be donated."""
        self._copied.wait()

    def wait(self) -> None:
        """Waits until no save is in flight.

        Raises:
            CheckpointError: the save failed. Raised once; earlier checkpoints are untouched.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Waits for the save in flight and releases the directory's lock. A second call does nothing.

        Raises:
            CheckpointError: that save failed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            self._directory.release()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def set_aside_after(self, step: int) -> list[Path | str]:
        """Rollback: renames the checkpoints later than `step` to `aside_*`, so that training can continue from `step`.

        Returns:
            The new paths. Set-aside checkpoints no longer count as checkpoints and are not deleted by retention.
        """
        self._require_writer()
        self.wait()
        return [self._at(self._directory.set_aside(later, "aside")) for later in self.steps() if later > step]

    def collect(self, *, set_aside: bool = False, dry: bool = False) -> list[str]:
        """Garbage collection: deletes the checkpoints that retention does not keep.

        The newest checkpoint whose contents are verified is always kept.

        Args:
            set_aside: also delete folders that were set aside, as corrupt or by `set_aside_after`.
            dry: delete nothing.

        Returns:
            The names of the folders that are deleted, or would be with `dry`.
        """
        self._require_writer()
        self.wait()
        doomed = self._unretained()
        good = next((step for step in reversed(self.steps()) if self._is_good(step)), None) if doomed else None
        doomed = [step for step in doomed if step != good]
        names = [self._directory.folder(step) for step in doomed]
        extra = self._directory.set_aside_folders() if set_aside else []
        if not dry:
            for step in doomed:
                self._directory.delete(step)
            for name in extra:
                self._directory.files.remove(name)
        return names + extra

    # Inside

    def _check_save(self, step: int, meta: Mapping[str, Any]) -> str | None:
        """Returns `meta` as JSON text if `step` can be saved now, None if that step is on disk already."""
        self._require_writer()
        self.wait()
        if isinstance(step, bool) or not isinstance(step, int | np.integer) or step < 0:
            raise CheckpointError(f"step is {step!r}: give the number of finished steps, an int of 0 or more.")
        text, present = _meta_text(meta), self.steps()
        if step in present:
            return None
        if present and step < present[-1]:
            raise CheckpointError(
                f"{self._directory} has step {present[-1]}, later than step {step} to be saved, and a resume would "
                f"start there. After restoring an older step call set_aside_after(step), or save to another directory."
            )
        return text

    def _capture(self, state: Any, copy: CopyMode) -> dict[str, SnapshotLeaf]:
        return snapshot.capture(state, copy=copy)

    def _write_arrays(
        self, folder: str, leaves: Mapping[str, SnapshotLeaf], budget: HostMemoryBudget
    ) -> tuple[dict[str, LeafRecord], dict[str, FileRecord]]:
        """Writes the arrays into a folder; returns, when they are on disk, their records for the manifest."""
        files = self._directory.files
        described = checkpoint_writer.write_metadata(files, folder, leaves)
        written = checkpoint_writer.write_chunks(files, folder, leaves, budget)
        return checkpoint_writer.leaf_records(leaves, written), described | checkpoint_writer.file_records(written)

    def _write(self, step: int, meta: str, leaves: Mapping[str, SnapshotLeaf], one_at_a_time: bool = False) -> None:
        """Writes and atomically commits one checkpoint, then applies retention."""
        try:
            folder = self._directory.begin_save(step)
            budget = HostMemoryBudget(1 if one_at_a_time else self.config.host_bytes)
            records, files = self._write_arrays(folder, leaves, budget)
            files[META] = checkpoint_writer.write_file(self._directory.files, folder, META, meta.encode())
            manifest = Manifest(step, records, dict(sorted(files.items())), leaf_hashing.BLOCK_BYTES)
            checkpoint_writer.write_file(self._directory.files, folder, manifest_lib.NAME, manifest.to_json().encode())
            self._directory.commit(
                step, [name for name in (*files, manifest_lib.NAME) if not array_store.is_chunk(name)]
            )
        except Exception as error:
            self._directory.abandon(step)
            others = [s for s in self.steps() if s != step]
            raise CheckpointError(
                f"saving step {step} to {self._directory} failed: {type(error).__name__}: {error}. "
                + (f"Step {others[-1]} is the newest on disk." if others else "There is no earlier checkpoint.")
            ) from error
        self._retain(step)

    def _write_caught(self, step: int, meta: str, leaves: Mapping[str, SnapshotLeaf]) -> None:
        try:
            self._write(step, meta, leaves)
        except Exception as error:
            self._failure = error  # the next save, wait or close raises it

    def _fetch_and_write(self, step: int, meta: str, leaves: Mapping[str, SnapshotLeaf]) -> None:
        try:
            leaves = snapshot.fetch(leaves)
        except Exception as error:
            self._failure = CheckpointError(f"step {step} cannot be copied to the host: {error}")
            return
        finally:
            self._copied.set()
        self._write_caught(step, meta, leaves)

    def _unretained(self) -> list[int]:
        """Steps that retention deletes. Checkpoints with missing or truncated files neither count nor are deleted."""
        whole = [step for step in self.steps() if self._reader.is_complete(step)]
        return sorted(set(whole) - self.config.retained(whole))

    def _retain(self, saved: int) -> None:
        for step in self._unretained():
            if step == saved:
                continue
            try:
                self._directory.delete(step)
            except OSError as error:
                raise CheckpointError(
                    f"step {saved} is saved, but the old step {step} cannot be deleted: {error}"
                ) from error

    def _is_good(self, step: int) -> bool:
        try:
            self.verify(step)
        except CheckpointError:
            return False
        return True

    def _set_corrupt_aside(self, step: int) -> str:
        if self.read_only:
            return ""
        return f" It is now {self._at(self._directory.set_aside(step, 'corrupt'))}."

    def _require_writer(self) -> None:
        if self.read_only or self._closed:
            why = "was closed" if self._closed else "is read-only"
            raise CheckpointError(f"this Checkpointer of {self._directory} {why}: open a new one to save.")


def _meta_text(meta: Mapping[str, Any]) -> str:
    """Converts `meta` to JSON text, and checks that it reads back equal."""
    try:
        text = json.dumps(dict(meta), indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"meta is not JSON: {error}. Use dicts, lists, strings, numbers, None.") from error
    for key, value in json.loads(text).items():
        if key not in meta or (value != meta[key] and value == value):
            raise CheckpointError(
                f"meta[{key!r}] is {meta.get(key)!r}, which JSON changes to {value!r}: use str keys and lists."
            )
    return text
