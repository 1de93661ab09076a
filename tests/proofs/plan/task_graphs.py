"""Replay of task graphs: longest paths, list scheduling in unit steps, makespans of schedules, shared cores."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import strategies as st

from jaxllm.parallel.pipeline.schedule import OpCosts, PipelineOp, Schedule
from jaxllm.parallel.pipeline.schedule_generators import make
from jaxllm.plan.profile.task_replay import Replay, TimedTask, replay
from tests.proofs.harness import proof


@st.composite
def task_graphs(draw: Any) -> list[TimedTask]:
    """Up to 24 tasks of whole seconds on up to four lanes."""
    lanes, tasks = draw(st.integers(1, 4)), []
    for number in range(draw(st.integers(1, 24))):
        needs = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        stream = draw(st.sampled_from(("compute", "communication")))
        sends = stream == "communication" or draw(st.booleans())
        tasks.append(TimedTask(draw(st.integers(0, 6)), draw(st.integers(0, lanes - 1)), tuple(needs), stream, sends))
    return tasks


def longest_path(tasks: list[TimedTask]) -> float:
    """Seconds of the longest chain of tasks, from its last task back."""

    def until(number: int) -> float:
        return tasks[number].seconds + max((until(need) for need in tasks[number].needs), default=0.0)

    return max(until(number) for number in range(len(tasks)))


def in_unit_steps(tasks: list[TimedTask]) -> list[tuple[float, float]]:
    """Start and end of each task, by a clock that moves on by one second: queues start their first task once it may."""
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    now = 0
    while len(ends) < len(tasks):
        moved = True
        while moved:  # tasks of no time start others at the same time
            moved = False
            for number, task in enumerate(tasks):
                before = [n for n in range(number) if (tasks[n].lane, tasks[n].stream) == (task.lane, task.stream)]
                if number not in starts and all(ends.get(n, now + 1) <= now for n in (*task.needs, *before)):
                    starts[number], moved = now, True
                if number in starts and number not in ends and starts[number] + task.seconds <= now:
                    ends[number], moved = now, True
        now += 1
    return [(starts[number], ends[number]) for number in range(len(tasks))]


@proof("plan", strategy=task_graphs(), count=300, sample=20, bound={"path": 1e-12, "schedule": 1e-12, "sums": 1e-9})
def replay_is_list_scheduling(tasks: list[TimedTask]) -> dict[str, float]:
    """Longest path where each task has a lane of its own; list scheduling in unit steps; parts add up to the whole."""
    apart = replay([task._replace(lane=number) for number, task in enumerate(tasks)])
    made = replay(tasks)
    there = np.array(in_unit_steps(tasks), float)
    parts = [made.computing(lane) + made.exposed(lane) + made.idle(lane) for lane in range(made.lanes)]
    return {
        "path": abs(apart.seconds - longest_path(tasks)),
        "schedule": float(np.abs(np.array(made.spans) - there).max()),
        "sums": max(abs(part - made.seconds) for part in parts),
    }


def of_schedule(schedule: Schedule, costs: OpCosts) -> list[TimedTask]:
    """Tasks of a pipeline schedule whose messages take no time."""
    numbers: dict[tuple[int, PipelineOp], int] = {}
    tasks: list[TimedTask] = []
    place = [0] * schedule.stages
    while any(at < len(order) for at, order in zip(place, schedule.orders, strict=True)):
        for stage, order in enumerate(schedule.orders):
            while place[stage] < len(order):
                needs = list(schedule.needs(stage, op := order[place[stage]]))
                if any(need not in numbers for need in needs):
                    break
                numbers[stage, op] = len(tasks)
                tasks.append(TimedTask(schedule.duration(op, costs), stage, tuple(numbers[need] for need in needs)))
                place[stage] += 1
    return tasks


@st.composite
def schedules(draw: Any) -> tuple[Schedule, OpCosts]:
    """A schedule with its costs."""
    name, stages = draw(st.sampled_from(("gpipe", "1f1b", "interleaved", "zb_h1"))), draw(st.integers(2, 6))
    costs = OpCosts(*(draw(st.floats(0.1, 5.0)) for _ in range(3)))
    return make(name, stages, stages * draw(st.integers(1, 3))), costs


@proof("plan", strategy=schedules(), count=200, sample=20, bound={"makespan": 1e-9, "timeline": 1e-9})
def replayed_schedules_have_known_makespans(drawn: tuple[Schedule, OpCosts]) -> dict[str, float]:
    """GPipe and 1F1B take (m + p - 1)(f + b); all schedules what their own timeline says."""
    schedule, costs = drawn
    seconds = replay(of_schedule(schedule, costs)).seconds
    there = max(row[-1].end for row in schedule.timeline(costs))
    known = (schedule.micro_batches + schedule.stages - 1) * sum(costs)
    of_known = schedule.name in ("gpipe", "1f1b")
    return {"makespan": abs(seconds / known - 1) if of_known else 0.0, "timeline": abs(seconds / there - 1)}


def work_of(made: Replay, lanes: set[int]) -> tuple[float, float]:
    """Seconds of work of lanes, and those in which any of them computes, at the middles of all intervals."""
    own = [
        (span, task.seconds)
        for task, span in zip(made.tasks, made.spans, strict=True)
        if task.lane in lanes and not task.sends
    ]
    edges = sorted({edge for span, _ in own for edge in span})
    busy = sum(
        high - low
        for low, high in itertools.pairwise(edges)
        if any(start <= (low + high) / 2 <= end for (start, end), _ in own)
    )
    return sum(seconds for _, seconds in own), busy


@proof(
    "plan",
    strategy=task_graphs(),
    count=300,
    sample=20,
    bound={"alone": 1e-9, "work": 1e-9, "queues": 1e-9, "pair": 1e-12},
)
def replay_shares_processors(tasks: list[TimedTask]) -> dict[str, float]:
    """Lanes 0 and 1 on a core: it does all its work at one rate; tasks start once they may; others are as alone."""
    made = replay(tasks, [[1], [0], [], []])
    errors = {"alone": 0.0, "work": 0.0, "queues": 0.0, "pair": 0.0}
    lanes = {0, 1}
    done, busy = work_of(made, lanes)
    errors["work"] = abs(done - 2 * busy)
    free: dict[tuple[int, str], float] = {}
    for task, (start, end) in zip(tasks, made.spans, strict=True):
        ready = max([free.get((task.lane, task.stream), 0.0), *(made.spans[need][1] for need in task.needs)])
        errors["queues"] = max(errors["queues"], abs(start - ready))
        free[task.lane, task.stream] = end
        if task.lane not in lanes or task.sends:
            errors["alone"] = max(errors["alone"], abs(end - start - task.seconds))
    first, second = sorted((1.0 + tasks[0].seconds, 2.0 + tasks[-1].seconds))
    pair = replay([TimedTask(first, 0), TimedTask(second, 1)], [[1], [0]])
    errors["pair"] = abs(pair.spans[0][1] - first) + abs(pair.spans[1][1] - (first + second) / 2)
    return errors
