"""Array placement over a mesh, and the cheapest collectives from one to another.

On each mesh axis an array is split over one of its dimensions, whole on every device, or partial: every device has a
summand. OneFlow (arXiv:2110.15032, section 3) calls these S, B and P, and prices their conversions (table 2).

    before, after = ArrayPlacement.parse("data=S0,tensor=P"), ArrayPlacement.parse("data=S0,tensor=S1")
    for step in conversion(before, after, (64, 32), {"data": 2, "tensor": 4}):
        print(step)                                       # reduce-scatter over tensor: P -> S1, 768 elements
    y = convert(x, before, after, sizes)                  # within jax.shard_map over these axes
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from sharding.mesh import ShardingError

WHOLE, PARTIAL = "B", "P"
"""Names of the placements that split nothing."""


@dataclass(frozen=True)
class ArrayPlacement:
    """Placement of the parts of an array over a mesh.

    Axes that split the same dimension are nested: the first one that is named has the coarsest parts, as in a
    ``PartitionSpec``.

    Attributes:
        splits: (mesh axis, dimension), coarsest first.
        partial: mesh axes over which the array is the sum of what the devices have.
    """

    splits: tuple[tuple[str, int], ...] = ()
    partial: frozenset[str] = frozenset()

    @staticmethod
    def parse(text: str) -> ArrayPlacement:
        """ArrayPlacement of a text such as "data=S0,tensor=P"; an axis that is not named has whole copies.

        Raises:
            ShardingError: says which part of the text is none, and what is legal.
        """
        splits, partial, seen = [], set(), set()
        for part in filter(None, (part.strip() for part in text.split(","))):
            axis, _, kind = (word.strip() for word in part.partition("="))
            found = re.fullmatch(r"S(\d+)", kind)
            if not axis or axis in seen or not (found or kind in (WHOLE, PARTIAL)):
                raise ShardingError(
                    f"placement {text!r}: {part!r}; give each axis once, as AXIS=S0 (split over dimension 0), AXIS=B "
                    "(whole on every device) or AXIS=P (partial sums)."
                )
            seen.add(axis)
            if found:
                splits.append((axis, int(found[1])))
            elif kind == PARTIAL:
                partial.add(axis)
        return ArrayPlacement(tuple(splits), frozenset(partial))

    def on(self, axis: str) -> str:
        """ArrayPlacement on one axis: "S0", "B" or "P"."""
        dimension = dict(self.splits).get(axis)
        return f"S{dimension}" if dimension is not None else PARTIAL if axis in self.partial else WHOLE

    def within(self, dimension: int) -> tuple[str, ...]:
        """Axes that split a dimension, coarsest first."""
        return tuple(axis for axis, own in self.splits if own == dimension)

    def __str__(self) -> str:
        return ",".join([f"{axis}=S{d}" for axis, d in self.splits] + [f"{axis}=P" for axis in sorted(self.partial)])

    def local_shape(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of one device's part.

        Args:
            shape: of the array.
            sizes: sizes of the mesh axes.

        Raises:
            ShardingError: an axis is unknown, or a dimension is not there or does not divide.
        """
        local = list(shape)
        for axis in (*(axis for axis, _ in self.splits), *self.partial):
            if axis not in sizes:
                raise ShardingError(f"placement {self}: no mesh axis {axis!r}; there are {', '.join(sizes)}.")
        for axis, dimension in self.splits:
            if dimension >= len(shape):
                raise ShardingError(f"placement {self}: an array of shape {shape} has no dimension {dimension}.")
            if local[dimension] % sizes[axis]:
                raise ShardingError(
                    f"placement {self}: dimension {dimension} of {shape} does not divide over {axis} = {sizes[axis]}; "
                    "pad it, or split another one."
                )
            local[dimension] //= sizes[axis]
        return tuple(local)


@dataclass(frozen=True)
class ConversionStep:
    """One step of a conversion, over one mesh axis.

    Attributes:
        axis: the mesh axis.
        before, after: placement on it: "S0", "B" or "P".
        collective: ``all-gather``, ``all-reduce``, ``reduce-scatter``, ``all-to-all``; ``none`` if nothing is sent.
        elements: elements that each device sends, by the ring algorithms.
        placement: of the array after the step.
    """

    axis: str
    before: str
    after: str
    collective: str
    elements: int
    placement: ArrayPlacement

    def __str__(self) -> str:
        return f"{self.collective} over {self.axis}: {self.before} -> {self.after}, {self.elements:,} elements"


