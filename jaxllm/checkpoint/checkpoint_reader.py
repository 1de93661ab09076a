"""Checkpoint reader: reads the manifest, the meta file and the leaves, and verifies all contents by their hashes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxllm.checkpoint.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from jaxllm.checkpoint.storage import array_store, leaf_hashing
from jaxllm.checkpoint.storage import checkpoint_manifest as manifest_lib
from jaxllm.checkpoint.storage.checkpoint_manifest import LeafRecord, Manifest
from jaxllm.checkpoint.storage.step_directories import StepDirectories
from jaxllm.checkpoint.storage.stored_leaf import CorruptDataError, Index, StoredLeaf

META = "meta.json"

Progress = Callable[[str, int, int], None]
"""Progress callback: progress(leaf, bytes done, total bytes)."""


class CheckpointLeaf:
    """Leaf of a checkpoint, open for reading; corrupt data raises an error that names the leaf."""

    def __init__(self, reader: CheckpointReader, step: int, stored: StoredLeaf):
        self._reader, self._step, self._stored = reader, step, stored
        self.record, self.shape, self.dtype = stored.record, stored.shape, stored.dtype

    def read(self, index: Index | None = None) -> np.ndarray:
        """Reads and verifies a slice of the values; the default is all of them."""
        with self._reader.naming_leaf(self._step, self._stored.path):
            return self._stored.read(index)

    def mapped(self) -> np.ndarray:
        """Verifies all values and returns them as a read-only, memory-mapped view of the file if possible."""
        with self._reader.naming_leaf(self._step, self._stored.path):
            return self._stored.mapped()

    def verify(self) -> None:
        """Reads all values and compares them with the leaf's content hash."""
        with self._reader.naming_leaf(self._step, self._stored.path):
            self._stored.verify()

    @property
    def bytes_read(self) -> int:
        """Bytes read from files so far."""
        return self._stored.bytes_read


