"""Snapshot: a copy of the state that is written while training continues (asynchronous checkpointing).

Training steps donate their state, so the next step overwrites it. A lazy snapshot therefore begins with a copy inside
device memory, which takes as long as reading and writing the state at the memory's bandwidth, and which the devices run
by themselves; the next step then overlaps with the transfer from device to host.

An overlapped snapshot has no second copy on the device (DataStates-LLM, arXiv:2406.10707): the state itself is copied
to the host while programs run that only read it, and the caller waits for the copy before one that donates it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from jaxllm.checkpoint.errors import CheckpointError
from jaxllm.checkpoint.offloaded_leaf import OffloadedLeaf
from jaxllm.checkpoint.snapshot_leaf import SnapshotLeaf, single_chunk_leaf
from jaxllm.checkpoint.state_fragments import PackedFragments
from jaxllm.checkpoint.storage import array_store
from jaxllm.checkpoint.storage.leaf_paths import leaf_paths

CopyMode = Literal["device", "host", "later", "none"]


def capture(state: Any, *, copy: CopyMode, multihost: bool = False) -> dict[str, SnapshotLeaf]:
    """Snapshot of every leaf of a state: the caller may donate or overwrite its arrays afterwards.

    Args:
        state: jax arrays of any dtype and sharding, typed PRNG keys, numpy arrays, leaves that are not in memory.
        copy: memory in which jax arrays are copied; none makes no copy, and the caller waits until they are written;
            later starts the copy to the host, which ``fetch`` completes, and the caller keeps the arrays until then.
        multihost: leaves may be sharded over several processes, which all call this; each gets its own chunks.

    Raises:
        CheckpointError: a leaf is not an array, was donated, or is partly on devices of other processes.
    """
    leaves = leaf_paths(state)
    keys: dict[str, tuple[str, str]] = {}
    arrays: dict[str, jax.Array] = {}
    packed: dict[str, SnapshotLeaf] = {}
    for path, leaf in leaves.items():
        if isinstance(leaf, PackedFragments):
            packed[path] = _packed_leaf(path, leaf, copy)
            continue
        if isinstance(leaf, OffloadedLeaf):
            packed[path] = leaf.snapshot()
            continue
        if isinstance(leaf, np.ndarray | np.generic):
            if leaf.dtype.kind in "OSUMm":
                raise CheckpointError(f"leaf {path} has dtype {leaf.dtype}: only numeric arrays are saved; use `meta`.")
            continue
        if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
            raise CheckpointError(
                f"leaf {path} is a {type(leaf).__name__}, but only arrays are saved. "
                "Convert it (jnp.asarray), or put it into `meta`, which is JSON."
            )
        if leaf.is_deleted():
            raise CheckpointError(
                f"leaf {path} was donated to a jitted function: save the state that the step returned, not its input."
            )
        if not leaf.is_fully_addressable and not multihost:
            raise CheckpointError(
                f"leaf {path} is partly on devices of other processes. This Checkpointer saves from one process: "
                "open a MultihostCheckpointer in each of them."
            )
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            keys[path] = str(leaf.dtype), str(jax.random.key_impl(leaf))
            leaf = jax.random.key_data(leaf)
        arrays[path] = leaf
    shards = _shards(_copy_on_device(arrays) if copy == "device" else arrays)
    if copy == "later":
        for _, parts in shards.values():
            _start_copies(parts)
    if copy == "host":
        shards = {path: (chunk, _copy_to_host(parts)) for path, (chunk, parts) in shards.items()}
    out: dict[str, SnapshotLeaf] = {}
    for path, leaf in leaves.items():
        if path in packed:
            out[path] = packed[path]
        elif path in shards:
            shape, dtype = arrays[path].shape, arrays[path].dtype
            chunk, parts = shards[path]
            name, impl = keys.get(path) or (str(dtype), None)
            out[path] = SnapshotLeaf(
                leaf.shape, name, impl, shape, np.dtype(dtype), chunk, _chunk_readers(parts, shape, chunk, dtype)
            )
        else:
            array = np.array(leaf, dtype=leaf.dtype.newbyteorder("="), order="C")
            out[path] = single_chunk_leaf(array.shape, array.dtype, lambda array=array: [array])
    return out


def _packed_leaf(path: str, leaf: PackedFragments, copy: CopyMode) -> SnapshotLeaf:
    """Leaf of fragments that share a file; each is copied as a leaf of its own would be."""
    split = [n for n, x in leaf.values.items() if isinstance(x, jax.Array) and not x.is_fully_addressable]
    if split:
        raise CheckpointError(
            f"{path}: the fragments {', '.join(split)} are split over processes, and a file of fragments is written by "
            "one process: return them from arrays() as plain arrays."
        )
    captured = capture(list(leaf.values.values()), copy=copy)
    reads = {name: next(iter(one.parts.values())) for name, one in zip(leaf.values, captured.values(), strict=True)}
    return single_chunk_leaf(leaf.shape, np.dtype(np.uint8), lambda: leaf.pieces(reads))


def fetch(leaves: Mapping[str, SnapshotLeaf]) -> dict[str, SnapshotLeaf]:
    """Leaves of a snapshot with their values in host memory; afterwards the arrays they came from may be donated."""

    def held(read: Callable[[], Iterable[np.ndarray]]) -> Callable[[], Iterable[np.ndarray]]:
        pieces = [np.array(piece, order="C") for piece in read()]
        return lambda: pieces

    return {
        path: dataclasses.replace(leaf, parts={name: held(read) for name, read in leaf.parts.items()})
        for path, leaf in leaves.items()
    }


def device_bytes(state: Any) -> int:
    """Bytes of a state on this process's devices; replicas count once per device."""
    leaves = jax.tree.leaves(state)
    leaves += [x for leaf in leaves if isinstance(leaf, PackedFragments) for x in leaf.values.values()]
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array) and not _is_key(leaf)]
    return sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)


