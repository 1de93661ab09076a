"""State files: parameters or optimizer state of a run in the disk tier, one file for each layer and one for the rest.

Scalars of the state, such as step counters, stay in memory, and so do parameters outside of layers. In the train state
each other array is a ``DiskLeaf``, which checkpoints save and restore as if it were the array.

Legend: L repeats of a segment's group of layers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxllm.checkpoint.offloaded_leaf import OffloadedLeaf
from jaxllm.checkpoint.snapshot_leaf import SnapshotLeaf
from jaxllm.checkpoint.storage import array_store
from jaxllm.train.disk.config import DiskConfig
from jaxllm.train.disk.disk_tier import DiskTier
from jaxllm.train.disk.host_chunks import HostChunks
from jaxllm.train.disk.state_file import FileLayout, StateFile, buffer_bytes
from jaxllm.train.disk.state_units import StateUnits

Index = tuple[slice, ...]


class ArrayShards(NamedTuple):
    """Shards of an array of a unit on this process's devices.

    Attributes:
        shape: of the array; [1, ...] of a layer.
        dtype: of the array.
        sharding: of the array.
        first: number of its first part in the unit's file.
        parts: index of each distinct shard in the array; a part of the file holds it.
        places: device, and the number of its part after ``first``.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Any
    first: int
    parts: tuple[Index, ...]
    places: tuple[tuple[jax.Device, int], ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: np.dtype, sharding: Any, first: int) -> ArrayShards:
        """Shards of an array by its sharding."""
        parts: dict[str, int] = {}
        indices: list[Index] = []
        places: list[tuple[jax.Device, int]] = []
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            everything = tuple(slice(None) for _ in shape)
            found = everything if index is None else index
            own = tuple(slice(*part.indices(n)) for part, n in zip(found, shape, strict=True))
            if str(own) not in parts:
                parts[str(own)] = len(indices)
                indices.append(own)
            places.append((device, parts[str(own)]))
        return cls(shape, dtype, sharding, first, tuple(indices), tuple(places))

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of a shard."""
        return tuple(self.sharding.shard_shape(self.shape))

    @property
    def part_bytes(self) -> int:
        """Bytes of a shard."""
        return math.prod(self.part_shape) * self.dtype.itemsize

    def view(self, layout: FileLayout, buffer: np.ndarray, part: int) -> np.ndarray:
        """View of a shard in a buffer with the contents of the file."""
        return layout.part(buffer, self.first + part).view(self.dtype).reshape(self.part_shape)

    def placed(self, layout: FileLayout, buffer: np.ndarray) -> jax.Array:
        """The array on the devices, from a buffer with the contents of the file."""
        own = [jax.device_put(self.view(layout, buffer, part), device) for device, part in self.places]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, own)

    def fill(self, layout: FileLayout, buffer: np.ndarray, array: jax.Array) -> None:
        """Copies the array's shards into a buffer."""
        shards = {shard.device: shard.data for shard in array.addressable_shards}
        written: set[int] = set()
        for device, part in self.places:
            if part not in written:  # the others hold the same
                np.copyto(self.view(layout, buffer, part), np.asarray(shards[device]))
                written.add(part)


@dataclass(frozen=True)
class DiskLeaf(OffloadedLeaf):
    """Array of the train state in the disk tier.

    Attributes:
        shape, dtype, sharding: of the array, [L, ...] of layers.
        owner: the files.
        number: of the leaf in the tree of the state.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Any
    owner: StateFiles = field(repr=False, compare=False)
    number: int = 0

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def snapshot(self) -> SnapshotLeaf:
        """The values of now, read from files that are not written any more (see ``OffloadedLeaf``)."""
        files, layers = self.owner.tier.freeze(), self.owner.rows_of(self.number)
        owners: dict[str, tuple[Index, jax.Device]] = {}
        for device, index in self.sharding.devices_indices_map(self.shape).items():
            owners.setdefault(str(index), (index, device))
        whole = self.sharding.is_fully_addressable or self.sharding.is_fully_replicated
        if whole:
            chunk, name = self.shape, array_store.single_chunk_name(self.shape)
            parts = {name: lambda: (_assembled(files[unit], shards) for unit, shards in layers)}
        else:
            chunk = tuple(self.sharding.shard_shape(self.shape))
            parts = {
                ".".join(str((part.start or 0) // size) for part, size in zip(index, chunk, strict=True)): (
                    lambda device=device: (_shard_on(files[unit], shards, device) for unit, shards in layers)
                )
                for index, device in owners.values()
                if device.process_index == jax.process_index()
            }
        return SnapshotLeaf(self.shape, str(self.dtype), None, self.shape, self.dtype, chunk, parts)

    def store(self, array: jax.Array) -> DiskLeaf:
        """Takes the values of an array that is on the devices; the run's mesh is set."""
        for row, (unit, shards) in enumerate(self.owner.rows_of(self.number)):
            own = _row(array, np.int32(row), shards.sharding) if self.owner.units[unit].segment else array
            _write(self.owner.tier.writable(unit), shards, own)
        return self

    def restore(self, read: Callable[[Index], np.ndarray]) -> DiskLeaf:
        """See ``OffloadedLeaf``."""
        for row, (unit, shards) in enumerate(self.owner.rows_of(self.number)):
            file = self.owner.tier.writable(unit)
            for part, index in enumerate(shards.parts):
                there = (slice(row, row + 1), *index[1:]) if self.owner.units[unit].segment else index
                data = np.ascontiguousarray(read(there))
                file.write_part(shards.first + part, data.reshape(-1).view(np.uint8))
        return self


