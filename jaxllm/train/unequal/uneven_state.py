"""Uneven state: optimizer state of which each device holds a share by its memory (Cephalo, arXiv:2411.01075).

The arrays of the state are cut along one dimension into parts of unequal size (``uneven_slices``), one for each index
of the uneven axes. A part is an array of its device alone, so the devices hold no padding. In the train state each
array is an ``UnevenLeaf``, which checkpoints save and restore as if it were the array: a run resumes with other shares,
with even shards or with its state on disk, and the other way round.

Legend: L repeats of a segment's group of layers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding

from jaxllm.checkpoint.offloaded_leaf import OffloadedLeaf
from jaxllm.checkpoint.snapshot_leaf import SnapshotLeaf
from jaxllm.checkpoint.storage import array_store
from jaxllm.train.config import RunConfig
from jaxllm.train.disk.state_units import StateUnits
from jaxllm.train.unequal.unequal_gradients import uneven_axes
from jaxllm.train.unequal.uneven_slices import NO_MESH, Box, UnevenCut, from_slices, joined, uneven_cut, uneven_index
from sharding.rules import without_axes

Rows = dict[jax.Device, list[jax.Array]]
"""Parts of a unit's arrays by device, in the order of the tree."""


@dataclass(frozen=True)
class UnevenLeaf(OffloadedLeaf):
    """Array of the train state in parts of unequal size.

    Attributes:
        shape, dtype, sharding: of the array where its shards are even, [L, ...] of layers.
        owner: of the parts.
        number: of the leaf in the tree of the state.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Any
    owner: UnevenState = field(repr=False, compare=False)
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
        """The values of now, copied to the host; of several processes, all call this (see ``OffloadedLeaf``)."""
        if self.sharding.is_fully_addressable:
            pieces = [self.owner.assembled(self.number)]
            parts = {array_store.single_chunk_name(self.shape): lambda: pieces}
            return SnapshotLeaf(self.shape, str(self.dtype), None, self.shape, self.dtype, self.shape, parts)
        chunk = tuple(self.sharding.shard_shape(self.shape))
        if self.sharding.is_fully_replicated:
            chunk = self.shape
        held: dict[str, list[np.ndarray]] = {}
        for row in self.owner.even_rows(self.number):
            for shard in row.addressable_shards:
                if chunk == self.shape:  # process 0 writes it
                    if jax.process_index() == 0 and shard is row.addressable_shards[0]:
                        held.setdefault(array_store.single_chunk_name(self.shape), []).append(np.array(shard.data))
                elif shard.replica_id == 0:
                    name = ".".join(
                        str((part.start or 0) // size) for part, size in zip(shard.index, chunk, strict=True)
                    )
                    held.setdefault(name, []).append(np.array(shard.data))
        parts = {name: (lambda own=own: own) for name, own in held.items()}
        if chunk == self.shape and not parts:  # left out by processes that do not write it
            parts = {array_store.single_chunk_name(self.shape): list}
        return SnapshotLeaf(self.shape, str(self.dtype), None, self.shape, self.dtype, chunk, parts)

    def restore(self, read: Callable[[Box], np.ndarray]) -> UnevenLeaf:
        """See ``OffloadedLeaf``."""
        self.owner.restore(self.number, read)
        return self


class UnevenState(StateUnits):
    """Optimizer state of a run in parts of unequal size.

    Args:
        abstract: the optimizer state, as ``abstract_state`` has it with even shards.
        mesh: of the run.
        over: the uneven axes.
        shares: weights, one for each index of these axes.

    Attributes:
        mesh, over, shares: as given.

    Raises:
        ConfigError: the state is not one of layers.
    """

    def __init__(self, abstract: Any, mesh: Mesh | AbstractMesh, over: tuple[str, ...], shares: tuple[int, ...]):
        super().__init__(abstract, "parallel.state_shares")
        self.over, self.shares = over, shares
        self._mesh = mesh
        self._rows: dict[int, Rows] = {}

    @property
    def mesh(self) -> Mesh:
        """The run's mesh, which has devices."""
        assert isinstance(self._mesh, Mesh)
        return self._mesh

    @functools.cached_property
    def devices(self) -> tuple[jax.Device, ...]:
        """Devices of this process, in the mesh's order."""
        return tuple(d for d in self.mesh.devices.flat if d.process_index == jax.process_index())

    def cut(self, like: Any, layer: bool) -> UnevenCut:
        """Cut of an array of the state, or of a parameter, by its shape and even sharding.

        Args:
            like: the array of a unit, abstract; [1, ...] of a layer.
            layer: whether it is of a layer.
        """
        return uneven_cut(like.shape, like.sharding, self.over, self.shares, layer)

    def cuts(self, segment: str) -> list[UnevenCut]:
        """Cuts of the arrays of a unit, in the order of the tree."""
        return [self.cut(x, bool(segment)) for x in self.abstract_rows(segment)]

    def abstract_parts(self, segment: str, device: jax.Device) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the parts of a unit's arrays on a device, in the order of the tree."""
        there = SingleDeviceSharding(device)
        return [
            jax.ShapeDtypeStruct(
                tuple(part.stop - part.start for part in cut.box(self.mesh, device)), x.dtype, sharding=there
            )
            for cut, x in zip(self.cuts(segment), self.abstract_rows(segment), strict=True)
        ]

    def bytes_on(self, device: jax.Device) -> int:
        """Bytes of the state on a device."""
        of = {
            segment: sum(math.prod(x.shape) * x.dtype.itemsize for x in self.abstract_parts(segment, device))
            for segment in {unit.segment for unit in self.units}
        }
        return sum(of[unit.segment] for unit in self.units)

    def leaf(self, number: int) -> UnevenLeaf:
        """See ``StateUnits``."""
        leaf = self._leaves[number][1]
        return UnevenLeaf(tuple(leaf.shape), np.dtype(leaf.dtype), leaf.sharding, self, number)

    def begin(self, order: Sequence[int]) -> None:
        """See ``StateUnits``; there is nothing to read ahead."""

    def take(self, unit: int) -> Rows:
        """See ``StateUnits``; the arrays are the caller's, who may donate them."""
        return self._rows.pop(unit)

    def give(self, unit: int, arrays: Rows) -> None:
        """See ``StateUnits``."""
        self._rows[unit] = arrays

    def end(self) -> str:
        """See ``StateUnits``."""
        return ""

    def held(self, device: jax.Device) -> list[jax.Array]:
        """Arrays that a device of this process has now."""
        return [x for rows in self._rows.values() for x in rows[device]]

    def assembled(self, leaf: int) -> np.ndarray:
        """An array of the state in the host's memory, of which this process has all parts."""
        out = np.empty(self._leaves[leaf][1].shape, np.dtype(self._leaves[leaf][1].dtype))
        for row, unit, place, cut in self._units_of(leaf):
            done: set[str] = set()
            for device in self.devices:
                box = cut.box(self.mesh, device)
                if str(box) not in done:
                    done.add(str(box))
                    out[self._in_leaf(unit, row, box)] = np.asarray(self._rows[unit][device][place])
        return out

    def even_rows(self, leaf: int) -> Iterable[jax.Array]:
        """An array of the state in even shards, layer by layer, [1, ...] each; all processes call this."""
        for _, unit, place, cut in self._units_of(leaf):
            own: dict[jax.Device, jax.Array] = {}
            for device in self.devices:
                index = uneven_index(self.mesh, self.over, device)
                with jax.set_mesh(NO_MESH):
                    own[device] = _padded(self._rows[unit][device][place], cut, index)
            with jax.set_mesh(self.mesh):
                yield _whole(joined(self.mesh, cut, own), cut)

    def restore(self, leaf: int, read: Callable[[Box], np.ndarray]) -> None:
        """Takes the values of an array of the state, part by part.

        Args:
            leaf: number in the tree.
            read: slice of the array -> its values.
        """
        for row, unit, place, cut in self._units_of(leaf):
            members = self._members[self.units[unit].segment]
            done: dict[str, np.ndarray] = {}
            for device in self.devices:
                box = cut.box(self.mesh, device)
                if str(box) not in done:
                    done[str(box)] = np.ascontiguousarray(read(self._in_leaf(unit, row, box)))
                rows = self._rows.setdefault(unit, {}).setdefault(device, [None] * len(members))  # type: ignore[list-item]
                rows[place] = jax.device_put(done[str(box)], device)

    def _units_of(self, leaf: int) -> Iterable[tuple[int, int, int, UnevenCut]]:
        """Row of an array, number of the unit that has it, its place among the unit's arrays, and its cut."""
        row = 0
        for number, unit in enumerate(self.units):
            members = self._members[unit.segment]
            if leaf in members:
                place = members.index(leaf)
                yield row, number, place, self.cuts(unit.segment)[place]
                row += 1

    def _in_leaf(self, unit: int, row: int, box: Box) -> Box:
        return (slice(row, row + 1), *box[1:]) if self.units[unit].segment else box


