"""Simulated activation offload of a pipeline schedule: what each stage moves to the host, and what it holds.

Activations of a chunk are live from their F to the last operation that reads them. Those that are offloaded leave the
device when they are copied out, one after the other behind their F, and come back as late as the operations allow that
read them. Copies never delay an operation: an activation whose copies do not fit between its uses stays. In 1F1B the
first stages hold the most micro-batches, and for the longest time, so they offload more than the last ones
(PipeOffload, arXiv:2503.01328). A stage offloads first what lives longest, as that paper does: of the activations that
it holds when it holds too many, the one that is needed last.

The executor (``saved_activations``) runs all stages as one program: a pool of slots has one size for all of them, and
each operation of each stage has one copy each way. There every stage offloads the same layers ("half", "full").
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from jaxllm.parallel.pipeline.schedule import UNIT, OpCosts, PipelineOp, Schedule, ScheduleError, TimedOp

Span = tuple[float, float]


class StageOffload(NamedTuple):
    """Activations that one stage offloads, and how many it holds.

    Attributes:
        moved: forward operations whose activations are offloaded.
        share: of the stage's activations, how many are.
        peak: most activations on the device at a time, in micro-batches of all layers of the stage.
    """

    moved: frozenset[PipelineOp]
    share: float
    peak: float


class OffloadPlan(NamedTuple):
    """Activation offload of a schedule, stage by stage.

    Attributes:
        none, full: nothing, and everything whose copies fit, is offloaded.
        half: half of the layers of each chunk are, as in the executor with ``parallel.offload`` 0.5.
        selective: activations, those needed last first, until a stage holds no more than ``room``, or as few as it can.
        room: in micro-batches of all layers of a stage.
    """

    none: tuple[StageOffload, ...]
    half: tuple[StageOffload, ...]
    selective: tuple[StageOffload, ...]
    full: tuple[StageOffload, ...]
    room: float


def simulate_offload(schedule: Schedule, copy: float, room: float | None = None, costs: OpCosts = UNIT) -> OffloadPlan:
    """Simulated activation offload of each stage of a schedule.

    Args:
        schedule: with backward operations.
        copy: time to copy the activations of a stage's micro-batch, all layers, one way; in the unit of ``costs``.
        room: micro-batches that a stage may hold with selective offload; None: half of the schedule's peak.
        costs: durations of the operations.

    Raises:
        ScheduleError: ``copy`` or ``room`` is negative, or the schedule has no backward operations.
    """
    room = schedule.peak / 2 if room is None else room
    if copy < 0 or room < 0 or "B" not in schedule.kinds:
        raise ScheduleError(
            f"offload of {schedule.name}: copies of {copy:g}, room for {room:g}; give times and sizes of at least "
            "zero, and a schedule with a backward pass."
        )
    rows = [_Stage(schedule, row, copy / schedule.chunks) for row in schedule.timeline(costs)]
    none, full = [one.offload(()) for one in rows], [one.offload(one.uses) for one in rows]
    halves = [_Stage(schedule, row, copy / schedule.chunks / 2) for row in schedule.timeline(costs)]
    half = [
        StageOffload(away.moved, away.share / 2, (all_.peak + away.peak) / 2)
        for all_, away in zip(none, (one.offload(one.uses) for one in halves), strict=True)
    ]
    return OffloadPlan(tuple(none), tuple(half), tuple(one.within(room) for one in rows), tuple(full), room)


class _Stage:
    """Operations of a stage in time."""

    def __init__(self, schedule: Schedule, row: tuple[TimedOp, ...], copy: float) -> None:
        self.copy, self.chunks = copy, schedule.chunks
        times = {one.op: one for one in row}
        self.uses = {
            one.op: (one, [times[one.op._replace(kind=kind)] for kind in schedule.kinds[1:]])
            for one in row
            if one.op.kind == "F"
        }

    def offload(self, wanted: Collection[PipelineOp]) -> StageOffload:
        """Offload of those of the wanted activations whose copies fit."""
        spans = self.spans(wanted)
        moved = frozenset(op for op, own in spans.items() if op in wanted and self._left(op, own))
        return StageOffload(moved, len(moved) / len(self.uses), self._peak(spans))

    def within(self, room: float) -> StageOffload:
        """Offload of few activations, those needed last first, with which at most ``room`` are on the device; where no
        choice is found, of those with which the fewest are.
        """
        moved: set[PipelineOp] = set()
        stuck: set[float] = set()
        while True:
            spans = self.spans(moved)
            most = room * self.chunks + 1e-9
            over = next((t for t in self._times(spans) if t not in stuck and self._held(spans, t) > most), None)
            if over is None:
                found = min(self.offload(moved), self.offload(self.uses if stuck else moved), key=lambda one: one.peak)
                return self._without_needless(found, max(room, found.peak))
            stays = {op for op, own in spans.items() if op not in moved and _covers(own, over)}
            for op in sorted(stays, key=lambda op: self.uses[op][1][-1].end, reverse=True):  # needed last
                if self._held(self.spans({*moved, op}), over) < self._held(spans, over):
                    moved.add(op)
                    break
            else:
                stuck.add(over)

    def _without_needless(self, found: StageOffload, room: float) -> StageOffload:
        """The offload without activations that may as well stay, the first ones first."""
        for op in sorted(found.moved, key=lambda op: self.uses[op][0].start):
            less = self.offload(found.moved - {op})
            if less.peak <= room + 1e-9 and less.moved < found.moved:
                found = less
        return found

    def spans(self, wanted: Collection[PipelineOp]) -> dict[PipelineOp, list[Span]]:
        """Times at which each activation is on the device, if the wanted ones are offloaded as far as copies fit."""
        whole = {op: [(f.start, uses[-1].end)] for op, (f, uses) in self.uses.items()}
        going = set(wanted)
        while True:
            out: dict[PipelineOp, float] = {}
            free = 0.0
            for op in sorted(going, key=lambda op: self.uses[op][0].end):
                free = out[op] = max(free, self.uses[op][0].end) + self.copy
            back: dict[PipelineOp, list[Span]] = {op: [] for op in going}
            free = float("inf")
            reads = [(use.start, use.end, op) for op in going for use in self.uses[op][1]]
            for start, end, op in sorted(reads, key=lambda one: one[0], reverse=True):
                free = min(free, start) - self.copy
                back[op].insert(0, (free, end))
            late = {op for op in going if back[op][0][0] < out[op] - 1e-9}
            if not late:
                moved = {op: [(self.uses[op][0].start, out[op]), *_joined(back[op])] for op in going}
                return whole | moved
            # The copies of the shortest-lived one do not fit, or delay those of others.
            going.remove(min(late, key=lambda op: self.uses[op][1][0].start - self.uses[op][0].end))

    def _left(self, op: PipelineOp, own: list[Span]) -> bool:
        return own != [(self.uses[op][0].start, self.uses[op][1][-1].end)]

    def _times(self, spans: dict[PipelineOp, list[Span]]) -> list[float]:
        return sorted({start for own in spans.values() for start, _ in own})

    def _held(self, spans: dict[PipelineOp, list[Span]], time: float) -> int:
        return sum(_covers(own, time) for own in spans.values())

    def _peak(self, spans: dict[PipelineOp, list[Span]]) -> float:
        return max(self._held(spans, time) for time in self._times(spans)) / self.chunks


def _covers(spans: list[Span], time: float) -> bool:
    return any(start <= time + 1e-9 and time < end - 1e-9 for start, end in spans)


def _joined(spans: list[Span]) -> list[Span]:
    """Spans in order, those that touch joined: what an operation reads stays for a copy that begins meanwhile."""
    out: list[Span] = []
    for start, end in spans:
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(end, out[-1][1])
        else:
            out.append((start, end))
    return out


def offload_table(plan: OffloadPlan) -> str:
    """Text table: micro-batches that each stage holds at most with none, half, selective and full offload."""
    from jaxllm.parallel.sharding_table_view import columns

    rows = [
        (str(stage), *(f"{kind[stage].peak:g}" for kind in plan[:4]), f"{100 * plan.selective[stage].share:.0f}%")
        for stage in range(len(plan.none))
    ]
    head = ("stage", "none", "half", f"at most {plan.room:g}", "full", "of them offloaded")
    return columns(head, rows, ">>>>>>")
