"""A pipeline schedule as data: what each stage does, in which order; when that is, and what it holds meanwhile.

The layers are cut into ``stages * chunks`` virtual stages, of which each stage holds ``chunks``. A micro-batch goes
forward through all of them (F), then backward (B), and the gradients of the weights are made with B or, where a
schedule splits the backward pass, in an operation of their own (W, arXiv:2401.10241).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "W"]


class PipelineOp(NamedTuple):
    """One operation of a stage: ``kind`` of micro-batch ``micro`` in its chunk ``chunk``."""

    kind: Kind
    micro: int
    chunk: int


class OpCosts(NamedTuple):
    """Time of each operation, any unit; a backward pass that is not split takes ``B + W``."""

    F: float = 1.0
    B: float = 1.0
    W: float = 1.0


UNIT = OpCosts()
"""As the papers compare schedules: all operations take as long."""


class TimedOp(NamedTuple):
    """An operation, when it begins and ends."""

    op: PipelineOp
    start: float
    end: float


class ScheduleError(ValueError):
    """A schedule cannot be made or run; the message says what would be legal."""


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule.

    Attributes:
        name: of its kind.
        stages: devices along the pipeline.
        micro_batches: of one step.
        chunks: virtual stages of a stage.
        split: the gradients of weights are operations of their own.
        vee: chunks go down the stages and up again, so that the first and the last lie together; else each begins at
            stage 0.
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
        """The place of a chunk in the model, 0 for its first layers."""
        return virtual_stage(self.stages, stage, chunk, self.vee)

    def holder(self, virtual: int) -> tuple[int, int]:
        """Stage and chunk of a virtual stage."""
        chunk, rest = divmod(virtual, self.stages)
        return (self.stages - 1 - rest if self.vee and chunk % 2 else rest), chunk

    def needs(self, stage: int, op: PipelineOp) -> Iterator[tuple[int, PipelineOp]]:
        """Operations, with their stages, whose results ``op`` takes."""
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
        """Time that ``op`` takes; a chunk is a part of a stage's layers."""
        whole = costs.B + costs.W if op.kind == "B" and not self.split else getattr(costs, op.kind)
        return whole / self.chunks

    @functools.cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of operations there are, in the order in which a micro-batch has them."""
        found = {op.kind for op in self.orders[0]}
        return tuple(kind for kind in ("F", "B", "W") if kind in found)

    def timeline(self, costs: OpCosts = UNIT) -> tuple[tuple[TimedOp, ...], ...]:
        """Every stage's operations, each begun as soon as the one before and those it needs are done.

        Raises:
            ScheduleError: operations wait for each other.
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
                raise ScheduleError(f"{self.name}: stage {stage} waits for ever at {describe(op)}.")
        return tuple(tuple(row) for row in out)

    def bubble(self, costs: OpCosts = UNIT) -> float:
        """Share of time that the busiest stage idles, from its own first operation to its last (arXiv:2405.15362)."""
        rows = self.timeline(costs)
        return 1 - self.work(costs) / max(row[-1].end - row[0].start for row in rows)

    def idle(self, costs: OpCosts = UNIT) -> float:
        """Share of all stages' time, from the first operation of any to the last, in which they idle."""
        return 1 - self.work(costs) / max(row[-1].end for row in self.timeline(costs))

    def work(self, costs: OpCosts = UNIT) -> float:
        """Time that a stage works."""
        return self.micro_batches * (costs.F + costs.B + costs.W)

    def live(self, stage: int) -> list[int]:
        """Activations that a stage holds after each of its operations, counted in chunks of a micro-batch.

        They are held from F until the gradients of the weights are made.
        """
        last = "W" if self.split else "B"
        out, held = [], 0
        for op in self.orders[stage]:
            held += (op.kind == "F") - (op.kind == last)
            out.append(held)
        return out

    @functools.cached_property
    def peaks(self) -> tuple[float, ...]:
        """The most activations that each stage holds, in micro-batches of all its layers."""
        return tuple(max(self.live(stage)) / self.chunks for stage in range(self.stages))

    @property
    def peak(self) -> float:
        """The largest of ``peaks``."""
        return max(self.peaks)


def forward_only(schedule: Schedule) -> Schedule:
    """The forward operations alone, in the same order."""
    orders = tuple(tuple(op for op in order if op.kind == "F") for order in schedule.orders)
    return dataclasses.replace(schedule, name=f"{schedule.name}, forward", split=False, orders=orders)


def virtual_stage(stages: int, stage: int, chunk: int, vee: bool) -> int:
    """The place in the model of a chunk of a stage."""
    return chunk * stages + (stages - 1 - stage if vee and chunk % 2 else stage)


def describe(op: PipelineOp) -> str:
    """In words, for messages."""
    what = {"F": "forward", "B": "backward", "W": "weights' gradients"}[op.kind]
    return f"{what} of micro-batch {op.micro}, chunk {op.chunk}"


def check(schedule: Schedule) -> None:
    """Proves that a schedule computes what it should: every operation once, none before what it needs.

    Raises:
        ScheduleError: says which operation is missing, double or too early.
    """
    s = schedule
    if len(s.orders) != s.stages:
        raise ScheduleError(f"{s.name}: {len(s.orders)} rows for {s.stages} stages.")
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
    for stage, row in enumerate(s.timeline()):  # refuses orders that wait for each other
        ends = {timed.op: timed.end for timed in row}
        for timed in row:
            for there, need in s.needs(stage, timed.op):
                if there == stage and ends[need] > timed.start:
                    raise ScheduleError(f"{s.name}: stage {stage} does {describe(timed.op)} before {describe(need)}.")
