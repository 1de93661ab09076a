"""The Checkpointer: save in the background, commit in one rename, verify on the way back."""

from __future__ import annotations

import functools
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from jaxllm.checkpoint import manifest as manifest_lib
from jaxllm.checkpoint import store, tree, writer
from jaxllm.checkpoint.config import CheckpointConfig
from jaxllm.checkpoint.directory import Directory, write_synced
from jaxllm.checkpoint.errors import CheckpointCorruptError, CheckpointError
from jaxllm.checkpoint.manifest import LeafRecord, Manifest
from jaxllm.checkpoint.reader import META, Reader
from jaxllm.checkpoint.writer import StreamedLeaf

_log = logging.getLogger("jaxllm.checkpoint")
_T = TypeVar("_T")


class Resumed(NamedTuple):
    """What `Checkpointer.resume` found."""

    step: int
    state: Any
    meta: dict[str, Any]


class Checkpointer:
    """Saves and restores the state of one run in one local directory.

    Args:
        directory: holds the checkpoints, one folder a step.
        config: how often, how many, in the background or not.
        read_only: True for readers (eval, serving): nothing is created, locked, cleaned or renamed. A writer takes
            the directory's lock at once and removes what killed writers left there.

    Raises:
        CheckpointBusyError: another writer has the directory.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        config: CheckpointConfig | None = None,
        *,
        read_only: bool = False,
    ):
        self.config = config if config is not None else CheckpointConfig()
        self.directory = Path(os.path.abspath(directory))
        self.read_only = read_only
        self._files = Directory(directory)
        self._reader = Reader(self._files)
        self._writer: threading.Thread | None = None
        self._failure: Exception | None = None
        self._closed = False
        if not read_only:
            self._files.acquire()

    # Saving

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> bool:
        """Saves `state` as the checkpoint of `step`.

        Returns as soon as the state is copied to host memory (`config.asynchronous`): its arrays may then be donated.
        The checkpoint is there for readers once everything is on disk, never in part. A save still in flight is waited
        for first; if it failed, this raises its error and saves nothing.

        Args:
            step: finished steps.
            state: any pytree of jax arrays (any dtype and sharding), typed PRNG keys, numpy arrays.
            meta: JSON: data cursor, config, fingerprints, versions.

        Returns:
            False, and nothing is written, if that step is on disk already; else True.

        Raises:
            CheckpointError: the state is not savable (the message names the leaf), `meta` is not JSON, later steps are
                on disk, or the disk refused.
        """
        if (text := self._admit(step, meta)) is None:
            return False
        step, write = int(step), self._snapshot(state)
        if not self.config.asynchronous:
            self._write(step, text, write)
            return True
        self._writer = threading.Thread(target=self._write_caught, args=(step, text, write), name=f"save-{step}")
        self._writer.start()
        return True

    def save_streamed(self, step: int, leaves: Mapping[str, StreamedLeaf], meta: Mapping[str, Any]) -> bool:
        """`save` of a state that is never in memory as a whole: its leaves come by path, in pieces.

        The checkpoint is the one that `save` makes of the same values. It is on disk when this returns.

        Raises:
            CheckpointError: as in `save`; its cause is what went wrong, if that was in the making of a piece.
        """
        if (text := self._admit(step, meta)) is None:
            return False
        self._write(int(step), text, functools.partial(writer.write_streamed, leaves))
        return True

    def _admit(self, step: int, meta: Mapping[str, Any]) -> str | None:
        """`meta` as text if `step` can be saved now; None if it is on disk already."""
        self._require_writer()
        self.wait()
        if isinstance(step, bool) or not isinstance(step, int | np.integer) or step < 0:
            raise CheckpointError(f"step is {step!r}: give the number of finished steps, an int from 0.")
        text, present = _meta_text(meta), self.steps()
        if step in present:
            return None
        if present and step < present[-1]:
            raise CheckpointError(
                f"{self.directory} holds step {present[-1]}, later than step {step} to be saved, and would resume "
                f"there. After restoring an older step call set_aside_after(step), or save into another directory."
            )
        return text

    def wait(self) -> None:
        """Returns when no save is in flight.

        Raises:
            CheckpointError: the save failed. Reported once; earlier checkpoints are untouched.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Waits for the save in flight and lets another writer in. A second call does nothing.

        Raises:
            CheckpointError: that save failed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            self._files.release()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def set_aside_after(self, step: int) -> list[Path]:
        """Renames the checkpoints later than `step` to `aside_*`, so that training can go on from there another way.

        Returns:
            Where they are now. They no longer count and are never deleted.
        """
        self._require_writer()
        self.wait()
        return [self._files.set_aside(later, "aside") for later in self.steps() if later > step]

    # Looking

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending. One being saved or deleted is not among them."""
        return self._files.steps()

    def latest(self) -> int | None:
        """The newest complete checkpoint's step, its contents unchecked; None if there is none."""
        return max(self.steps(), default=None)

    def read_meta(self, step: int | None = None) -> dict[str, Any]:
        """The `meta` saved with a step (default: the newest), verified."""
        step = self._reader.existing(step)
        return self._reader.meta(step, self._reader.manifest(step))

    def manifest(self, step: int | None = None) -> Manifest:
        """Every leaf's shape, dtype and hash, without reading an array.

        Raises:
            CheckpointNotFoundError: no such step.
            CheckpointCorruptError: the manifest is damaged.
        """
        return self._reader.manifest(self._reader.existing(step))

    def verify(self, step: int | None = None) -> None:
        """Reads everything of a checkpoint and compares it with its manifest.

        Raises:
            CheckpointCorruptError: naming the leaf or file.
        """
        step = self._reader.existing(step)
        manifest = self._reader.manifest(step)
        self._reader.meta(step, manifest)
        self._reader.leaves(step, manifest, manifest.leaves)

    def latest_good(self) -> int | None:
        """The newest step that passes `verify`; None if the directory holds no checkpoint at all.

        Corrupt newer ones are reported (logged as errors) and, by a writer, renamed to `corrupt_*`.

        Raises:
            CheckpointCorruptError: checkpoints exist and none is good: starting afresh is the user's decision.
        """
        found = self._newest_good(self.verify)
        return None if found is None else found[0]

    # Restoring

    def restore(self, abstract_state: Any = None, step: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Reads and verifies a checkpoint and puts it where `abstract_state` says.

        Args:
            abstract_state: pytree of `jax.ShapeDtypeStruct` or jax arrays, whose shardings (of any mesh; none means the
                default device) the result takes, or numpy arrays for leaves to be left in host memory. None: nested
                dicts of numpy arrays, whatever was saved.
            step: default: the newest.

        Returns:
            (state, meta).

        Raises:
            CheckpointNotFoundError: no such step.
            CheckpointCorruptError: naming step, leaf or file, and the other steps.
            CheckpointMismatchError: other leaves, shapes or dtypes than saved.
        """
        step = self._reader.existing(step)
        manifest = self._reader.manifest(step)
        meta = self._reader.meta(step, manifest)
        return self._restore(step, manifest, manifest.leaves, abstract_state), meta

    def restore_params(
        self, abstract_params: Any = None, step: int | None = None, *, prefix: str = "params"
    ) -> tuple[Any, dict[str, Any]]:
        """Reads one subtree of the state only, such as the parameters without the optimizer's state.

        Args:
            abstract_params: as in `restore`, for the subtree.
            step: default: the newest.
            prefix: the subtree's path in the saved state, such as `params` or `opt_state/0`.

        Returns:
            (subtree, meta).

        Raises:
            CheckpointError: as in `restore`.
        """
        step = self._reader.existing(step)
        manifest = self._reader.manifest(step)
        inside = {p: leaf for p, leaf in manifest.leaves.items() if p == prefix or p.startswith(prefix + "/")}
        if not inside:
            tops = sorted({p.split("/")[0] for p in manifest.leaves})
            where = self._reader.where(step)
            raise CheckpointError(f"{where} has nothing below {prefix!r}: it holds {', '.join(tops)}.")
        meta = self._reader.meta(step, manifest)
        return self._restore(step, manifest, inside, abstract_params, prefix), meta

    def map_leaves(self, step: int | None = None, *, prefix: str = "params") -> dict[str, np.ndarray]:
        """One subtree's leaves by their path in it, verified, as read-only views of the checkpoint's files.

        What is read of them is in memory only while it is used (`jaxllm.files.release`).

        Args:
            step: default: the newest.
            prefix: as in `restore_params`; a subtree that was not saved has no leaves.

        Raises:
            CheckpointNotFoundError: no such step.
            CheckpointCorruptError: naming leaf and file.
        """
        step = self._reader.existing(step)
        manifest = self._reader.manifest(step)
        inside = {p: leaf for p, leaf in manifest.leaves.items() if p.startswith(prefix + "/")}
        return {p.removeprefix(prefix + "/"): a for p, a in self._reader.mapped(step, manifest, inside).items()}

    def resume(self, abstract_state: Any) -> Resumed | None:
        """Restores the newest good checkpoint, as `restore` does, reading it once.

        A corrupt newer one is stepped over: logged as an error and, by a writer, renamed to `corrupt_*`.
        A mismatch is an error at once.

        Returns:
            None if the directory holds no checkpoint.

        Raises:
            CheckpointCorruptError: checkpoints exist and none is good.
            CheckpointMismatchError: other leaves, shapes or dtypes than saved.
        """
        found = self._newest_good(lambda step: self.restore(abstract_state, step))
        return None if found is None else Resumed(found[0], *found[1])

    # Inside

    def _restore(
        self, step: int, manifest: Manifest, leaves: Mapping[str, LeafRecord], abstract: Any, prefix: str = ""
    ) -> Any:
        """Reads `leaves` (below `prefix`) and builds the tree that `abstract` asks for."""
        if abstract is None:
            targets: dict[str, Any] = {p: np.empty(0) for p in leaves}
        else:
            given = tree.leaf_paths(abstract)
            targets = {_join(prefix, p): leaf for p, leaf in given.items()}
            tree.require_arrays(targets)
            tree.check_match(targets, leaves, self._reader.where(step))
        arrays = self._reader.leaves(step, manifest, leaves)
        placed = {}
        for path, target in targets.items():
            placed[path] = tree.place(path, arrays.pop(path), leaves[path], target)
        if abstract is None:
            return tree.nest({p[len(prefix) :].lstrip("/") or "value": leaf for p, leaf in placed.items()})
        return jax.tree.unflatten(jax.tree.structure(abstract), placed.values())

    def _snapshot(self, state: Any) -> Callable[[Path], dict[str, LeafRecord]]:
        """Copies the state to host memory; what is returned writes it into a folder."""
        return functools.partial(writer.write_snapshot, tree.snapshot(state))

    def _write(self, step: int, meta: str, write: Callable[[Path], dict[str, LeafRecord]]) -> None:
        """Writes and commits one checkpoint, whose arrays `write` puts into a folder; then applies retention."""
        try:
            folder = self._files.begin(step)
            records = write(folder)
            write_synced(folder / META, meta)
            data_folders = [f"{store.leaf_folder(p)}/" for p in records]
            manifest = Manifest(step, records, manifest_lib.scan_files(folder, data_folders))
            write_synced(folder / manifest_lib.NAME, manifest.to_json())
            self._files.commit(step)
        except Exception as error:
            self._files.abandon(step)
            others = [s for s in self.steps() if s != step]
            raise CheckpointError(
                f"saving step {step} to {self.directory} failed: {type(error).__name__}: {error}. "
                + (f"Step {others[-1]} is the newest on disk." if others else "There is no earlier checkpoint.")
            ) from error
        self._retain(step)

    def _write_caught(self, step: int, meta: str, write: Callable[[Path], dict[str, LeafRecord]]) -> None:
        try:
            self._write(step, meta, write)
        except Exception as error:
            self._failure = error  # raised by the next save, wait or close

    def _retain(self, saved: int) -> None:
        """Deletes what the config does not keep. Checkpoints with missing or cut files neither count nor go."""
        whole = [step for step in self.steps() if self._reader.is_whole(step)]
        for step in sorted(set(whole) - self.config.kept(whole) - {saved}):
            try:
                self._files.delete(step)
            except OSError as error:
                raise CheckpointError(
                    f"step {saved} is saved, but the old step {step} cannot be deleted: {error}"
                ) from error

    def _newest_good(self, attempt: Callable[[int], _T]) -> tuple[int, _T] | None:
        """The newest step for which `attempt` meets no corruption, and its result; reports the others loudly."""
        bad: list[CheckpointCorruptError] = []
        for step in reversed(self.steps()):
            try:
                result = attempt(step)
            except CheckpointCorruptError as error:
                bad.append(error)
                continue
            for error in bad:
                where = "" if self.read_only else f" It is now {self._files.set_aside(error.step, 'corrupt')}."
                _log.error("CORRUPT CHECKPOINT, going back to step %d: %s%s", step, error.finding, where)
            return step, result
        if not bad:
            return None
        raise CheckpointCorruptError(
            f"none of the {len(bad)} checkpoints in {self.directory} is good. The newest: {bad[0].finding}",
            "To start from scratch, move the directory away.",
            step=bad[0].step,
            leaf=bad[0].leaf,
            file=bad[0].file,
        ) from bad[0]

    def _require_writer(self) -> None:
        if self.read_only or self._closed:
            why = "was closed" if self._closed else "is read-only"
            raise CheckpointError(f"this Checkpointer of {self.directory} {why}: open a new one to save.")


def _join(prefix: str, path: str) -> str:
    if not prefix:
        return path
    return prefix if path == "value" else f"{prefix}/{path}"


def _meta_text(meta: Mapping[str, Any]) -> str:
    """`meta` as JSON that reads back equal."""
    try:
        text = json.dumps(dict(meta), indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"meta is not JSON: {error}. Give dicts, lists, strings, numbers, None.") from error
    for key, value in json.loads(text).items():
        if key not in meta or (value != meta[key] and value == value):
            raise CheckpointError(
                f"meta[{key!r}] is {meta.get(key)!r}, which JSON changes to {value!r}: use str keys and lists."
            )
    return text
