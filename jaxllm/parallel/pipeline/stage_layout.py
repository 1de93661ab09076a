"""Which layers a stage has, and how they get from where they are stored to where they are used.

A unit is one repeat of a segment's group of blocks, what the model scans over. Virtual stages have consecutive units.
Where each stage has one chunk and all have equally many units of the only segment, the stacked units are stored split
over ``stage`` and lie where they are used. Else they are stored split by width over ``stage`` (as over ``fsdp``), and
once a step an all-to-all brings each stage its units whole, and the gradients back.
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
    """Units of the virtual stages.

    Attributes:
        counts: of each segment on each virtual stage. [K G]
        firsts: number of the first of them within its segment. [K G]
    """

    counts: Int[np.ndarray, "K G"]
    firsts: Int[np.ndarray, "K G"]

    @property
    def rooms(self) -> tuple[int, ...]:
        """The most units of each segment that a virtual stage has."""
        return tuple(int(n) for n in self.counts.max(0))

    def offloaded(self, share: float) -> tuple[int, ...]:
        """Of each segment, how many of ``rooms`` leave their activations to the host: ``share`` of them, rounded up.

        So a share above 0 is never none.
        """
        return tuple(math.ceil(share * room) for room in self.rooms)

    @property
    def even(self) -> bool:
        """Whether all virtual stages have as many units, of one segment."""
        return self.counts.shape[1] == 1 and bool((self.counts == self.counts[0]).all())


def assign_units(repeats: Sequence[int], virtual_stages: int, depths: Sequence[int] = ()) -> StageDepths:
    """Shares the units of a model out to virtual stages.

    Args:
        repeats: units of each segment.
        depths: units of each virtual stage, in the model's order; as even as can be if empty, the first and the last
            having fewer, for the embedding and the head are there.

    Raises:
        ScheduleError: they are not so many; says how many there are.
    """
    units = sum(repeats)
    if units < virtual_stages:
        raise ScheduleError(
            f"pipeline: the model has {units} layers (or groups of them) for {virtual_stages} virtual stages, and each "
            f"needs one: take {units} or fewer stages times chunks."
        )
    if not depths:
        least, more = divmod(units, virtual_stages)
        inner_first = [*range(1, virtual_stages - 1), virtual_stages - 1, 0]
        depths = [least] * virtual_stages
        for k in inner_first[:more]:
            depths[k] += 1
    if len(depths) != virtual_stages or sum(depths) != units or min(depths) < 1:
        raise ScheduleError(
            f"parallel.depths = {tuple(depths)}: give {virtual_stages} positive numbers, one for each virtual stage in "
            f"the model's order, of sum {units} (layers, or groups of them where a pattern repeats)."
        )
    ends = np.cumsum(depths)
    starts = ends - np.asarray(depths)
    offsets = np.cumsum([0, *repeats])[:-1]
    low = np.clip(starts[:, None] - offsets, 0, repeats)
    high = np.clip(ends[:, None] - offsets, 0, repeats)
    return StageDepths((high - low).astype(np.int32), low.astype(np.int32))


@dataclass(frozen=True)
class UnitPlacement:
    """Where the units of one segment lie, stored and used.

    Attributes:
        taken: unit of each place of each stage, chunks one after the other; 0 where there is none. [P R]
        place: of each unit, among all stages' places. [U]
    """

    taken: Int[np.ndarray, "P R"]
    place: Int[np.ndarray, " U"]


def place_units(depths: StageDepths, schedule: Schedule, segment: int, repeats: int) -> UnitPlacement:
    """Of a segment of ``repeats`` units."""
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
    """A segment's stacked weight [U ...], its part here, to this stage's units [R ...].

    Inside ``jax.shard_map`` over ``stage``.

    Args:
        split: dimension that is split over ``stage``: 0 for units that already lie right; None for none.
    """
    if split == 0:
        return w
    if split is None:
        mine = jnp.asarray(where.taken)[jax.lax.axis_index(STAGE)]
        return _rows(w, mine)
    rows = _rows(w, jnp.asarray(where.taken.reshape(-1)))
    return run_fully_manual(lambda rows: jax.lax.all_to_all(rows, STAGE, 0, split, tiled=True), rows)


def return_gradients(g: Array, where: UnitPlacement, split: int | None) -> Array:
    """Gradients of this stage's units [R ...] to the part of the segment's [U ...] that is stored here."""
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