def has_room_for_copy(state: Any) -> bool:
    """Whether the devices' free memory, at its least so far, suffices for one more copy of a state.

    True for CPU devices, which report no statistics: their memory is the host's.
    """
    devices = jax.local_devices()
    stats = [device.memory_stats() for device in devices]
    spare = [
        s["bytes_limit"] - s.get("peak_bytes_in_use", s["bytes_in_use"]) for s in stats if s and "bytes_limit" in s
    ]
    return not spare or min(spare) > 1.05 * device_bytes(state) / len(devices)


ChunkShards = dict[str, list[tuple[tuple[slice, ...], Any]]]
"""Name of a chunk -> [(index within the chunk, values)], on a device or the host."""


def _shards(arrays: Mapping[str, jax.Array]) -> dict[str, tuple[tuple[int, ...], ChunkShards]]:
    """(shape of a chunk, shards by chunk) of each array, every value once; keeps no references to the arrays."""
    out: dict[str, tuple[tuple[int, ...], ChunkShards]] = {}
    for path, array in arrays.items():
        own = [(s.index, s.data) for s in array.addressable_shards if s.replica_id == 0 and s.data is not None]
        if array.is_fully_addressable:
            out[path] = array.shape, {array_store.single_chunk_name(array.shape): own}
        elif array.is_fully_replicated:
            local = array.addressable_data(0)
            everywhere = tuple(slice(None) for _ in array.shape)
            # Every process can write it; the caller decides which one does.
            out[path] = array.shape, {array_store.single_chunk_name(array.shape): [(everywhere, local)]}
        else:
            chunk = array.sharding.shard_shape(array.shape)
            everywhere = tuple(slice(None) for _ in chunk)
            out[path] = chunk, {_chunk_name(index, chunk): [(everywhere, data)] for index, data in own}
    return out


def _copy_on_device(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Copies of the arrays on the same devices; one call for each set of devices."""
    groups: dict[Any, list[str]] = {}
    for path, array in arrays.items():
        where = array.sharding
        some = sorted(where.device_set, key=lambda device: device.id)
        mesh = where.mesh.devices if isinstance(where, NamedSharding) else None
        devices = some if mesh is None else list(mesh.flat)
        groups.setdefault(tuple(devices), []).append(path)
    out: dict[str, jax.Array] = {}
    for paths in groups.values():
        group = [arrays[path] for path in paths]
        cpu = next(iter(group[0].sharding.device_set)).platform == "cpu"
        copies, _ = _copy(group, np.ones((16, 16), np.float32) if cpu else None)
        out.update(zip(paths, copies, strict=True))
    return out


@jax.jit
def _copy(arrays: list[jax.Array], work: Any) -> tuple[list[jax.Array], Any]:
    # On CPUs a program that only moves data runs in the calling thread; with a matmul it runs asynchronously.
    return [jnp.copy(array) for array in arrays], None if work is None else work @ work


def _start_copies(parts: ChunkShards) -> None:
    for pieces in parts.values():
        for _, data in pieces:
            data.copy_to_host_async()


def _copy_to_host(parts: ChunkShards) -> ChunkShards:
    """Copies of the shards in host memory."""
    _start_copies(parts)
    return {name: [(index, np.array(data, order="C")) for index, data in pieces] for name, pieces in parts.items()}


def _chunk_readers(
    parts: ChunkShards, shape: tuple[int, ...], chunk: tuple[int, ...], dtype: Any
) -> dict[str, Callable[[], Iterable[np.ndarray]]]:
    """Calls that return each chunk's values; a call drops the last reference to the chunk's device memory."""

    def call(pieces: list[tuple[tuple[slice, ...], Any]]) -> Iterable[np.ndarray]:
        if len(pieces) == 1:
            _, data = pieces.pop()
            return [np.asarray(data)]
        array = np.empty(chunk, dtype)
        while pieces:
            index, data = pieces.pop()
            array[index] = np.asarray(data)
        return [array]

    return {name: (lambda pieces=pieces: call(pieces)) for name, pieces in parts.items()}


def _chunk_name(index: tuple[slice, ...], chunk: tuple[int, ...]) -> str:
    """Name of the zarr chunk for a shard."""
    return ".".join(str((part.start or 0) // size) for part, size in zip(index, chunk, strict=True))


def _is_key(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