class StateFiles(StateUnits):
    """Optimizer state, or parameters, of a run in files.

    Args:
        config: where the files are.
        abstract: the optimizer state, or the parameters, as ``abstract_state`` has them in memory.
        field: "opt_state"; or "params", of which only layers are in files.

    Attributes:
        units: units of the state in the order of a pass: layers, then what is outside of them.
        window: most layers in memory.
        kept: numbers of the leaves that stay in memory.
        chunks: of these and other files in the host's memory (``share_chunks``); None: none.

    Raises:
        ConfigError: the state is not one of layers.
    """

    def __init__(self, config: DiskConfig, abstract: Any, field: Literal["opt_state", "params"] = "opt_state"):
        super().__init__(abstract, "disk.directory", field)
        self._shards: dict[str, dict[int, ArrayShards]] = {s: {} for s in self._members}
        labels: dict[str, list[str]] = {s: [] for s in self._members}
        for segment, members in self._members.items():
            for n in members:
                path, leaf = self._leaves[n]
                shape = (1, *leaf.shape[1:]) if segment else tuple(leaf.shape)
                shards = ArrayShards.of(shape, np.dtype(leaf.dtype), leaf.sharding, len(labels[segment]))
                self._shards[segment][n] = shards
                labels[segment] += [f"{field}{jax.tree_util.keystr(path)}"] * len(shards.parts)
        sizes = {s: [one.part_bytes for one in own.values() for _ in one.parts] for s, own in self._shards.items()}
        self.what = "parameters" if field == "params" else "optimizer state"
        self._layouts = [
            FileLayout(f"{self.what} of {unit}", labels[unit.segment], sizes[unit.segment]) for unit in self.units
        ]
        self.window, self._config = config.window, config
        self.chunks: HostChunks | None = None

    @functools.cached_property
    def tier(self) -> DiskTier:
        """The files, made when they are first needed."""
        chunks = None if self.chunks is None else self.chunks.of(self._layouts, self.window, self.aside)
        return DiskTier(Path(self._config.directory), self._layouts, self.window, chunks, aside=self.aside)

    @property
    def bytes(self) -> int:
        """Bytes of the files of this process, while no checkpoint reads older ones."""
        return sum(layout.size for layout in self._layouts)

    @property
    def reserved(self) -> int:
        """Bytes of the files that this process has made so far."""
        return self.tier.bytes if "tier" in vars(self) else 0

    @property
    def aside(self) -> frozenset[int]:
        """Units with a place of their own beside the window: what is outside of layers, which is large."""
        return frozenset(number for number, unit in enumerate(self.units) if not unit.segment)

    @property
    def window_bytes(self) -> int:
        """Most bytes of the host's memory that files in the window take, and beside it what is outside of layers."""
        return buffer_bytes(self._layouts, self.window, self.aside)

    def leaf(self, number: int) -> DiskLeaf:
        """See ``StateUnits``."""
        leaf = self._leaves[number][1]
        return DiskLeaf(leaf.shape, np.dtype(leaf.dtype), leaf.sharding, self, number)

    def leaves_in_files(self) -> list[DiskLeaf]:
        """Leaves of the state that are in files."""
        return [leaf for leaf in jax.tree.leaves(self.leaves()) if isinstance(leaf, DiskLeaf)]

    def layout(self, unit: int) -> FileLayout:
        """Layout of a unit's file."""
        return self._layouts[unit]

    def rows_of(self, leaf: int) -> list[tuple[int, ArrayShards]]:
        """Numbers of the units that a leaf is in, in order, with its shards in each."""
        return [
            (u, self._shards[unit.segment][leaf])
            for u, unit in enumerate(self.units)
            if leaf in self._shards[unit.segment]
        ]

    def placed(self, unit: int, buffer: np.ndarray) -> list[jax.Array]:
        """Arrays of a unit on the devices, from its contents."""
        return [x.placed(self._layouts[unit], buffer) for x in self._shards[self.units[unit].segment].values()]

    def fill(self, unit: int, buffer: np.ndarray, arrays: Iterable[jax.Array]) -> None:
        """Puts arrays of a unit into a buffer, which the programs that computed them may have read."""
        # On all devices: on a CPU their arrays are views of the buffer, and a copy waits for the device it is from.
        arrays = jax.block_until_ready(list(arrays))
        for shards, array in zip(self._shards[self.units[unit].segment].values(), arrays, strict=True):
            shards.fill(self._layouts[unit], buffer, array)

    def begin(self, order: Sequence[int]) -> None:
        """See ``StateUnits``."""
        if self.chunks is not None:
            self.chunks.begin(lambda: 0)
        self.tier.begin(order)

    def take(self, unit: int) -> list[jax.Array]:
        """See ``StateUnits``; the arrays are views of what was read where the device is a CPU."""
        return self.placed(unit, self.tier.take(unit))

    def end(self) -> str:
        """See ``StateUnits``: what a warm-up pass recorded of chunks."""
        return "" if self.chunks is None else self.chunks.end() or ""

    def give(self, unit: int, arrays: Sequence[jax.Array]) -> None:
        """Writes the new arrays of a unit that was taken from the tier.

        What is outside of layers is large and leaves memory at once, before the gradients of the next step.
        """
        self.tier.give(unit, lambda buffer: self.fill(unit, buffer, arrays), keep=bool(self.units[unit].segment))

    def initialise(self, rows: Callable[[int], Iterable[jax.Array]]) -> None:
        """Writes a state.

        Args:
            rows: number of a unit -> its arrays, in the order of the tree.
        """
        for unit, file in enumerate(self.tier.renew()):
            for shards, array in zip(self._shards[self.units[unit].segment].values(), rows(unit), strict=True):
                _write(file, shards, array)

    def __str__(self) -> str:
        """Bytes and place of the state."""
        tier, window = self.tier, self.window_bytes
        return (
            f"{self.what}: {tier.bytes / 2**30:.3f} GiB in {len(self.units)} files of {tier.directory}, at most "
            f"{tier.window} of them in memory ({window / 2**30:.3f} GiB)"
        )


