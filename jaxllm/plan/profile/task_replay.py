"""Replay of a task graph: discrete-event list scheduling of tasks with known times on the streams of devices.

A lane is a device, or all devices of a pipeline stage, which do the same at the same time. A lane has a queue for each
of its streams, which runs tasks in the order of the list; a task starts when its queue is free and the tasks that it
needs are done. Second part of vTrain (arXiv:2312.12391, section III-D).

Devices that share a processor (processes pinned to one core) slow each other down. Times are those with all of them
computing; while some of them wait, the others are faster: processor sharing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Stream = Literal["compute", "communication"]
Interval = tuple[float, float]


class TimedTask(NamedTuple):
    """Task of a lane.

    Attributes:
        seconds: its time.
        lane: lane that runs it.
        needs: earlier tasks of the list, by index, that must be done before it.
        stream: queue of the lane.
        sends: whether it is a collective, which leaves the processor to others.
        label: what it is, for timelines.
    """

    seconds: float
    lane: int = 0
    needs: tuple[int, ...] = ()
    stream: Stream = "compute"
    sends: bool = False
    label: str = ""


@dataclass(frozen=True)
class Replay:
    """Replayed tasks.

    Attributes:
        tasks: the tasks.
        spans: start and end of each, in seconds.
    """

    tasks: tuple[TimedTask, ...]
    spans: tuple[Interval, ...]

    @property
    def seconds(self) -> float:
        """Seconds from the start to the end of the last task."""
        return max((end for _, end in self.spans), default=0.0)

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return 1 + max((task.lane for task in self.tasks), default=-1)

    def computing(self, lane: int) -> float:
        """Seconds in which a lane computes."""
        return _length(_union(self._of(lane, sends=False)))

    def exposed(self, lane: int) -> float:
        """Seconds in which a lane runs a collective and computes nothing (exposed communication)."""
        computed = _union(self._of(lane, sends=False))
        return _length(_union([*computed, *self._of(lane, sends=True)])) - _length(computed)

    def idle(self, lane: int) -> float:
        """Seconds in which a lane runs nothing."""
        return self.seconds - self.computing(lane) - self.exposed(lane)

    def _of(self, lane: int, *, sends: bool) -> list[Interval]:
        pairs = zip(self.tasks, self.spans, strict=True)
        return [span for task, span in pairs if task.lane == lane and task.sends == sends]


def replay(tasks: Sequence[TimedTask], beside: Sequence[Sequence[int]] = ()) -> Replay:
    """Replays tasks.

    Args:
        tasks: in an order in which each comes after those that it needs; queues keep it.
        beside: lanes of the other devices on the processor of each lane's device, the lane itself included where
            another device of it is there; empty where no processor is shared.

    Raises:
        ValueError: a task has negative time or needs a later one.
    """
    for number, task in enumerate(tasks):
        if task.seconds < 0 or any(need >= number for need in task.needs):
            raise ValueError(
                f"task {number} ({task.label}): {task.seconds} s after tasks {task.needs}; give 0 s or more, and tasks "
                "before it in the list."
            )
    spans = _shared(tasks, beside) if any(beside) else _alone(tasks)
    return Replay(tuple(tasks), tuple(spans))


def _alone(tasks: Sequence[TimedTask]) -> list[Interval]:
    free: dict[tuple[int, str], float] = {}
    spans: list[Interval] = []
    for task in tasks:
        queue = task.lane, task.stream
        start = max([free.get(queue, 0.0), *(spans[need][1] for need in task.needs)])
        spans.append((start, start + task.seconds))
        free[queue] = start + task.seconds
    return spans


def _shared(tasks: Sequence[TimedTask], beside: Sequence[Sequence[int]]) -> list[Interval]:
    queues: dict[tuple[int, str], deque[int]] = {}
    for number, task in enumerate(tasks):
        queues.setdefault((task.lane, task.stream), deque()).append(number)
    starts, ends = [0.0] * len(tasks), [-1.0] * len(tasks)
    left: dict[int, float] = {}  # running tasks, with their remaining seconds
    now = 0.0
    while True:
        for queue in queues.values():
            if queue and queue[0] not in left and all(ends[need] >= 0 for need in tasks[queue[0]].needs):
                left[queue[0]], starts[queue[0]] = tasks[queue[0]].seconds, now
        if not left:
            return list(zip(starts, ends, strict=True))
        busy = {tasks[number].lane for number in left if not tasks[number].sends}
        rates = {number: _rate(tasks[number], beside, busy) for number in left}
        step = min(left[number] / rates[number] for number in left)
        now += step
        for number in [*left]:
            if left[number] / rates[number] <= step:
                ends[number] = now
                del left[number]
                queues[tasks[number].lane, tasks[number].stream].popleft()
            else:
                left[number] -= step * rates[number]


def _rate(task: TimedTask, beside: Sequence[Sequence[int]], busy: set[int]) -> float:
    """Speed of a task over that with all devices of its processor computing."""
    if task.sends:
        return 1.0
    others = beside[task.lane]
    return (1 + len(others)) / (1 + sum(lane in busy for lane in others))


def _union(spans: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals that cover the same time, in order."""
    out: list[Interval] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((start, end))
    return out


def _length(spans: Sequence[Interval]) -> float:
    return sum(end - start for start, end in spans)
