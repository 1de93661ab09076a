"""Checkpoint manifest (manifest.json): the contents of a checkpoint and the hashes that verify them.

    {"format": 2, "step": 300, "block": 67108864,
     "leaves": {"params/blocks/wq": {"shape": [8, 512, 512], "dtype": "float32", "hash": "sha256:..."}},
     "files":  {"meta.json": {"bytes": 812, "hash": "sha256:..."},
                "state/params.blocks.wq/0.0.0": {"bytes": 8388608}},
     "digest": "sha256:..."}

A leaf's hash (`leaf_hashing`) does not depend on the layout it was saved from. It is computed from the host copy, not
from the written bytes, so a failed write shows too. Files that hold no array data carry a hash of their own, so no
unverified byte is ever parsed; so do the files of a leaf that several processes wrote, so that each is verified alone.
`digest` covers the manifest itself. The manifest is written last: a folder without one is not a checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.checkpoint.storage import leaf_hashing

FORMAT = 2
NAME = "manifest.json"


@dataclasses.dataclass(frozen=True)
class LeafRecord:
    """Manifest record of one leaf of the saved state."""

    shape: tuple[int, ...]
    dtype: str
    hash: str
    key_impl: str | None = None
    """Name of the PRNG for typed keys, whose stored bytes are the key data; None for plain arrays."""
    blocks: tuple[str, ...] = ()
    """Hashes of its blocks, if it has several."""

    @property
    def empty(self) -> bool:
        """Whether the leaf has no elements, and so no file."""
        return 0 in self.shape

    @functools.cached_property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the values on disk; for typed keys, of the key data."""
        if self.key_impl is None:
            return self.shape
        import jax

        inner = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=self.key_impl))).shape
        return (*self.shape, *inner)

    @property
    def stored_dtype(self) -> np.dtype:
        """Dtype of the values on disk."""
        return np.dtype(np.uint32) if self.key_impl is not None else dtype_from_name(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the values on disk."""
        return math.prod(self.stored_shape) * self.stored_dtype.itemsize


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """Manifest record of one file: its size in bytes and its hash (None for array data that a leaf's hash covers)."""

    bytes: int
    hash: str | None = None


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Manifest: the contents of one checkpoint."""

    step: int
    leaves: dict[str, LeafRecord]
    files: dict[str, FileRecord]
    block: int = leaf_hashing.BLOCK_BYTES
    """Bytes of one block of a leaf's hash."""

    @functools.cached_property
    def owners(self) -> dict[str, str]:
        """Leaves by their folder."""
        from jaxllm.checkpoint.storage.array_store import leaf_folder

        return {leaf_folder(path): path for path in self.leaves}

    @property
    def nbytes(self) -> int:
        """Bytes of all files except the manifest."""
        return sum(file.bytes for file in self.files.values())

    def to_json(self) -> str:
        """The manifest as JSON text, with its digest."""
        body: dict[str, Any] = {"format": FORMAT, "step": self.step, "block": self.block}
        body["leaves"] = {path: _without_none(leaf) for path, leaf in self.leaves.items()}
        body["files"] = {name: _without_none(file) for name, file in self.files.items()}
        body["digest"] = _digest(body)
        return json.dumps(body, indent=1)

    @staticmethod
    def from_json(text: str | bytes) -> Manifest:
        """Parses and checks a manifest.

        Raises:
            ValueError: not a manifest of this format, or its digest does not match; the message states which.
        """
        body = json.loads(text)
        if not isinstance(body, dict) or "format" not in body or "digest" not in body:
            raise ValueError("it is not a checkpoint manifest")
        digest = body.pop("digest")
        if body["format"] == FORMAT and digest != _digest(body):
            raise ValueError("its bytes do not match its own digest")
        if body["format"] != FORMAT:
            raise ValueError(f"its format is {body['format']!r}, but this version of jaxllm reads format {FORMAT}")
        leaves = {
            p: LeafRecord(**{**leaf, "shape": tuple(leaf["shape"]), "blocks": tuple(leaf.get("blocks", ()))})
            for p, leaf in body["leaves"].items()
        }
        files = {n: FileRecord(**file) for n, file in body["files"].items()}
        return Manifest(body["step"], leaves, files, body["block"])


def dtype_from_name(name: str) -> np.dtype:
    """Dtype of a leaf's record, including those of ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, name, name))


def _digest(body: dict[str, Any]) -> str:
    return leaf_hashing.hash_bytes(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _without_none(record: LeafRecord | FileRecord) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(record).items() if value not in (None, ())} | (
        {"shape": record.shape} if isinstance(record, LeafRecord) else {}
    )