def uneven_state(config: RunConfig, mesh: Mesh, opt_state: Any) -> UnevenState | None:
    """Uneven state of a run; None: its shards are even.

    Args:
        config: the run.
        mesh: of the run.
        opt_state: abstract, with even shards.
    """
    shares = config.parallel.state_shares
    over = uneven_axes(shares, config.parallel.zero, mesh.shape)
    if not over:  # shares for other devices are refused by the table (``jaxllm.train.unequal.unequal_refusals``)
        return None
    return UnevenState(opt_state, mesh, over, shares)


def described_state(config: RunConfig, sizes: Mapping[str, int], opt_state: Any) -> str:
    """Line for the log: bytes of the optimizer state that a device of each index of the uneven axes holds; or "".

    Args:
        config: the run.
        sizes: of the mesh axes.
        opt_state: abstract, with even shards.
    """
    shares = config.parallel.state_shares
    over = uneven_axes(shares, config.parallel.zero, sizes)
    if not over:
        return ""
    whole = 0
    for leaf in jax.tree.leaves(opt_state):
        spec = without_axes(leaf.sharding.spec, frozenset(over))
        whole += math.prod(NamedSharding(leaf.sharding.mesh, spec).shard_shape(leaf.shape)) * leaf.dtype.itemsize
    said = ", ".join(f"{whole * share / sum(shares) / 2**20:,.1f}" for share in shares)
    return f"uneven optimizer state: {said} MiB of a device over {' x '.join(over)}"


@functools.partial(jax.jit, static_argnums=(1, 2))
def _padded(part: jax.Array, cut: UnevenCut, index: int) -> jax.Array:
    return cut.padded(part, index)


@functools.partial(jax.jit, static_argnums=1)
def _whole(slices: jax.Array, cut: UnevenCut) -> jax.Array:
    return from_slices([cut], [slices])[0]