def share_chunks(config: DiskConfig, files: Sequence[StateFiles]) -> None:
    """Lets files of a run share the host's memory for chunks of them, where it has any.

    With the optimizer state alone in files, every other step goes through the layers backwards.

    Args:
        config: of the run.
        files: all of this process, whose tiers are not made yet.
    """
    if not config.host:
        return
    devices = {
        device for one in files for leaf in one.leaves_in_files() for device in leaf.sharding.addressable_devices
    }
    chunks = HostChunks(config.host * len(devices), config.chunk, period=1 if config.parameters else 2)
    for one in files:
        one.chunks = chunks


def put_on_disk(value: Any, target: Any) -> Any:
    """A parameter in the place that its target says: a ``DiskLeaf`` takes the values of an array, which is freed."""
    if not isinstance(target, DiskLeaf) or isinstance(value, DiskLeaf):
        return value
    target.store(value)
    value.delete()
    return target


def _write(file: StateFile, shards: ArrayShards, array: jax.Array) -> None:
    """Writes an array of a unit, each distinct shard once."""
    data = {shard.device: shard.data for shard in array.addressable_shards}
    first: Mapping[int, jax.Device] = {part: device for device, part in reversed(shards.places)}
    for part, device in first.items():
        own = np.ascontiguousarray(data[device])
        file.write_part(shards.first + part, own.reshape(-1).view(np.uint8))


@functools.partial(jax.jit, static_argnums=2)
def _row(array: jax.Array, row: Any, sharding: Any) -> jax.Array:
    """One layer of a stacked array, [1, ...]."""
    return jax.sharding.reshard(jax.lax.dynamic_slice_in_dim(array, row, 1), sharding)


def _assembled(file: StateFile, shards: ArrayShards) -> np.ndarray:
    """An array of a unit from all its parts."""
    parts = [
        file.read_part(shards.first + n).view(shards.dtype).reshape(shards.part_shape) for n in range(len(shards.parts))
    ]
    if len(parts) == 1 and shards.part_shape == shards.shape:
        return parts[0]
    out = np.empty(shards.shape, shards.dtype)
    for index, part in zip(shards.parts, parts, strict=True):
        out[index] = part
    return out


def _shard_on(file: StateFile, shards: ArrayShards, device: jax.Device) -> np.ndarray:
    """The shard of a unit's array that a device of this process has."""
    part = dict(shards.places)[device]
    return file.read_part(shards.first + part).view(shards.dtype).reshape(shards.part_shape)
