"""Copying a state so that training can go on while it is written.

JAX steps donate the state they are given: the next step overwrites it. So a lazy snapshot begins with a copy inside the
devices' memory, which takes as long as reading and writing the state at the memory's own speed, and which the devices
do on their own; the next step then runs beside the copy from device to host. (A copy to pinned host memory would need
no second one on the device, but a step that donates its input waits for all that reads it.)
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
from jaxllm.checkpoint.storage import array_store
from jaxllm.checkpoint.storage.leaf_paths import leaf_paths


@dataclasses.dataclass(frozen=True)
class SnapshotLeaf:
    """One leaf on its way to disk.

    shape, dtype, key_impl: as in the manifest.
    array_shape, array_dtype: of the numbers: key data for typed keys.
    chunk: shape of one chunk; the leaf's own where one process has all of it.
    parts: what this process writes, by the name of the chunk; each call makes the chunk's values, in C order, in pieces
        of any size.
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
        """Whether several processes write it."""
        return self.chunk != self.array_shape


def single_chunk_leaf(
    shape: tuple[int, ...],
    dtype: np.dtype,
    pieces: Callable[[], Iterable[np.ndarray]],
    key: tuple[str, str] | None = None,
) -> SnapshotLeaf:
    """A leaf that one process writes as one chunk; `key` is the dtype and implementation of typed keys."""
    outer = shape[:-1] if key else shape
    name, impl = key or (str(dtype), None)
    return SnapshotLeaf(outer, name, impl, shape, dtype, shape, {array_store.single_chunk_name(shape): pieces})


CopyMode = Literal["device", "host", "none"]


def capture(state: Any, *, copy: CopyMode, multihost: bool = False) -> dict[str, SnapshotLeaf]:
    """Every leaf of a state, copied: the caller may donate or overwrite its arrays afterwards.

    Args:
        state: jax arrays of any dtype and sharding, typed PRNG keys and numpy arrays.
        copy: where copies of jax arrays are; none: there are none, the caller waits for the writing.
        shared: leaves may live in several processes, which all call this; each gets its own parts.

    Raises:
        CheckpointError: a leaf is no array, was donated, or lives partly in other processes.
    """
    leaves = leaf_paths(state)
    keys: dict[str, tuple[str, str]] = {}
    arrays: dict[str, jax.Array] = {}
    for path, leaf in leaves.items():
        if isinstance(leaf, np.ndarray | np.generic):
            if leaf.dtype.kind in "OSUMm":
                raise CheckpointError(f"leaf {path} has dtype {leaf.dtype}: a checkpoint holds numbers; use `meta`.")
            continue
        if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
            raise CheckpointError(
                f"leaf {path} is a {type(leaf).__name__}, and a checkpoint holds arrays. "
                "Make it one (jnp.asarray), or put it into `meta`, which holds JSON."
            )
        if leaf.is_deleted():
            raise CheckpointError(
                f"leaf {path} was donated to a jitted function: save the state that the step returned, not its input."
            )
        if not leaf.is_fully_addressable and not multihost:
            raise CheckpointError(
                f"leaf {path} lives partly on devices of other processes. This Checkpointer saves from one process: "
                "open a SharedCheckpointer in each of them."
            )
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            keys[path] = str(leaf.dtype), str(jax.random.key_impl(leaf))
            leaf = jax.random.key_data(leaf)
        arrays[path] = leaf
    shards = _shards(_copy_on_device(arrays) if copy == "device" else arrays)
    if copy == "host":
        shards = {path: (chunk, _copy_to_host(parts)) for path, (chunk, parts) in shards.items()}
    out: dict[str, SnapshotLeaf] = {}
    for path, leaf in leaves.items():
        if path in shards:
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


def device_bytes(state: Any) -> int:
    """Bytes of a state on this process's devices, each replica once a device."""
    arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array) and not _is_key(leaf)]
    return sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)


def has_room_for_copy(state: Any) -> bool:
    """Whether the devices have had the memory for one more copy of a state to spare so far.

    CPU devices, which do not say, have it: their memory is the host's.
    """
    devices = jax.local_devices()
    stats = [device.memory_stats() for device in devices]
    spare = [
        s["bytes_limit"] - s.get("peak_bytes_in_use", s["bytes_in_use"]) for s in stats if s and "bytes_limit" in s
    ]
    return not spare or min(spare) > 1.05 * device_bytes(state) / len(devices)


ChunkShards = dict[str, list[tuple[tuple[slice, ...], Any]]]
"""Chunk -> (where in it, values), on a device or the host."""


def _shards(arrays: Mapping[str, jax.Array]) -> dict[str, tuple[tuple[int, ...], ChunkShards]]:
    """(shape of a chunk, parts) of each array, every value once; without references to the arrays themselves."""
    out: dict[str, tuple[tuple[int, ...], ChunkShards]] = {}
    for path, array in arrays.items():
        own = [(s.index, s.data) for s in array.addressable_shards if s.replica_id == 0 and s.data is not None]
        if array.is_fully_addressable:
            out[path] = array.shape, {array_store.single_chunk_name(array.shape): own}
        elif array.is_fully_replicated:
            local = array.addressable_data(0)
            everywhere = tuple(slice(None) for _ in array.shape)
            # Which process it is that writes decides the caller: all of them can.
            out[path] = array.shape, {array_store.single_chunk_name(array.shape): [(everywhere, local)]}
        else:
            chunk = array.sharding.shard_shape(array.shape)
            everywhere = tuple(slice(None) for _ in chunk)
            out[path] = chunk, {_chunk_name(index, chunk): [(everywhere, data)] for index, data in own}
    return out


def _copy_on_device(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The arrays again, on the same devices, by one call for those that share them."""
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
    # On CPUs a program that only moves data runs in the thread that calls it; one with a product of matrices does not.
    return [jnp.copy(array) for array in arrays], None if work is None else work @ work


def _copy_to_host(parts: ChunkShards) -> ChunkShards:
    """The same in host memory."""
    for pieces in parts.values():
        for _, data in pieces:
            data.copy_to_host_async()
    return {name: [(index, np.array(data, order="C")) for index, data in pieces] for name, pieces in parts.items()}


def _chunk_readers(
    parts: ChunkShards, shape: tuple[int, ...], chunk: tuple[int, ...], dtype: Any
) -> dict[str, Callable[[], Iterable[np.ndarray]]]:
    """Each part as a call, after which nothing holds its device memory any more."""

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
    """The zarr chunk that a shard is."""
    return ".".join(str((part.start or 0) // size) for part, size in zip(index, chunk, strict=True))


def _is_key(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