def conversion(
    before: ArrayPlacement, after: ArrayPlacement, shape: tuple[int, ...], sizes: Mapping[str, int]
) -> tuple[ConversionStep, ...]:
    """Steps of a conversion that send the fewest elements; of those, the fewest steps.

    The innermost axis of a dimension is the only one that can be gathered or moved, and a new one becomes the
    innermost. So a conversion of one axis may first move another one away. Axes that neither change nor are nested with
    one that does stay as they are.

    Args:
        before, after: placements of the array.
        shape: its global shape.
        sizes: sizes of the mesh axes.

    Raises:
        ShardingError: a placement does not fit the array or the mesh, or dimensions do not divide on any way.
    """
    before.local_shape(shape, sizes)
    after.local_shape(shape, sizes)
    goal, number = _canonical(after), itertools.count()
    changed = {axis for axis in sizes if before.on(axis) != after.on(axis)}
    for dimension in range(len(shape)):
        kept = [[axis for axis in one.within(dimension) if axis not in changed] for one in (before, after)]
        changed |= set(kept[0]) if kept[0] != kept[1] else set()
    kinds = {one.on(axis) for axis in changed for one in (before, after)} - {WHOLE, PARTIAL}
    movable = changed | {axis for axis in sizes if before.on(axis) in kinds}
    queue: list[tuple[int, int, int, ArrayPlacement, tuple[ConversionStep, ...]]] = [(0, 0, next(number), before, ())]
    done: set[ArrayPlacement] = set()
    while queue:
        cost, length, _, at, steps = heapq.heappop(queue)
        if _canonical(at) == goal:
            return steps
        if _canonical(at) in done:
            continue
        done.add(_canonical(at))
        for step in _steps(at, shape, sizes):
            if step.axis in movable and _canonical(step.placement) not in done:
                entry = cost + step.elements, length + 1, next(number), step.placement, (*steps, step)
                heapq.heappush(queue, entry)
    raise ShardingError(f"no conversion of {shape} from {before} to {after} divides all dimensions on {dict(sizes)}.")


def convert(x: Array, before: ArrayPlacement, after: ArrayPlacement, sizes: Mapping[str, int]) -> Array:
    """One device's part of an array in another placement; called where the mesh axes are manual (``jax.shard_map``).

    Args:
        x: this device's part in ``before``, of any shape and dtype.
        before, after: placements of the array.
        sizes: sizes of the mesh axes.

    Raises:
        ShardingError: as for ``conversion``.
    """
    shape = list(x.shape)
    for axis, dimension in before.splits:
        shape[dimension] *= sizes[axis]
    for step in conversion(before, after, tuple(shape), sizes):
        x = _carried_out(x, step, sizes[step.axis])
    return x


def _canonical(placement: ArrayPlacement) -> ArrayPlacement:
    """The placement with its splits by dimension; their order matters within a dimension only."""
    return ArrayPlacement(tuple(sorted(placement.splits, key=lambda split: split[1])), placement.partial)


def _steps(at: ArrayPlacement, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Iterator[ConversionStep]:
    """All single steps from a placement."""
    local = math.prod(at.local_shape(shape, sizes))
    innermost = {dimension: axis for axis, dimension in at.splits}
    for axis, size in sizes.items():
        kind = at.on(axis)
        split = None if kind in (WHOLE, PARTIAL) else int(kind[1:])
        if split is not None and innermost[split] != axis:
            continue
        rest = tuple(one for one in at.splits if one[0] != axis)
        others = at.partial - {axis}
        shared = local * (size - 1) // size  # what a reduce-scatter or an all-to-all sends
        for after in (WHOLE, PARTIAL, *(f"S{d}" for d in range(len(shape)))):
            if after == kind:
                continue
            if after.startswith("S"):
                placement = ArrayPlacement((*rest, (axis, int(after[1:]))), others)
                if not _divides(placement, shape, sizes):
                    continue
            else:
                placement = ArrayPlacement(rest, others | ({axis} if after == PARTIAL else frozenset()))
            if kind == PARTIAL:
                name, sent = ("all-reduce", 2 * shared) if after == WHOLE else ("reduce-scatter", shared)
            elif split is None or after == PARTIAL:
                name, sent = "none", 0
            else:
                name, sent = ("all-gather", local * (size - 1)) if after == WHOLE else ("all-to-all", shared)
            yield ConversionStep(axis, kind, after, name, sent, placement)


def _divides(placement: ArrayPlacement, shape: tuple[int, ...], sizes: Mapping[str, int]) -> bool:
    return all(
        shape[d] % math.prod(sizes[axis] for axis, own in placement.splits if own == d) == 0 for d in range(len(shape))
    )


def _carried_out(x: Array, step: ConversionStep, size: int) -> Array:
    axis, before, after = step.axis, step.before, step.after
    split, target = (int(kind[1:]) if kind.startswith("S") else None for kind in (before, after))
    if before == PARTIAL:
        if target is None:
            return jax.lax.psum(x, axis)
        return jax.lax.psum_scatter(x, axis, scatter_dimension=target, tiled=True)
    if split is not None:
        if after == WHOLE:
            return jax.lax.all_gather(x, axis, axis=split, tiled=True)
        if target is not None:
            return jax.lax.all_to_all(x, axis, split_axis=target, concat_axis=split, tiled=True)
        # Each device's part, in its place among zeros, is its summand.
        own = jax.lax.axis_index(axis) * x.shape[split]
        wide = jnp.zeros((*x.shape[:split], x.shape[split] * size, *x.shape[split + 1 :]), x.dtype)
        return jax.lax.dynamic_update_slice_in_dim(wide, x, own, axis=split)
    if target is not None:
        width = x.shape[target] // size
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis) * width, width, axis=target)
    return jnp.where(jax.lax.axis_index(axis) == 0, x, jnp.zeros_like(x))  # whole to partial: one summand has it all
