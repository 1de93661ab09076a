"""SnapshotLeaf: a leaf of a snapshot, as the checkpoint writer takes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from jaxllm.checkpoint.storage import array_store


@dataclasses.dataclass(frozen=True)
class SnapshotLeaf:
    """Leaf of a snapshot, ready to be written.

    shape, dtype, key_impl: as in the manifest.
    array_shape, array_dtype: shape and dtype of the stored values (for typed PRNG keys, of the key data).
    chunk: shape of one chunk; the leaf's own shape if one process has all of it.
    parts: name -> call, for the chunks that this process writes; the call returns the chunk's values in C order, in
        pieces of any size.
    """

    shape: tuple[int, ...]
    dtype: str
    key_impl: str | None
    array_shape: tuple[int, ...]
    array_dtype: np.dtype
    chunk: tuple[int, ...]
    parts: Mapping[str, Callable[[], Iterable[np.ndarray]]]

    @property
    def split(self) -> bool:
        """Whether several processes write the leaf."""
        return self.chunk != self.array_shape


def single_chunk_leaf(
    shape: tuple[int, ...],
    dtype: np.dtype,
    pieces: Callable[[], Iterable[np.ndarray]],
    key: tuple[str, str] | None = None,
) -> SnapshotLeaf:
    """Leaf that one process writes as one chunk; `key` is the (dtype, implementation) of typed PRNG keys."""
    outer = shape[:-1] if key else shape
    name, impl = key or (str(dtype), None)
    return SnapshotLeaf(outer, name, impl, shape, dtype, shape, {array_store.single_chunk_name(shape): pieces})
