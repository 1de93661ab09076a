"""Stage layout: assignment of layers to pipeline stages, and the all-to-all between stored and used parameters.

A unit is one repeat of a segment's group of blocks, the element that the model scans over. Virtual stages have
consecutive units. Where each stage has one chunk and all have equal numbers of units of the only segment, the stacked
units are stored split over ``stage`` and are used where they are stored. Otherwise they are stored split by width over
``stage`` (as over ``fsdp``), and once per step an all-to-all brings whole units to their stages, and gradients back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxllm.parallel.pipeline.schedule import Schedule, ScheduleError
from jaxllm.parallel.pipeline.stage_collectives import run_fully_manual

STAGE = "stage"


@dataclass(frozen=True)
class StageDepths:
    """Units of the virtual stages. K virtual stages, G segments.

    Attributes:
        counts: number of units of each segment on each virtual stage. [K G]
        firsts: index of the first of them within its segment. [K G]
    """

    counts: Int[np.ndarray, "K G"]
    firsts: Int[np.ndarray, "K G"]

    @property
    def rooms(self) -> tuple[int, ...]:
        """Largest number of units of each segment on a virtual stage."""
        return tuple(int(n) for n in self.counts.max(0))

    def offloaded(self, share: float) -> tuple[int, ...]:
        """Units of each segment whose activations are offloaded to the host: ``share`` of ``rooms``, rounded up.

        A share above 0 offloads at least one.
        """
        return tuple(math.ceil(share * room) for room in self.rooms)

    @property
    def even(self) -> bool:
        """Whether there is one segment and all virtual stages have equal numbers of its units."""
        return self.counts.shape[1] == 1 and bool((self.counts == self.counts[0]).all())


def assign_units(repeats: Sequence[int], virtual_stages: int, depths: Sequence[int] = ()) -> StageDepths:
    """Assignment of the units of a model to virtual stages.

    Args:
        repeats: number of units of each segment.
        virtual_stages: number of virtual stages.
        depths: number of units of each virtual stage, in model order. Empty for an even split, in which the first and
            the last virtual stage have fewer, because they also have the embedding and the head.

    Raises:
        ScheduleError: there are too few units, or ``depths`` does not add up to them; says how many there are.
    """
    units = sum(repeats)
    if units < virtual_stages:
        raise ScheduleError(
            f"pipeline: the model has {units} layers (or groups of them) for {virtual_stages} virtual stages, and each "
            f"needs one: choose stages and chunks whose product is {units} or less."
        )
    depths = depths or split_units(units, virtual_stages)
    if len(depths) != virtual_stages or sum(depths) != units or min(depths) < 1:
        raise ScheduleError(
            f"parallel.depths = {tuple(depths)}: give {virtual_stages} positive numbers, one for each virtual stage in "
            f"model order, with sum {units} (layers, or groups of them where a pattern repeats)."
        )
    ends = np.cumsum(depths)
    starts = ends - np.asarray(depths)
    offsets = np.cumsum([0, *repeats])[:-1]
    low = np.clip(starts[:, None] - offsets, 0, repeats)
    high = np.clip(ends[:, None] - offsets, 0, repeats)
    return StageDepths((high - low).astype(np.int32), low.astype(np.int32))


def split_units(units: int, virtual_stages: int, like: Sequence[int] = ()) -> tuple[int, ...]:
    """Split of units over virtual stages, at least one each, that gives the busiest of them the least to do.

    Args:
        units: at least ``virtual_stages``.
        virtual_stages: number of virtual stages.
        like: another split of them, such as that of more stages: what its first and last virtual stage have fewer than
            its largest is what the embedding and the head cost, in units. Empty: these cost nothing.

    Returns:
        number of units of each virtual stage; of equally good splits that with fewer on the first, then on the last.
    """
    work = [0] * virtual_stages
    if like:
        work[0] += max(like) - like[0]
        work[-1] += max(like) - like[-1]
    depths = [1] * virtual_stages
    inner_first = [*range(1, virtual_stages - 1), virtual_stages - 1, 0]
    for _ in range(units - virtual_stages):
        depths[min(inner_first, key=lambda k: work[k] + depths[k])] += 1
    return tuple(depths)


@dataclass(frozen=True)
class UnitPlacement:
    """Placement of the units of one segment on the stages. P stages, R places per stage, U units.

    Attributes:
        taken: unit at each place of each stage, chunk after chunk; 0 at places without one. [P R]
        place: place of each unit, counted over all stages. [U]
    """

    taken: Int[np.ndarray, "P R"]
    place: Int[np.ndarray, " U"]


def place_units(depths: StageDepths, schedule: Schedule, segment: int, repeats: int) -> UnitPlacement:
    """Placement of a segment of ``repeats`` units on the stages."""
    room = depths.rooms[segment]
    taken = np.zeros((schedule.stages, schedule.chunks * room), np.int32)
    place = np.zeros(repeats, np.int32)
    for stage in range(schedule.stages):
        for chunk in range(schedule.chunks):
            k = schedule.virtual(stage, chunk)
            for i in range(depths.counts[k, segment]):
                unit = depths.firsts[k, segment] + i
                taken[stage, chunk * room + i] = unit
                place[unit] = stage * taken.shape[1] + chunk * room + i
    return UnitPlacement(taken, place)


def gather_units(w: Array, where: UnitPlacement, split: int | None) -> Array:
    """Weights of this stage's units [R ...], from this device's shard of a segment's stacked weight [U ...].

    For use inside ``jax.shard_map`` over ``stage``.

    Args:
        split: dimension that is split over ``stage``: 0 if units are stored where they are used; None if none is.
    """
    if split == 0:
        return w
    if split is None:
        mine = jnp.asarray(where.taken)[jax.lax.axis_index(STAGE)]
        return _rows(w, mine)
    rows = _rows(w, jnp.asarray(where.taken.reshape(-1)))
    return run_fully_manual(lambda rows: jax.lax.all_to_all(rows, STAGE, 0, split, tiled=True), rows)


def return_gradients(g: Array, where: UnitPlacement, split: int | None) -> Array:
    """Gradients in the layout of the stored weights [U ...], from the gradients of this stage's units [R ...]."""
    if split == 0:
        return g
    place = jnp.asarray(where.place)
    if split is None:
        here, room = jax.lax.axis_index(STAGE), where.taken.shape[1]
        mine = place // room == here
        rows = _rows(g, place % room)
        return jax.lax.psum(jnp.where(mine.reshape(-1, *(1,) * (g.ndim - 1)), rows, 0), STAGE)
    return _rows(run_fully_manual(lambda g: jax.lax.all_to_all(g, STAGE, split, 0, tiled=True), g), place)


def _rows(w: Array, rows: Array) -> Array:
    there = jax.typeof(w).sharding.spec
    return w.at[rows].get(out_sharding=there) if any(p is not None for p in there) else w[rows]