class CheckpointReader:
    """Reader of the checkpoints in one directory: verifies contents and reports corrupt checkpoints."""

    def __init__(self, directory: StepDirectories):
        self._directory = directory
        self._files = directory.files

    def resolve_step(self, step: int | None) -> int:
        """Returns `step`, or the newest step if it is None.

        Raises:
            CheckpointNotFoundError: there is no such checkpoint.
        """
        steps = self._directory.steps()
        if step is None:
            if not steps:
                raise CheckpointNotFoundError(f"there is no checkpoint in {self._files}.")
            return steps[-1]
        if step not in steps:
            raise self._not_found(step)
        return step

    def manifest(self, step: int) -> Manifest:
        """Manifest of the checkpoint of `step`.

        Raises:
            CheckpointNotFoundError: no such step.
            CheckpointCorruptError: the manifest is damaged.
        """
        try:
            text = bytes(self._files.read(f"{self._directory.folder(step)}/{manifest_lib.NAME}"))
            manifest = Manifest.from_json(text)
        except FileNotFoundError:
            raise self._not_found(step) from None
        except OSError as error:
            raise CheckpointError(f"the manifest of {self.describe_step(step)} cannot be read: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._corrupt(step, str(error), file=manifest_lib.NAME) from error
        if manifest.step != step:
            raise self._corrupt(step, f"it was saved as step {manifest.step}", file=manifest_lib.NAME)
        return manifest

    def meta(self, step: int, manifest: Manifest) -> dict[str, Any]:
        """The `meta` that was saved with the checkpoint, verified."""
        return json.loads(self._verified_file(step, manifest, META))

    def leaves(self, step: int, manifest: Manifest, wanted: Collection[str]) -> dict[str, CheckpointLeaf]:
        """Opens leaves for reading; checks that their files exist with the right size, and verifies their metadata.

        Raises:
            CheckpointCorruptError: names the leaf and the file.
        """
        names: dict[str, list[str]] = {path: [] for path in wanted}
        for name in manifest.files:
            owner = manifest.owners.get(array_store.folder_of(name))
            if owner is None and name != META:
                self._verified_file(step, manifest, name)  # metadata of the tree
            elif owner in names:
                names[owner].append(name)

        def one(path: str) -> CheckpointLeaf:
            parts, head = {}, None
            for name in names[path]:
                last = name.rsplit("/", 1)[1]
                if last == array_store.ARRAY_METADATA:
                    head = self._verified_file(step, manifest, name)
                else:
                    self._check_size(step, manifest, name)
                    parts[last] = manifest.files[name]
            folder, record = self._directory.folder(step), manifest.leaves[path]
            with self.naming_leaf(step, path):
                stored = StoredLeaf(self._files, folder, path, record, parts, head, manifest.block)
            return CheckpointLeaf(self, step, stored)

        with ThreadPoolExecutor(leaf_hashing.HASH_THREADS) as pool:
            return dict(zip(names, pool.map(one, names), strict=True))

    def verify(self, step: int, progress: Progress | None = None) -> None:
        """Reads a whole checkpoint and compares it with its manifest."""
        manifest = self.manifest(step)
        self.meta(step, manifest)
        leaves = self.leaves(step, manifest, manifest.leaves)
        map_in_order(leaves, manifest.leaves, lambda path: leaves[path].verify(), progress)

    def is_complete(self, step: int) -> bool:
        """Whether the manifest is valid and every file has its size; contents are not read."""
        try:
            manifest = self.manifest(step)
            sizes = self._files.walk(self._directory.folder(step))
        except (CheckpointError, OSError):
            return False
        return all(sizes.get(name) == record.bytes for name, record in manifest.files.items())

    def describe_step(self, step: int) -> str:
        """Name of the checkpoint of `step` in messages."""
        return f"the checkpoint of step {step} in {self._files}"

    @contextlib.contextmanager
    def naming_leaf(self, step: int, leaf: str) -> Iterator[None]:
        """Context manager that attributes corrupt data found inside it to a leaf."""
        try:
            yield
        except CorruptDataError as error:
            file = error.file and f"{array_store.leaf_folder(leaf)}/{error.file}"
            raise self._corrupt(step, error.what, leaf=leaf, file=file) from error
        except FileNotFoundError as error:
            raise self._corrupt(step, "one of its files is missing", leaf=leaf) from error
        except OSError as error:
            raise CheckpointError(f"leaf {leaf} of {self.describe_step(step)} cannot be read: {error}") from error

    def _verified_file(self, step: int, manifest: Manifest, name: str) -> bytes:
        """Reads and verifies a file without array data."""
        leaf = self._check_size(step, manifest, name)
        try:
            data = bytes(self._files.read(f"{self._directory.folder(step)}/{name}"))
        except OSError as error:
            raise CheckpointError(f"{name} of {self.describe_step(step)} cannot be read: {error}") from error
        if leaf_hashing.hash_bytes(data) != manifest.files[name].hash:
            raise self._corrupt(step, "its bytes do not match the manifest", leaf=leaf, file=name)
        return data

    def _check_size(self, step: int, manifest: Manifest, name: str) -> str | None:
        """Checks the size of a file, and returns the leaf that it belongs to."""
        leaf = manifest.owners.get(array_store.folder_of(name))
        expected = manifest.files.get(name)
        if expected is None:
            raise self._corrupt(step, f"it lists no {name}", file=manifest_lib.NAME)
        try:
            size = self._files.size(f"{self._directory.folder(step)}/{name}")
        except OSError as error:
            raise CheckpointError(f"{name} of {self.describe_step(step)} cannot be read: {error}") from error
        if size is None:
            raise self._corrupt(step, "it is missing", leaf=leaf, file=name)
        if size != expected.bytes:
            raise self._corrupt(step, f"it has {size} bytes instead of {expected.bytes}", leaf=leaf, file=name)
        return leaf

    def _corrupt(self, step: int, what: str, *, leaf: str | None = None, file: str | None = None):
        """Error for a corrupt checkpoint: the place, the finding, and the other checkpoints."""
        place = ", ".join(text for text in (leaf and f"leaf {leaf}", file and f"file {file}") if text)
        others = [s for s in self._directory.steps() if s != step]
        advice = (
            f"Restore another step instead, such as restore(step={others[-1]}) (here: {_list(others)}), "
            "or call resume(), which finds the newest good one."
            if others
            else "There is no other checkpoint here."
        )
        finding = f"{self.describe_step(step)} is corrupt: {place}: {what}."
        return CheckpointCorruptError(finding, advice, step=step, leaf=leaf, file=file)

    def _not_found(self, step: int) -> CheckpointNotFoundError:
        present = self._directory.steps()
        held = f"it holds {_list(present)}" if present else "it holds none"
        return CheckpointNotFoundError(f"there is no checkpoint of step {step} in {self._files}: {held}.")


def map_in_order(
    leaves: Collection[str],
    records: Mapping[str, LeafRecord],
    work: Callable[[str], Any],
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Applies `work` to every leaf, several at a time; the results by path, in the order of `leaves`."""
    total, done = sum(records[path].nbytes for path in leaves), 0
    out = {}
    with ThreadPoolExecutor(leaf_hashing.HASH_THREADS) as pool:
        for path, result in zip(leaves, pool.map(work, leaves), strict=True):
            out[path] = result
            done += records[path].nbytes
            if progress is not None:
                progress(path, done, total)
    return out


def _list(steps: Collection[int]) -> str:
    return ("step " if len(steps) == 1 else "steps ") + ", ".join(map(str, steps))
