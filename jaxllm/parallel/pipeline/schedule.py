"""Pipeline schedule as data: the order of operations on each stage, their timeline, the bubble, and activation memory.

The layers are split into ``stages * chunks`` virtual stages, ``chunks`` per stage. A micro-batch goes forward through
all of them (F), then backward (B). Weight gradients are computed in B or, in zero-bubble schedules, which split the
backward pass, in an operation of their own (W, arXiv:2401.10241).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "W"]


class PipelineOp(NamedTuple):
    """Operation of a stage: pass ``kind`` of micro-batch ``micro`` through its chunk ``chunk``."""

    kind: Kind
    micro: int
    chunk: int


class OpCosts(NamedTuple):
    """Durations of the operations of a stage, in any unit; a backward pass that is not split takes ``B + W``."""

    F: float = 1.0
    B: float = 1.0
    W: float = 1.0


UNIT = OpCosts()
"""Equal durations, with which the papers compare schedules."""


class TimedOp(NamedTuple):
    """Operation with its start and end time."""

    op: PipelineOp
    start: float
    end: float


class ScheduleError(ValueError):
    """Pipeline schedule that cannot be built or run; the message says what would be legal."""


@dataclass(frozen=True)
class Schedule:
    """Pipeline schedule.

    Attributes:
        name: name of the schedule, such as "1f1b".
        stages: number of pipeline stages.
        micro_batches: micro-batches per step.
        chunks: virtual stages per stage.
        split: whether the backward pass is split: weight gradients are operations of their own (W).
        vee: V-shaped placement: chunks go down the stages and up again, so that the first and the last virtual stage
            are on one stage; otherwise every chunk begins at stage 0.
        orders: operations of each stage, in order.
    """

    name: str
    stages: int
    micro_batches: int
    chunks: int
    split: bool
    vee: bool
    orders: tuple[tuple[PipelineOp, ...], ...]

    def virtual(self, stage: int, chunk: int) -> int:
        """Index of the virtual stage of a chunk; 0 has the first layers of the model."""
        return virtual_stage(self.stages, stage, chunk, self.vee)

    def holder(self, virtual: int) -> tuple[int, int]:
        """Stage and chunk that have a virtual stage."""
        chunk, rest = divmod(virtual, self.stages)
        return (self.stages - 1 - rest if self.vee and chunk % 2 else rest), chunk

    def needs(self, stage: int, op: PipelineOp) -> Iterator[tuple[int, PipelineOp]]:
        """Operations, with their stages, that ``op`` depends on."""
        here = self.virtual(stage, op.chunk)
        if op.kind == "W":
            yield stage, PipelineOp("B", op.micro, op.chunk)
            return
        if op.kind == "B":
            yield stage, PipelineOp("F", op.micro, op.chunk)
        before = here - 1 if op.kind == "F" else here + 1
        if 0 <= before < self.stages * self.chunks:
            there, chunk = self.holder(before)
            yield there, PipelineOp(op.kind, op.micro, chunk)

    def duration(self, op: PipelineOp, costs: OpCosts) -> float:
        """Duration of ``op``: that of a whole stage divided by the number of chunks."""
        whole = costs.B + costs.W if op.kind == "B" and not self.split else getattr(costs, op.kind)
        return whole / self.chunks

    @functools.cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of operations of the schedule, in the order in which a micro-batch goes through them."""
        found = {op.kind for op in self.orders[0]}
        return tuple(kind for kind in ("F", "B", "W") if kind in found)

    def timeline(self, costs: OpCosts = UNIT) -> tuple[tuple[TimedOp, ...], ...]:
        """Timed operations of every stage; each starts as soon as the one before it and its dependencies are done.

        Raises:
            ScheduleError: operations wait for each other (deadlock).
        """
        done: dict[tuple[int, PipelineOp], float] = {}
        out: list[list[TimedOp]] = [[] for _ in self.orders]
        moved = True
        while moved:
            moved = False
            for stage, order in enumerate(self.orders):
                while len(out[stage]) < len(order):
                    op = order[len(out[stage])]
                    needed = list(self.needs(stage, op))
                    if any(need not in done for need in needed):
                        break
                    free = out[stage][-1].end if out[stage] else 0.0
                    start = max([free, *(done[need] for need in needed)])
                    end = start + self.duration(op, costs)
                    out[stage].append(TimedOp(op, start, end))
                    done[stage, op] = end
                    moved = True
        for stage, order in enumerate(self.orders):
            if len(out[stage]) < len(order):
                op = order[len(out[stage])]
                raise ScheduleError(f"{self.name}: deadlock, stage {stage} waits forever at {describe(op)}.")
        return tuple(tuple(row) for row in out)

    def bubble(self, costs: OpCosts = UNIT) -> float:
        """Pipeline bubble: idle share of the slowest stage, from its first operation to its last (arXiv:2405.15362)."""
        rows = self.timeline(costs)
        return 1 - self.work(costs) / max(row[-1].end - row[0].start for row in rows)

    def idle(self, costs: OpCosts = UNIT) -> float:
        """Idle share of all stages, from the first operation of any stage to the last of any."""
        return 1 - self.work(costs) / max(row[-1].end for row in self.timeline(costs))

    def work(self, costs: OpCosts = UNIT) -> float:
        """Busy time of a stage."""
        return self.micro_batches * (costs.F + costs.B + costs.W)

    def live(self, stage: int) -> list[int]:
        """Saved activations of a stage after each of its operations, in chunks of a micro-batch.

        Activations are held from F until the weight gradients are computed.
        """
        last = "W" if self.split else "B"
        out, held = [], 0
        for op in self.orders[stage]:
            held += (op.kind == "F") - (op.kind == last)
            out.append(held)
        return out

    @functools.cached_property
    def peaks(self) -> tuple[float, ...]:
        """Peak of saved activations of each stage, in micro-batches of all its layers."""
        return tuple(max(self.live(stage)) / self.chunks for stage in range(self.stages))

    @property
    def peak(self) -> float:
        """Largest of ``peaks``."""
        return max(self.peaks)


