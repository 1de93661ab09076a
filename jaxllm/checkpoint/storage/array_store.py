"""Array store: arrays on disk in Orbax's format, one uncompressed zarr array per leaf in `state/<leaf>/`.

One folder per leaf (rather than Orbax's default OCDBT database) keeps a damaged file the damage of one named leaf,
and an uncompressed chunk is the array's bytes. Compression would cost up to five times the write (0.2 s against
0.4-1.1 s for 360 MB) for weights that hardly shrink. `orbax.checkpoint.PyTreeCheckpointer().restore(".../state")`
reads the same folder without this package.

Orbax writes the description of the tree, with one element per leaf, once for each kind of state; the bytes of the
arrays are written and read as files, so that they can be hashed on the way, in pieces, on any file system.

Only numpy's own dtypes and bfloat16 are stored as such. Narrower ones (float8, int4, ...) are not all known to zarr, so
they are stored as bytes (uint8, one per element); the manifest has their dtype.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.checkpoint.storage.leaf_paths import storage_keys

STATE_FOLDER = "state"
ARRAY_METADATA = ".zarray"


def leaf_folder(path: str) -> str:
    """Folder of a leaf inside the checkpoint."""
    return f"{STATE_FOLDER}/{'.'.join(storage_keys(path))}"


def folder_of(name: str) -> str:
    """Folder of the leaf that a file belongs to, as `leaf_folder` names it."""
    return "/".join(name.split("/")[:2])


def is_chunk(name: str) -> bool:
    """Whether a file holds array data."""
    return name.count("/") == 2 and not name.endswith(f"/{ARRAY_METADATA}")


def single_chunk_name(shape: tuple[int, ...]) -> str:
    """Name of the chunk of a leaf that has one."""
    return ".".join("0" for _ in shape) or "0"


def metadata_files(
    leaves: Mapping[str, tuple[tuple[int, ...], np.dtype, tuple[int, ...]]],
) -> dict[str, bytes]:
    """Files of a state that hold no array data, by name inside the checkpoint.

    Args:
        leaves: (shape, dtype, shape of a chunk) of every leaf with elements.
    """
    frame = _orbax_metadata(tuple((path, len(shape), str(dtype)) for path, (shape, dtype, _) in leaves.items()))
    files = dict(frame)
    for path, (shape, _, chunk) in leaves.items():
        name = f"{leaf_folder(path)}/{ARRAY_METADATA}"
        about = json.loads(frame[name]) | {"shape": shape, "chunks": chunk}
        files[name] = json.dumps(about, separators=(",", ":")).encode()
    return files


@functools.lru_cache(maxsize=4)
def _orbax_metadata(leaves: tuple[tuple[str, int, str], ...]) -> dict[str, bytes]:
    """Metadata files that Orbax writes for leaves of one element each."""
    if not leaves:
        return {}
    import orbax.checkpoint as ocp
    from etils import epath

    small: dict[str, Any] = {}
    for path, ndim, dtype in leaves:
        *parents, name = storage_keys(path)
        node = small
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = np.zeros((1,) * ndim, getattr(ml_dtypes, dtype, dtype))
    with tempfile.TemporaryDirectory() as folder:
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
        handler.save(epath.Path(folder) / STATE_FOLDER, args=ocp.args.PyTreeSave(small))
        files = {p.relative_to(folder).as_posix(): p for p in sorted(Path(folder).rglob("*")) if p.is_file()}
        return {n: p.read_bytes() for n, p in files.items() if n.count("/") == 1 or p.name == ARRAY_METADATA}


def stored_dtype(dtype: np.dtype) -> np.dtype:
    """Dtype in which zarr stores the values."""
    native = dtype.type.__module__ == "numpy" or dtype == ml_dtypes.bfloat16
    return dtype if native else np.dtype(np.uint8)
