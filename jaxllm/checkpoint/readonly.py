"""Read-only checkpoint access: lists, verifies, maps and restores checkpoints without changing the directory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from jaxllm.checkpoint.checkpoint_reader import CheckpointLeaf, CheckpointReader, Progress, map_in_order
from jaxllm.checkpoint.errors import CheckpointCorruptError, CheckpointError
from jaxllm.checkpoint.restore import EXACT, RestoreOptions, check_match, place_leaf, require_arrays
from jaxllm.checkpoint.storage import leaf_paths
from jaxllm.checkpoint.storage.checkpoint_manifest import LeafRecord, Manifest
from jaxllm.checkpoint.storage.file_systems import FileSystem, LocalFiles
from jaxllm.checkpoint.storage.step_directories import StepDirectories

_log = logging.getLogger("jaxllm.checkpoint")
_T = TypeVar("_T")


class RestoredCheckpoint(NamedTuple):
    """Checkpoint that `Checkpointer.resume` restored: its step, state and meta."""

    step: int
    state: Any
    meta: dict[str, Any]


class ReadOnlyCheckpointer:
    """Read-only access to the checkpoints of one directory; everything that it returns is verified."""

    def __init__(self, directory: str | os.PathLike | FileSystem):
        self._directory = StepDirectories(directory)
        self._reader = CheckpointReader(self._directory)
        self.directory = self._at("")

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending; checkpoints being saved or deleted are excluded."""
        return self._directory.steps()

    def set_aside(self) -> list[str]:
        """Names of the folders that were set aside, as corrupt or by `set_aside_after`."""
        return self._directory.set_aside_folders()

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint, without verifying its contents; None if there is none."""
        return max(self.steps(), default=None)

    def read_meta(self, step: int | None = None) -> dict[str, Any]:
        """Reads the `meta` saved with a step (default: the newest), verified."""
        step = self._reader.resolve_step(step)
        return self._reader.meta(step, self._reader.manifest(step))

    def manifest(self, step: int | None = None) -> Manifest:
        """Manifest of a step (default: the newest): every leaf's shape, dtype and content hash. Reads no array.

        Raises:
            CheckpointNotFoundError: no such step.
            CheckpointCorruptError: the manifest is damaged.
        """
        return self._reader.manifest(self._reader.resolve_step(step))

    def verify(self, step: int | None = None, progress: Progress | None = None) -> None:
        """Reads a whole checkpoint (default: the newest) and compares it with its manifest.

        Raises:
            CheckpointCorruptError: names the leaf or file.
        """
        self._reader.verify(self._reader.resolve_step(step), progress)

    def latest_good(self) -> int | None:
        """Newest step that passes `verify`; None if the directory has no checkpoint at all.

        Newer corrupt checkpoints are logged as errors and, by a writer, renamed to `corrupt_*`.

        Raises:
            CheckpointCorruptError: checkpoints exist and none is good; whether to start afresh is the user's decision.
        """
        found = self._newest_good(self.verify)
        return None if found is None else found[0]

    def restore(
        self, abstract_state: Any = None, step: int | None = None, reading: RestoreOptions = EXACT
    ) -> tuple[Any, dict[str, Any]]:
        """Reads and verifies a checkpoint and places it as `abstract_state` requests (resharding on restore).

        Args:
            abstract_state: pytree of `jax.ShapeDtypeStruct` or jax arrays, whose shardings (of any mesh; without one,
                the default device) the result takes, or numpy arrays for leaves that stay in host memory. None:
                nested dicts of numpy arrays of everything that was saved.
            step: the checkpoint; default: the newest.
            reading: options for other names, another dtype, or a partial restore.

        Returns:
            (state, meta).

        Raises:
            CheckpointNotFoundError: no such step.
            CheckpointCorruptError: names step, leaf or file, and the other steps.
            CheckpointMismatchError: leaves, shapes or dtypes differ from the saved ones.
        """
        step = self._reader.resolve_step(step)
        manifest = self._reader.manifest(step)
        meta = self._reader.meta(step, manifest)
        return self._restore(step, manifest, manifest.leaves, abstract_state, reading), meta

    def restore_params(
        self,
        abstract_params: Any = None,
        step: int | None = None,
        *,
        prefix: str = "params",
        reading: RestoreOptions = EXACT,
        beside: Collection[str] = (),
    ) -> tuple[Any, dict[str, Any]]:
        """Restores one subtree of the state, such as the parameters without the optimizer state.

        Args:
            abstract_params: as in `restore`, for the subtree.
            step: the checkpoint; default: the newest.
            prefix: path of the subtree in the saved state, such as `params` or `opt_state/0`.
            reading: as in `restore`; its paths are those of the whole state.
            beside: paths in the subtree of leaves that stay in the checkpoint where it has them.

        Returns:
            (subtree, meta).

        Raises:
            CheckpointError: as in `restore`.
        """
        step = self._reader.resolve_step(step)
        manifest = self._reader.manifest(step)
        inside = {p: leaf for p, leaf in manifest.leaves.items() if p == prefix or p.startswith(prefix + "/")}
        if not inside:
            tops = sorted({p.split("/")[0] for p in manifest.leaves})
            where = self._reader.describe_step(step)
            raise CheckpointError(f"{where} has nothing below {prefix!r}: it has {', '.join(tops)}.")
        inside = {p: leaf for p, leaf in inside.items() if p.removeprefix(prefix + "/") not in beside}
        meta = self._reader.meta(step, manifest)
        return self._restore(step, manifest, inside, abstract_params, reading, prefix), meta

    def map_leaves(self, step: int | None = None, *, prefix: str = "params") -> dict[str, np.ndarray]:
        """Memory-mapped leaves of one subtree by their path in it: verified, read-only views of the files.

        Their data is in memory only while it is used (`jaxllm.files.release`).

        Args:
            step: the checkpoint; default: the newest.
            prefix: as in `restore_params`; a subtree that was not saved has no leaves.

        Raises:
            CheckpointNotFoundError: no such step.
            CheckpointCorruptError: names leaf and file.
        """
        leaves = self.open_leaves(step, prefix=prefix)
        return {path.removeprefix(prefix + "/"): leaf.mapped() for path, leaf in leaves.items()}

    def open_leaves(self, step: int | None = None, *, prefix: str = "") -> dict[str, CheckpointLeaf]:
        """Opens the leaves of a checkpoint for reading slice by slice; each slice is verified when it is read.

        Args:
            step: the checkpoint; default: the newest.
            prefix: path of a subtree; empty for all leaves.
        """
        step = self._reader.resolve_step(step)
        manifest = self._reader.manifest(step)
        inside = [path for path in manifest.leaves if not prefix or path.startswith(prefix + "/")]
        return self._reader.leaves(step, manifest, inside)

    def resume(self, abstract_state: Any) -> RestoredCheckpoint | None:
        """Resumes: restores the newest good checkpoint as `restore` does, reading it once.

        A newer corrupt checkpoint is skipped: it is logged as an error and, by a writer, renamed to `corrupt_*`.
        A mismatch is an error at once.

        Returns:
            The restored checkpoint; None if the directory has no checkpoint.

        Raises:
            CheckpointCorruptError: checkpoints exist and none is good.
            CheckpointMismatchError: leaves, shapes or dtypes differ from the saved ones.
        """
        found = self._newest_good(lambda step: self.restore(abstract_state, step))
        return None if found is None else RestoredCheckpoint(found[0], *found[1])

    def _restore(
        self,
        step: int,
        manifest: Manifest,
        saved: Mapping[str, LeafRecord],
        abstract: Any,
        reading: RestoreOptions,
        prefix: str = "",
    ) -> Any:
        """Reads leaves among `saved` (below `prefix`) and builds the tree that `abstract` requests."""
        if abstract is None:
            targets: dict[str, Any] = {p: np.empty(0, leaf.stored_dtype) for p, leaf in saved.items()}
        else:
            targets = {_join(prefix, p): leaf for p, leaf in leaf_paths.leaf_paths(abstract).items()}
            require_arrays(targets)
            check_match(targets, saved, self._reader.describe_step(step), reading)
        sources = {path: reading.source(path) for path in targets}
        found = {path: source for path, source in sources.items() if set(source.paths) <= saved.keys()}
        leaves = self._reader.leaves(step, manifest, dict.fromkeys(p for s in found.values() for p in s.paths))

        def put(path: str) -> Any:
            return place_leaf(path, found[path], leaves, targets[path])

        # PRNG keys go through compiled functions, which the processes of a group must call in the same order.
        keys = [path for path, source in found.items() if saved[source.paths[0]].key_impl is not None]
        plain = [path for path in found if path not in keys]
        records = {path: saved[found[path].paths[0]] for path in plain}
        placed = targets | map_in_order(plain, records, put) | {path: put(path) for path in keys}
        if abstract is None:
            return leaf_paths.nest({p[len(prefix) :].lstrip("/") or "value": leaf for p, leaf in placed.items()})
        return jax.tree.unflatten(jax.tree.structure(abstract), placed.values())

    def _newest_good(self, attempt: Callable[[int], _T]) -> tuple[int, _T] | None:
        """(step, result) of the newest step for which `attempt` finds no corruption; logs the corrupt ones."""
        bad: list[CheckpointCorruptError] = []
        for step in reversed(self.steps()):
            try:
                result = attempt(step)
            except CheckpointCorruptError as error:
                bad.append(error)
                continue
            for error in bad:
                where = self._set_corrupt_aside(error.step)
                _log.error("CORRUPT CHECKPOINT, going back to step %d: %s%s", step, error.finding, where)
            return step, result
        if not bad:
            return None
        raise CheckpointCorruptError(
            f"none of the {len(bad)} checkpoints in {self._directory} is good. The newest: {bad[0].finding}",
            "To start from scratch, move the directory away.",
            step=bad[0].step,
            leaf=bad[0].leaf,
            file=bad[0].file,
        ) from bad[0]

    def _set_corrupt_aside(self, step: int) -> str:
        """Sets a corrupt checkpoint aside, if this is a writer; a sentence about that for the log."""
        return ""

    def _at(self, name: str) -> Path | str:
        files = self._directory.files
        return files.path / name if isinstance(files, LocalFiles) else f"{files}/{name}".rstrip("/")


def _join(prefix: str, path: str) -> str:
    if not prefix:
        return path
    return prefix if path == "value" else f"{prefix}/{path}"
