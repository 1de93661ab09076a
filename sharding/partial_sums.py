"""Sums of gradients of which each device along some mesh axes has a part (``jax.P(unreduced=...)``).

    flat         all-reduce over all axes that do not split the result
    two-level    reduce-scatter over ``local``, all-reduce of the parts over the other axes, all-gather over ``local``

Two-level sums are those of Fire-Flyer's HFReduce (arXiv:2408.14158): of n bytes a device sends 2 n (l-1)/l over the
links inside a group of l devices and 2 n/l (g-1)/g between g groups, where the links are slow; a flat sum sends up to
2 n (lg-1)/(lg) there. Where the axes of the sum split the result too, it is reduce-scattered first.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
from jax import Array
from jax.sharding import PartitionSpec

from sharding.rules import mesh_axes_of, split_sizes, without_axes

LOCAL = "local"
"""Mesh axis of the inner groups."""


def reduce(
    x: Array,
    there: PartitionSpec,
    *,
    two_level: bool,
    levels: tuple[str, ...] = (),
    later: frozenset[str] = frozenset(),
) -> Array:
    """Sum of the partial sums of an array.

    Reduce-scatters over the axes that split the result first, so that only shards are summed over the others.

    Args:
        x: partial sums over the axes of its ``unreduced``.
        there: partition spec of the result.
        two_level: sum over ``local`` and other axes in two levels, where a dimension divides over ``local``.
        levels: axes that split the result and are reduce-scattered one after the other, the innermost first.
        later: axes whose partial sums stay, and which do not split the result yet.
    """
    late = jax.typeof(x).sharding.spec.unreduced
    later = later & late
    there = without_axes(there, later) if later else there
    rest = late - mesh_axes_of(there) - later
    waiting = [axis for axis in levels if axis in late & mesh_axes_of(there)]
    for start in range(len(waiting)):
        outer = frozenset(waiting[start:])
        x = jax.sharding.reshard(x, jax.P(*without_axes(there, outer), unreduced=rest | later | outer))
    if rest or later:
        x = jax.sharding.reshard(x, jax.P(*there, unreduced=rest | later))
    if later:
        return x
    if two_level and LOCAL in rest and len(rest) > 1:
        sizes = split_sizes(jax.sharding.get_abstract_mesh())
        if (parts := spec_of_parts(x.shape, there, sizes)) is not None:
            x = jax.sharding.reshard(x, jax.P(*parts, unreduced=rest - {LOCAL}))
            x = jax.sharding.reshard(x, parts)
    return jax.sharding.reshard(x, there)


def spec_of_parts(shape: tuple[int, ...], there: PartitionSpec, sizes: Mapping[str, int]) -> PartitionSpec | None:
    """Partition spec of an array that is split over ``local`` too, along its first dimension that divides.

    Args:
        shape: of the whole array.
        there: its partition spec.
        sizes: of the mesh axes.

    Returns:
        None where no dimension divides: the array is summed flat.
    """
    parts = [*there, *(None,) * (len(shape) - len(there))]
    for dim, (size, part) in enumerate(zip(shape, parts, strict=True)):
        axes = (*(() if part is None else part if isinstance(part, tuple) else (part,)), LOCAL)
        ways = 1
        for axis in axes:
            ways *= sizes[axis]
        if size % ways == 0 and size:
            return PartitionSpec(*parts[:dim], axes if len(axes) > 1 else LOCAL, *parts[dim + 1 :])
    return None


def keep_gradient(w: Array, over: frozenset[str], *, two_level: bool) -> Array:
    """A weight whose gradient may be partial sums over mesh axes that it is replicated on.

    They are summed by the transpose, for each layer as soon as its gradient is there.

    Args:
        w: sharded as it is stored.
        over: the axes.
        two_level: sum in two levels, see ``reduce``.
    """
    if two_level and LOCAL in over and len(over) > 1:
        return _keep_two_level(w, over)
    return jax.sharding.reshard(w, jax.P(*jax.typeof(w).sharding.spec, reduced=over))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _keep_two_level(w: Array, over: frozenset[str]) -> Array:
    return jax.sharding.reshard(w, jax.P(*jax.typeof(w).sharding.spec, reduced=over))


def _forward(w: Array, over: frozenset[str]) -> tuple[Array, None]:
    return _keep_two_level(w, over), None


def _backward(over: frozenset[str], _: None, gradient: Array) -> tuple[Array]:
    return (reduce(gradient, jax.P(*jax.typeof(gradient).sharding.spec.partitions), two_level=True),)


_keep_two_level.defvjp(_forward, _backward)
