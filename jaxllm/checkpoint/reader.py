"""Reading checkpoints: nothing leaves this file unverified."""

from __future__ import annotations

import concurrent.futures
import json
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from jaxllm.checkpoint import manifest as manifest_lib
from jaxllm.checkpoint import store
from jaxllm.checkpoint.directory import Directory
from jaxllm.checkpoint.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from jaxllm.checkpoint.manifest import LeafRecord, Manifest
from jaxllm.files import release

META = "meta.json"
HASHERS = min(8, os.cpu_count() or 1)
"""Threads that hash; hashlib releases the GIL."""


class Reader:
    """Verified contents of the checkpoints in one directory, and the messages about damaged ones."""

    def __init__(self, files: Directory):
        self._files = files

    def existing(self, step: int | None) -> int:
        """`step`, or the newest if None.

        Raises:
            CheckpointNotFoundError: there is none.
        """
        steps = self._files.steps()
        if step is None:
            if not steps:
                raise CheckpointNotFoundError(f"there is no checkpoint in {self._files.root}.")
            return steps[-1]
        if step not in steps:
            raise self._not_found(step)
        return step

    def manifest(self, step: int) -> Manifest:
        """What the checkpoint of `step` holds.

        Raises:
            CheckpointNotFoundError: no such step.
            CheckpointCorruptError: the manifest is damaged.
        """
        try:
            manifest = Manifest.from_json((self._files.path(step) / manifest_lib.NAME).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise self._not_found(step) from None
        except OSError as error:
            raise CheckpointError(f"the manifest of {self.where(step)} cannot be read: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._corrupt(step, str(error), file=manifest_lib.NAME) from error
        if manifest.step != step:
            raise self._corrupt(step, f"it was saved as step {manifest.step}", file=manifest_lib.NAME)
        return manifest

    def meta(self, step: int, manifest: Manifest) -> dict[str, Any]:
        """The JSON saved along."""
        self._check_files(step, manifest, [META])
        return json.loads((self._files.path(step) / META).read_text(encoding="utf-8"))

    def leaves(self, step: int, manifest: Manifest, wanted: Mapping[str, LeafRecord]) -> dict[str, np.ndarray]:
        """Values of the wanted leaves, read without touching the others, equal to what was saved.

        Raises:
            CheckpointCorruptError: naming leaf and file.
        """
        others = {store.leaf_folder(p) for p in manifest.leaves if p not in wanted}
        self._check_files(step, manifest, [name for name in manifest.files if _folder(name) not in others])
        try:
            arrays = store.read_arrays(self._files.path(step), wanted)
        except store.LeafReadError as error:
            raise self._corrupt(step, f"it cannot be read ({error.__cause__})", leaf=error.leaf) from error
        with concurrent.futures.ThreadPoolExecutor(HASHERS) as pool:
            found = pool.map(lambda p: self._hash(step, manifest, p, arrays[p]), arrays)
            hashes = dict(zip(arrays, found, strict=True))
        for path, leaf in wanted.items():
            if hashes[path] != leaf.hash:
                raise self._corrupt(step, "its values do not match the hash in the manifest", leaf=path)
        return arrays

    def mapped(self, step: int, manifest: Manifest, wanted: Mapping[str, LeafRecord]) -> dict[str, np.ndarray]:
        """The wanted leaves as read-only views of their files, compared with their hashes a piece at a time.

        Raises:
            CheckpointCorruptError: naming leaf and file.
        """
        folders = {store.leaf_folder(p): p for p in wanted}
        names = [name for name in manifest.files if _folder(name) in folders]
        self._check_files(step, manifest, names)
        files = {folders[_folder(n)]: self._files.path(step) / n for n in names if not n.endswith("/.zarray")}
        arrays: dict[str, np.ndarray] = {}
        for path, leaf in wanted.items():
            if leaf.empty or leaf.chunked:
                arrays |= self.leaves(step, manifest, {path: leaf})
                continue
            try:
                arrays[path] = store.map_array(files[path], leaf)
            except (KeyError, ValueError) as error:
                raise self._corrupt(step, "its file does not hold its values", leaf=path) from error
            if manifest_lib.hash_pieces(_pieces(arrays[path])) != leaf.hash:
                raise self._corrupt(step, "its values do not match the hash in the manifest", leaf=path)
        return arrays

    def _hash(self, step: int, manifest: Manifest, path: str, array: np.ndarray) -> str:
        """A leaf's hash: of its values, or of its files where several processes wrote them."""
        if not manifest.leaves[path].chunked:
            return manifest_lib.hash_array(array)
        folder = store.leaf_folder(path)
        names = [name for name in manifest.files if _folder(name) == folder and not name.endswith("/.zarray")]
        hashes = {n.rsplit("/", 1)[1]: manifest_lib.hash_file(self._files.path(step) / n) for n in names}
        return manifest_lib.hash_chunks(hashes)

    def is_whole(self, step: int) -> bool:
        """Whether the manifest is sound and every file has its size; contents are not read."""
        try:
            manifest = self.manifest(step)
            self._check_files(step, manifest, manifest.files, contents=False)
        except CheckpointError:
            return False
        return True

    def where(self, step: int) -> str:
        """The checkpoint's name in messages."""
        return f"the checkpoint of step {step} in {self._files.root}"

    def _check_files(self, step: int, manifest: Manifest, names: Collection[str], *, contents: bool = True) -> None:
        """Compares files with the manifest: size, and hash for those that hold no array data."""
        owner = {store.leaf_folder(p): p for p in manifest.leaves}
        for name in names:
            expected = manifest.files[name]
            file, leaf = self._files.path(step) / name, owner.get(_folder(name))
            try:
                size = file.stat().st_size
                if size != expected.bytes:
                    raise self._corrupt(step, f"it has {size} bytes instead of {expected.bytes}", leaf=leaf, file=name)
                if contents and expected.hash and manifest_lib.hash_bytes(file.read_bytes()) != expected.hash:
                    raise self._corrupt(step, "its bytes do not match the manifest", leaf=leaf, file=name)
            except (FileNotFoundError, NotADirectoryError):
                raise self._corrupt(step, "it is missing", leaf=leaf, file=name) from None
            except OSError as error:
                raise CheckpointError(f"{file} cannot be read: {error}") from error

    def _corrupt(self, step: int, what: str, *, leaf: str | None = None, file: str | None = None):
        """The error for a damaged checkpoint: where, what, and which others there are."""
        place = ", ".join(text for text in (leaf and f"leaf {leaf}", file and f"file {file}") if text)
        others = [s for s in self._files.steps() if s != step]
        advice = (
            f"Restore another step instead, such as restore(step={others[-1]}) (here: {_list(others)}), "
            "or let resume() find the newest good one."
            if others
            else "There is no other checkpoint here."
        )
        finding = f"{self.where(step)} is corrupt: {place}: {what}."
        return CheckpointCorruptError(finding, advice, step=step, leaf=leaf, file=file)

    def _not_found(self, step: int) -> CheckpointNotFoundError:
        present = self._files.steps()
        held = f"it holds {_list(present)}" if present else "it holds none"
        return CheckpointNotFoundError(f"there is no checkpoint of step {step} in {self._files.root}: {held}.")


def _pieces(array: np.ndarray, size: int = 2**24) -> Iterator[memoryview]:
    """The bytes of a mapped array; those that were read are let go."""
    data = array.reshape(-1).view(np.uint8)
    for begin in range(0, data.size, size):
        yield data[begin : begin + size].data
        release([array])


def _folder(name: str) -> str:
    """The leaf's folder that a file is in, as `store.leaf_folder` names it."""
    return "/".join(name.split("/")[:2])


def _list(steps: Collection[int]) -> str:
    return ("step " if len(steps) == 1 else "steps ") + ", ".join(map(str, steps))
