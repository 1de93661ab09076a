"""Arrays on disk, written and read by Orbax: one zarr array per leaf, uncompressed, in `state/<leaf>/`.

One folder per leaf (rather than Orbax's default OCDBT database) keeps a damaged file the damage of one named leaf,
and an uncompressed chunk is the array's bytes. Compression would cost up to five times the write (0.2 s against
0.4-1.1 s for 360 MB) for weights that hardly shrink. `orbax.checkpoint.PyTreeCheckpointer().restore(".../state")`
reads the same folder without this package.

Only numpy's own dtypes and bfloat16 are stored as such. The narrower ones (float8, int4, ...) are not all known to
zarr, so they go to disk as their bytes (uint8, one an element); the manifest says what they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jaxllm.checkpoint.manifest import LeafRecord
from jaxllm.checkpoint.tree import storage_keys

FOLDER = "state"


def leaf_folder(path: str) -> str:
    """Folder of a leaf inside the checkpoint."""
    return f"{FOLDER}/{'.'.join(storage_keys(path))}"


def write_arrays(checkpoint: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes every array with elements below `checkpoint/state` and returns when they are on disk."""
    folder = checkpoint / FOLDER
    folder.mkdir()
    stored = {p: _as_stored(a) for p, a in arrays.items() if a.size}
    if stored:
        _handler().save(epath.Path(folder), args=ocp.args.PyTreeSave(_nested(stored)))


def map_array(file: Path, leaf: LeafRecord) -> np.ndarray:
    """A leaf's values as a read-only view of the file of its one chunk."""
    return np.memmap(file, np.uint8, "r").view(_dtype(leaf.dtype)).reshape(leaf.shape)


def read_arrays(checkpoint: Path, leaves: Mapping[str, LeafRecord]) -> dict[str, np.ndarray]:
    """Reads the named leaves. The bytes are not checked here.

    Raises:
        LeafReadError: naming the first leaf that cannot be read.
    """
    full = [p for p, leaf in leaves.items() if not leaf.empty]
    try:
        raw = _restore(checkpoint, full)
    except Exception:
        raw = {}
        for path in full:  # once more, one by one, to learn which leaf it was
            try:
                raw.update(_restore(checkpoint, [path]))
            except Exception as error:
                raise LeafReadError(path, error) from error
    return {p: _as_logical(raw.get(p), leaf) for p, leaf in leaves.items()}


class LeafReadError(Exception):
    """Orbax could not read one leaf."""

    def __init__(self, leaf: str, cause: Exception):
        super().__init__(f"{leaf}: {cause}")
        self.leaf = leaf


def _restore(checkpoint: Path, paths: Iterable[str]) -> dict[str, np.ndarray]:
    paths = list(paths)
    if not paths:
        return {}
    item = _nested(dict.fromkeys(paths, 0))
    how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    args = ocp.args.PyTreeRestore(item, restore_args=how, partial_restore=True)
    tree = _handler().restore(epath.Path(checkpoint / FOLDER), args=args)
    return {p: _lookup(tree, storage_keys(p)) for p in paths}


def _handler() -> ocp.PyTreeCheckpointHandler:
    return ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)


def _as_stored(array: np.ndarray) -> np.ndarray:
    return array if _native(array.dtype) else array.view(np.uint8)


def _as_logical(array: np.ndarray | None, leaf: LeafRecord) -> np.ndarray:
    dtype = np.dtype(np.uint32 if leaf.key_impl is not None else _dtype(leaf.dtype))
    if array is None:
        inner = () if leaf.key_impl is None else jax.random.key_data(jax.random.key(0, impl=leaf.key_impl)).shape
        return np.empty((*leaf.shape, *inner), dtype)
    return array if array.dtype == dtype or _native(dtype) else array.view(dtype)


def _native(dtype: np.dtype) -> bool:
    return dtype.type.__module__ == "numpy" or dtype == ml_dtypes.bfloat16


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = storage_keys(path)
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return root


def _lookup(tree: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        tree = tree[key]
    return tree
