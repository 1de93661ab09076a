"""Processes that save together, simulated by threads: each gives the leaves that it would have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxllm.checkpoint import CheckpointConfig, MultihostCheckpointer
from jaxllm.checkpoint.snapshot_leaf import SnapshotLeaf, single_chunk_leaf
from jaxllm.parallel.distributed import ProcessGroup


class Made(MultihostCheckpointer):
    """Saves leaves that are made already."""

    def _capture(self, state: Any, copy: Any) -> dict[str, SnapshotLeaf]:
        return state


def split(array: np.ndarray, chunk: tuple[int, ...], own: Callable[[tuple[int, ...]], bool]) -> SnapshotLeaf:
    """A leaf in several processes; this one has the chunks that are its own."""
    parts = {}
    for at in np.ndindex(*(n // c for n, c in zip(array.shape, chunk, strict=True))):
        if own(at):
            index = tuple(slice(i * c, (i + 1) * c) for i, c in zip(at, chunk, strict=True))
            parts[".".join(map(str, at))] = lambda index=index: [array[index]]
    return SnapshotLeaf(array.shape, str(array.dtype), None, array.shape, array.dtype, chunk, parts)


def leaves_of(state: Mapping[str, np.ndarray], chunks: Mapping[str, tuple[int, ...]], rank: int, size: int) -> Any:
    """Leaves of a state that process `rank` of `size` has; those without a chunk are whole, in process 0."""
    out: dict[str, SnapshotLeaf] = {}
    for path, array in state.items():
        if path in chunks:
            out[path] = split(array, chunks[path], lambda at: sum(at) % size == rank)
        elif rank == 0:
            out[path] = single_chunk_leaf(array.shape, array.dtype, lambda array=array: [array])
    return out


def save_together(
    place: str,
    size: int,
    step: int,
    state: Mapping[str, np.ndarray],
    chunks: Mapping[str, tuple[int, ...]],
    meta: Mapping[str, Any],
) -> None:
    """One checkpoint by `size` processes."""
    from tests.parallel.test_distributed import Store

    store = Store()

    def one(rank: int) -> None:
        with Made(place, CheckpointConfig(saving="blocking"), ProcessGroup(rank, size, store)) as checkpointer:
            checkpointer.save(step, leaves_of(state, chunks, rank, size), meta)

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(one, range(size)))