def forward_only(schedule: Schedule) -> Schedule:
    """Forward-only schedule (evaluation): the forward operations of a schedule, in the same order."""
    orders = tuple(tuple(op for op in order if op.kind == "F") for order in schedule.orders)
    return dataclasses.replace(schedule, name=f"{schedule.name}, forward", split=False, orders=orders)


def virtual_stage(stages: int, stage: int, chunk: int, vee: bool) -> int:
    """Index of the virtual stage of a stage's chunk; ``vee`` is the V-shaped placement."""
    return chunk * stages + (stages - 1 - stage if vee and chunk % 2 else stage)


def describe(op: PipelineOp) -> str:
    """Operation in words, for messages."""
    what = {"F": "forward", "B": "backward", "W": "weight gradients"}[op.kind]
    return f"{what} of micro-batch {op.micro}, chunk {op.chunk}"


def check(schedule: Schedule) -> None:
    """Checks that a schedule is correct: every operation exactly once, and none before its dependencies.

    Raises:
        ScheduleError: says which operation is missing, duplicate or too early.
    """
    s = schedule
    if len(s.orders) != s.stages:
        raise ScheduleError(f"{s.name}: {len(s.orders)} orders for {s.stages} stages; give one per stage.")
    wanted = {
        PipelineOp(kind, micro, chunk)
        for kind in s.kinds
        for micro in range(s.micro_batches)
        for chunk in range(s.chunks)
    }
    for stage, order in enumerate(s.orders):
        found = set(order)
        if len(found) < len(order):
            double = next(op for op in order if order.count(op) > 1)
            raise ScheduleError(f"{s.name}: stage {stage} does {describe(double)} twice.")
        if found != wanted:
            wrong = sorted(found ^ wanted)[0]
            how = "does not do" if wrong in wanted else "should not do"
            raise ScheduleError(f"{s.name}: stage {stage} {how} {describe(wrong)}.")
    for stage, row in enumerate(s.timeline()):  # raises on deadlock
        ends = {timed.op: timed.end for timed in row}
        for timed in row:
            for there, need in s.needs(stage, timed.op):
                if there == stage and ends[need] > timed.start:
                    raise ScheduleError(f"{s.name}: stage {stage} does {describe(timed.op)} before {describe(need)}.")
