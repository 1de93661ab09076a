"""Schedule table: a pipeline schedule as the executor runs it, an operation and its buffer slots per tick and stage.

In a tick each stage runs one operation, then all stages send: a result is at the next stage one tick later. Each stage
has three pools of buffer slots: received messages (activations going forward, gradients going backward), activations
that F saves for B and W, and values that B leaves for W. Slots are allocated by live range, so the size of a pool is
the peak of the schedule.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from jaxtyping import Bool, Int

from jaxllm.parallel.pipeline.schedule import OpCosts, PipelineOp, Schedule, ScheduleError

KINDS = ("idle", "F", "B", "W")

Cells = Int[np.ndarray, "T P"]


@dataclass(frozen=True)
class ScheduleTable:
    """Table of a pipeline schedule: the operation of every stage in every tick. T ticks, P stages.

    Attributes:
        kind: kind of the operation, an index in ``KINDS``.
        micro, chunk: micro-batch and chunk of the operation; 0 in idle cells.
        virtual: virtual stage of the chunk; -1 in idle cells.
        message: message slot of the operation's input; the last slot if it needs none.
        saved: slot that F writes, B and W read.
        pending: slot that B writes and W reads.
        out: host slot to which the activations of the previous tick's F are copied, during the operation; the last slot
            if there are none. For offloaded layers, see ``saved_activations``.
        back: host slot that is copied to the device during the operation, for the next one.
        stays: whether the activations of this tick's F are for the next operation, and stay on the device.
        from_left, from_right, from_self: message slot for what arrives after the tick; the last slot if nothing does.
        right, left: whether any stage sends in this direction after the tick.
        pairs_right, pairs_left: (source, destination) stages of each direction.
        messages, saves, pendings, hosted: sizes of the pools; message and host pools have one more slot, for values
            that are not needed.
    """

    kind: Cells
    micro: Cells
    chunk: Cells
    virtual: Cells
    message: Cells
    saved: Cells
    pending: Cells
    out: Cells
    back: Cells
    stays: Bool[np.ndarray, "T P"]
    from_left: Cells
    from_right: Cells
    from_self: Cells
    right: Bool[np.ndarray, " T"]
    left: Bool[np.ndarray, " T"]
    pairs_right: tuple[tuple[int, int], ...]
    pairs_left: tuple[tuple[int, int], ...]
    messages: int
    saves: int
    pendings: int
    hosted: int

    @property
    def ticks(self) -> int:
        """Number of ticks."""
        return len(self.kind)

    @property
    def sends(self) -> int:
        """Messages that a device sends per step, including those that are not needed."""
        return int(self.right.sum() + self.left.sum())


def tabulate(schedule: Schedule, away: Collection[int] | None = None) -> ScheduleTable:
    """Table of a schedule: every operation takes one tick, as early as its dependencies allow.

    Args:
        schedule: the schedule.
        away: chunks whose activations are offloaded, which have slots in host memory alone, while the others have some
            on the device alone. None: both are for all chunks. Ticks and messages do not depend on it.
    """
    stays = {*range(schedule.chunks)}.difference(away or ())
    leaves = {*range(schedule.chunks)} if away is None else {*away}
    s, p = schedule, schedule.stages
    whole = float(s.chunks)
    rows = s.timeline(OpCosts(whole, whole, whole) if s.split else OpCosts(whole, whole / 2, whole / 2))
    tick = {(stage, t.op): round(t.start) for stage, row in enumerate(rows) for t in row}
    ticks = max(tick.values()) + 1
    last = s.kinds[-1]

    cells = {name: np.zeros((ticks, p), np.int32) for name in ("kind", "micro", "chunk", "saved", "pending")}
    cells["virtual"] = np.full((ticks, p), -1, np.int32)
    for (stage, op), t in tick.items():
        cells["kind"][t, stage] = KINDS.index(op.kind)
        cells["micro"][t, stage], cells["chunk"][t, stage] = op.micro, op.chunk
        cells["virtual"][t, stage] = s.virtual(stage, op.chunk)

    sizes = {"saved": 1, "pending": 1}
    for pool, begins in (("saved", "F"), ("pending", "B")):
        if pool == "pending" and not s.split:
            continue
        for stage in range(p):
            lives = {
                op: (t, tick[stage, op._replace(kind=last)])
                for op, t in _of(tick, stage)
                if op.kind == begins and (pool == "pending" or op.chunk in stays)
            }
            slots = allocate_slots(lives.items())
            sizes[pool] = max(sizes[pool], 1 + max(slots.values(), default=-1))
            for op, slot in slots.items():
                for kind in s.kinds:
                    if (same := op._replace(kind=kind)) in s.orders[stage] and (kind != "F" or pool == "saved"):
                        cells[pool][tick[stage, same], stage] = slot

    cells["back"], cells["stays"] = np.zeros((ticks, p), np.int32), np.zeros((ticks, p), bool)
    copied: dict[
        tuple[int, PipelineOp], tuple[int, list[int]]
    ] = {}  # tick of the copy to the host; ticks of the copies back
    for (stage, op), t in tick.items():
        if op.kind == "F" and "B" in s.kinds and op.chunk in leaves:
            takes = [tick[stage, op._replace(kind=kind)] for kind in s.kinds[1:]]
            cells["stays"][t, stage] = takes[0] == t + 1
            copied[stage, op] = t + 1, [at - 1 for at in takes if at > t + 1]
    host = {
        (stage, op): slot
        for stage in range(p)
        for op, slot in allocate_slots(
            (op, (o, max(b))) for (there, op), (o, b) in copied.items() if there == stage and b
        ).items()
    }
    hosted = 1 + max(host.values(), default=-1)
    cells["out"] = np.full((ticks, p), hosted, np.int32)
    for (stage, op), slot in host.items():
        out, backs = copied[stage, op]
        cells["out"][out, stage] = slot
        cells["back"][backs, stage] = slot

    routes = [_route(s, stage, op) for stage, order in enumerate(s.orders) for op in order]
    sent = [(stage, op, there, to) for stage, op, there, to in routes if to is not None]
    slots_of: dict[tuple[int, PipelineOp], int] = {}
    for stage in range(p):
        lives = {to: (tick[a, op] + 1, tick[stage, to]) for a, op, there, to in sent if there == stage}
        slots_of |= {(stage, to): slot for to, slot in allocate_slots(lives.items()).items()}
    messages = 1 + max(slots_of.values())
    cells |= {name: np.full((ticks, p), messages, np.int32) for name in ("message", *ARRIVALS)}
    used = {"right": np.zeros(ticks, bool), "left": np.zeros(ticks, bool)}
    pairs: dict[str, set[tuple[int, int]]] = {"right": set(), "left": set()}
    for a, op, there, to in sent:
        t, way = tick[a, op], _way(p, a, there)
        cells[ARRIVALS[way]][t, there] = slots_of[there, to]
        cells["message"][tick[there, to], there] = slots_of[there, to]
        if way < 2:
            side = ("right", "left")[way]
            used[side][t] = True
            pairs[side].add((a, there))
    return ScheduleTable(
        **cells,
        **used,
        pairs_right=tuple(sorted(pairs["right"])),
        pairs_left=tuple(sorted(pairs["left"])),
        messages=messages,
        saves=sizes["saved"],
        pendings=sizes["pending"] if s.split else 0,
        hosted=hosted,
    )


ARRIVALS = ("from_left", "from_right", "from_self")


def _of(tick: dict[tuple[int, PipelineOp], int], stage: int) -> list[tuple[PipelineOp, int]]:
    return [(op, t) for (there, op), t in tick.items() if there == stage]


def _route(s: Schedule, stage: int, op: PipelineOp) -> tuple[int, PipelineOp, int, PipelineOp | None]:
    """Consumer of an operation's result: (stage, op, stage of the consumer, its operation or None).

    The forward pass of the last virtual stage ends in the loss, whose gradient goes to its own backward pass.
    """
    here = s.virtual(stage, op.chunk)
    if op.kind == "F" and here == s.stages * s.chunks - 1:
        return stage, op, stage, op._replace(kind="B") if "B" in s.kinds else None
    after = here + 1 if op.kind == "F" else here - 1
    if op.kind == "W" or after < 0:
        return stage, op, stage, None
    there, chunk = s.holder(after)
    return stage, op, there, PipelineOp(op.kind, op.micro, chunk)


def _way(p: int, a: int, b: int) -> int:
    """Direction in which stage b receives from stage a, an index in ``ARRIVALS``."""
    ways = {(a + 1) % p: 0, (a - 1) % p: 1} if p > 2 else {(a + 1) % p: 0}
    return 2 if a == b else ways[b]


Thing = TypeVar("Thing", bound=Hashable)


def allocate_slots(lives: Iterable[tuple[Thing, tuple[int, int]]]) -> dict[Thing, int]:
    """Slots by live range: values that are live in a common tick get different slots, as few as possible.

    Args:
        lives: values with their first and last tick.
    """
    ends: list[int] = []
    out: dict[Thing, int] = {}
    for thing, (first, last) in sorted(lives, key=lambda item: item[1]):
        if last < first:
            raise ScheduleError(f"{thing} is needed before it is computed.")
        slot = next((i for i, end in enumerate(ends) if end < first), len(ends))
        ends[slot:] = [last, *ends[slot + 1 :]] if slot < len(ends) else [last]
        out[thing] = slot
    return out
