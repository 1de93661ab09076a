"""manifest.json: what a checkpoint holds, and the hashes that prove it still does.

    {"format": 1, "step": 300,
     "leaves": {"params/blocks/wq": {"shape": [8, 512, 512], "dtype": "float32", "hash": "sha256:..."}},
     "files":  {"meta.json": {"bytes": 812, "hash": "sha256:..."},
                "state/params.blocks.wq/0.0.0": {"bytes": 8388608}},
     "digest": "sha256:..."}

A leaf's hash is over its whole array in C order, so it is the same whatever mesh it was saved from; only that of a leaf
that several processes wrote is over the hashes of their chunks (``chunks:...``). It is taken from the host copy before
anything is written: a write that went wrong shows too. Files that hold no array data carry a
hash of their own, so no unverified byte is ever parsed; `digest` covers the manifest itself. The manifest is written
last: a folder without one is no checkpoint.

SHA-256 because it is the fastest of hashlib's strong hashes where the CPU has SHA instructions (1.6 GB/s a core
against 1.4 for blake2b) and because `sha256sum` on an array's file gives the same digits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 1
NAME = "manifest.json"


@dataclasses.dataclass(frozen=True)
class LeafRecord:
    """One leaf of the saved state."""

    shape: tuple[int, ...]
    dtype: str
    hash: str
    key_impl: str | None = None
    """Name of the PRNG for typed keys, whose stored bytes are the key data; None for plain arrays."""

    @property
    def chunked(self) -> bool:
        """Whether several processes wrote it, each its own chunks."""
        return self.hash.startswith("chunks:")

    @property
    def empty(self) -> bool:
        """A leaf without elements has no file."""
        return 0 in self.shape


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """One file of the checkpoint. `hash` is None for array data, which the leaf's hash covers."""

    bytes: int
    hash: str | None = None


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Contents of one checkpoint."""

    step: int
    leaves: dict[str, LeafRecord]
    files: dict[str, FileRecord]

    def to_json(self) -> str:
        body: dict[str, Any] = {"format": FORMAT, "step": self.step}
        body["leaves"] = {path: _without_none(leaf) for path, leaf in self.leaves.items()}
        body["files"] = {name: _without_none(file) for name, file in self.files.items()}
        body["digest"] = _digest(body)
        return json.dumps(body, indent=1)

    @staticmethod
    def from_json(text: str) -> Manifest:
        """Parses and checks a manifest.

        Raises:
            ValueError: not a manifest of this format, or its digest does not match; the message says which.
        """
        body = json.loads(text)
        if not isinstance(body, dict) or "format" not in body or "digest" not in body:
            raise ValueError("it is not a checkpoint manifest")
        digest = body.pop("digest")
        if body["format"] == FORMAT and digest != _digest(body):
            raise ValueError("its bytes do not match its own digest")
        if body["format"] != FORMAT:
            raise ValueError(f"its format is {body['format']!r}, and this version of jaxllm reads {FORMAT}")
        leaves = {p: LeafRecord(**{**leaf, "shape": tuple(leaf["shape"])}) for p, leaf in body["leaves"].items()}
        return Manifest(body["step"], leaves, {n: FileRecord(**file) for n, file in body["files"].items()})


def hash_bytes(data: bytes | memoryview) -> str:
    return hash_pieces([data])


def hash_pieces(pieces: Iterable[bytes | memoryview]) -> str:
    """Hash of bytes that come one piece after another."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return f"sha256:{digest.hexdigest()}"


def hash_array(array: np.ndarray) -> str:
    """Hash of an array's bytes in C order (any dtype; hashlib releases the GIL meanwhile)."""
    return hash_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def hash_file(file: Path) -> str:
    """Hash of a file's bytes."""
    with open(file, "rb") as data:
        return f"sha256:{hashlib.file_digest(data, 'sha256').hexdigest()}"


def hash_chunks(hashes: Mapping[str, str]) -> str:
    """Hash of a leaf in several chunks, from the hash of each by its name."""
    return f"chunks:{hash_bytes(json.dumps(dict(hashes), sort_keys=True).encode())}"


def scan_files(directory: Path, data_folders: Iterable[str]) -> dict[str, FileRecord]:
    """Records every file below `directory`; array data, i.e. files of `data_folders` but `.zarray`, by size only."""
    folders = tuple(data_folders)
    files = {}
    for file in sorted(p for p in directory.rglob("*") if p.is_file()):
        name = file.relative_to(directory).as_posix()
        data = name.startswith(folders) and file.name != ".zarray"
        files[name] = FileRecord(file.stat().st_size, None if data else hash_bytes(file.read_bytes()))
    return files


def _digest(body: dict[str, Any]) -> str:
    return hash_bytes(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _without_none(record: LeafRecord | FileRecord) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(record).items() if value is not None}
