"""Uneven slices: cuts of an array into parts of unequal size along one dimension, one for each device of some axes.

One program has shards of one shape. So a slice travels between the program of all devices and the program of one as an
array with room for the largest slice: ``to_slices`` and ``from_slices`` run on all devices, ``own_part`` and ``padded``
on one.

Source: Cephalo (arXiv:2411.01075). Legend: D indices of the uneven axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from sharding.rules import without_axes

Box = tuple[slice, ...]
NO_MESH = Mesh(np.empty((), dtype=object), ())
"""Mesh of programs of one device, which are traced while the run's mesh is set."""


@dataclass(frozen=True)
class UnevenCut:
    """Cut of an array over the uneven axes.

    Attributes:
        shape: of the array.
        stored: partition spec of the array where it is whole, as the train state has it.
        whole: the same spec without the uneven axes.
        over: the uneven axes.
        dim: dimension that is cut, within each shard of ``whole``; None: each device has all.
        bounds: first row of each part of a shard, and the number of its rows. [D + 1]
    """

    shape: tuple[int, ...]
    stored: PartitionSpec
    whole: PartitionSpec
    over: tuple[str, ...]
    dim: int | None
    bounds: tuple[int, ...]

    @property
    def most(self) -> int:
        """Rows of the largest part."""
        return max(b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False))

    @property
    def sliced(self) -> PartitionSpec:
        """Partition spec of the slices of all devices, [D, ...]."""
        return PartitionSpec(self.over, *self.whole)

    def first_row(self, index: Any) -> Any:
        """Row of a shard at which the slice of an index begins: where its part does, or its room ends with the shard.

        Args:
            index: of the uneven axes; an int, or traced.
        """
        starts = np.minimum(self.bounds[:-1], self.bounds[-1] - self.most)
        return int(starts[index]) if isinstance(index, int) else jnp.asarray(starts, jnp.int32)[index]

    def own_part(self, piece: Array, index: int) -> Array:
        """Part of an index, from its slice [1, ...]."""
        if self.dim is None:
            return piece[0]
        start = self.bounds[index] - self.first_row(index)
        return jax.lax.slice_in_dim(piece[0], start, start + self.bounds[index + 1] - self.bounds[index], axis=self.dim)

    def padded(self, part: Array, index: int) -> Array:
        """Slice [1, ...] of an index with its part at the front, for ``from_slices``."""
        if self.dim is None:
            return part[None]
        room = [(0, 0, 0)] * part.ndim
        room[self.dim] = (0, self.most - (self.bounds[index + 1] - self.bounds[index]), 0)
        return jax.lax.pad(part, jnp.zeros((), part.dtype), room)[None]

    def box(self, mesh: Mesh, device: jax.Device) -> Box:
        """Indices of a device's part in the array."""
        found = NamedSharding(mesh, self.whole).devices_indices_map(self.shape)[device]
        box = [slice(*part.indices(n)[:2]) for part, n in zip(found, self.shape, strict=True)]
        if self.dim is not None:
            index, first = uneven_index(mesh, self.over, device), box[self.dim].start
            box[self.dim] = slice(first + self.bounds[index], first + self.bounds[index + 1])
        return tuple(box)


def uneven_cut(
    shape: tuple[int, ...], sharding: NamedSharding, over: tuple[str, ...], shares: Sequence[int], layer: bool
) -> UnevenCut:
    """Cut of an array by shares: of the largest dimension of a shard, whose parts are those of the shares to one row.

    Args:
        shape: of the array; of a layer [1, ...].
        sharding: of the array where it is whole.
        over: the uneven axes.
        shares: weights, one for each index of these axes. [D]
        layer: whether the first dimension is that of layers, which is not cut.
    """
    stored = PartitionSpec(*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
    whole = without_axes(stored, frozenset(over))
    sizes = NamedSharding(sharding.mesh, whole).shard_shape(shape)
    dims = range(1 if layer else 0, len(shape))
    dim = max(dims, key=lambda d: sizes[d], default=None)
    rows = 0 if dim is None else sizes[dim]
    ends = np.cumsum([0, *shares])
    bounds = tuple(int(rows * end / ends[-1] + 0.5) for end in ends)
    return UnevenCut(tuple(shape), stored, whole, over, dim, bounds)


def uneven_index(mesh: Mesh, over: Sequence[str], device: jax.Device) -> int:
    """Index of a device along the uneven axes."""
    place = dict(zip(mesh.axis_names, np.argwhere(mesh.devices == device)[0], strict=True))
    index = 0
    for axis in over:
        index = index * mesh.shape[axis] + int(place[axis])
    return index


def to_slices(cuts: Sequence[UnevenCut], arrays: Sequence[Array]) -> list[Array]:
    """Slices of all devices, [D, ...] each, from whole arrays; traced, with the run's mesh set.

    Nothing is communicated where the arrays are not split over the uneven axes.
    """
    there = [jax.sharding.reshard(x, cut.whole) for cut, x in zip(cuts, arrays, strict=True)]

    def here(shards: list[Array]) -> list[Array]:
        def one(cut: UnevenCut, x: Array) -> Array:
            if cut.dim is None:
                return x[None]
            first = cut.first_row(jax.lax.axis_index(cut.over))
            return jax.lax.dynamic_slice_in_dim(x, first, cut.most, axis=cut.dim)[None]

        return [one(cut, x) for cut, x in zip(cuts, shards, strict=True)]

    return jax.shard_map(
        here,
        mesh=jax.sharding.get_abstract_mesh(),
        in_specs=([cut.whole for cut in cuts],),
        out_specs=[cut.sliced for cut in cuts],
        check_vma=False,
    )(there)


def from_slices(cuts: Sequence[UnevenCut], slices: Sequence[Array]) -> list[Array]:
    """Whole arrays as they are stored, from the slices of all devices (``padded``); traced, with the run's mesh set.

    Slices are all-gathered over the uneven axes, each with room for the largest.
    """

    def here(slices: list[Array]) -> list[Array]:
        def one(cut: UnevenCut, x: Array) -> Array:
            if cut.dim is None:
                return x[0]
            parts = jax.lax.all_gather(x, cut.over, axis=0, tiled=True)
            rows = [b - a for a, b in zip(cut.bounds, cut.bounds[1:], strict=False)]
            own = [jax.lax.slice_in_dim(parts[i], 0, n, axis=cut.dim) for i, n in enumerate(rows) if n]
            return jnp.concatenate(own, axis=cut.dim)

        return [one(cut, x) for cut, x in zip(cuts, slices, strict=True)]

    whole = jax.shard_map(
        here,
        mesh=jax.sharding.get_abstract_mesh(),
        in_specs=([cut.sliced for cut in cuts],),
        out_specs=[cut.whole for cut in cuts],
        check_vma=False,
    )(list(slices))
    return [jax.sharding.reshard(x, cut.stored) for cut, x in zip(cuts, whole, strict=True)]


def joined(mesh: Mesh, cut: UnevenCut, pieces: dict[jax.Device, jax.Array]) -> jax.Array:
    """Array [D, ...] of the slices that this process's devices have (``padded``); nothing is copied."""
    own = next(iter(pieces.values()))
    shape = list(cut.shape)
    if cut.dim is not None:
        split = cut.shape[cut.dim] // cut.bounds[-1] if cut.bounds[-1] else 1
        shape[cut.dim] = split * cut.most
    shape = (len(cut.bounds) - 1, *shape)
    sharding = NamedSharding(mesh, cut.sliced)
    assert sharding.shard_shape(tuple(shape)) == own.shape
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, list(pieces.values()))
