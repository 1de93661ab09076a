"""Rematerialisation of any value graph by retention intervals (Moccasin, arXiv:2304.14463, section 2).

Operations run for the first time in the graph's order. Before the first run of one, others before it may run again, in
order: the pairs (first run, operation that runs) are the events. A retention interval of a value begins at an event
that computes it, and as long as it lasts the value is in memory: at each event the intervals that cover it take at most
the budget, and they cover the inputs of what is computed there. The sum of times of all runs is minimal.

The paper solves this by constraint programming over the intervals' first and last events. HiGHS takes binaries for
"an interval begins here" and numbers for "an interval covers this event", which come out whole by themselves.

The order of first runs, and one run of an operation between two first runs, are restrictions of the paper's: where
the budget is tight, another order may take less time (``tests/plan/test_value_graphs.py`` counts how often).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from jaxllm.plan.graphs.integer_program import IntegerProgram
from jaxllm.plan.graphs.value_graph import GraphError, ValueGraph

TRIES = 8
"""Most solutions of one graph: the solver keeps budgets up to a tolerance, and a sum beyond lowers the next budget."""


class Event(NamedTuple):
    """Event: ``operation`` may run before the first run of ``before``; it is its first run if both are equal."""

    before: int
    operation: int


class RetentionInterval(NamedTuple):
    """RetentionInterval interval of a value, from the run that computes it to the last one that needs it.

    Attributes:
        operation: whose value it is.
        first, last: places in the sequence of runs.
    """

    operation: int
    first: int
    last: int


@dataclass(frozen=True)
class RematSchedule:
    """Operations in the order in which they run, some several times.

    Attributes:
        sequence: indices of operations.
        time: time of all runs.
        again: time of those that are not the first of an operation.
        peak_bytes: live bytes at the fullest step, arguments included.
        intervals: retention intervals, in the order of their beginning.
        optimal: whether no schedule of the same events takes less time; False if the solver ran out of time.
    """

    sequence: tuple[int, ...]
    time: float
    again: float
    peak_bytes: int
    intervals: tuple[RetentionInterval, ...]
    optimal: bool


def rematerialise(
    graph: ValueGraph,
    budget: int,
    *,
    at: Collection[int] | None = None,
    intervals: int | None = None,
    seconds: float | None = None,
) -> RematSchedule:
    """Schedule of least time among those that take at most ``budget`` bytes.

    Args:
        graph: the graph.
        budget: bytes, arguments included.
        at: operations before whose first run others may run again; default all.
        intervals: most retention intervals of a value; None: any number.
        seconds: after which the best schedule so far is taken.

    Raises:
        GraphError: no schedule keeps the budget, or ``intervals`` is less than one.
        TimeoutError: no schedule was found in time.
    """
    if intervals is not None and intervals < 1:
        raise GraphError(f"intervals = {intervals}; give at least 1, the first run's.")
    limit = budget
    for _ in range(TRIES):
        found = _solve(graph, limit, at, intervals, seconds)
        if found is None:
            break
        sequence, optimal = found
        peak = graph.peak_bytes(sequence)
        if peak <= budget:
            total = sum(graph.operations[i].time for i in sequence)
            once = sum(one.time for one in graph.operations)
            again = _again(graph, sequence)
            assert abs(total - once - again) <= 1e-9 * max(total, 1e-300)
            return RematSchedule(sequence, total, again, peak, _intervals(graph, sequence), optimal)
        limit -= peak - budget
    most = max(range(len(graph.operations)), key=graph.working_bytes, default=0)
    needs = graph.working_bytes(most) if graph.operations else 0
    raise GraphError(
        f"no schedule keeps {budget:,} bytes: without recomputation the graph takes {graph.peak_bytes():,}, and "
        f"{graph.operations[most].name if graph.operations else 'nothing'} alone {needs:,} with its inputs; give more "
        "memory, or more places for recomputation."
    )


def _again(graph: ValueGraph, sequence: tuple[int, ...]) -> float:
    seen: set[int] = set()
    total = 0.0
    for place in sequence:
        total += graph.operations[place].time if place in seen else 0.0
        seen.add(place)
    return total


def _events(graph: ValueGraph, at: Collection[int] | None) -> list[Event]:
    runs = [i for i, one in enumerate(graph.operations) if not one.given]
    events: list[Event] = []
    for k in runs:
        if at is None or k in at:
            events += [Event(k, j) for j in runs if j < k]
        events.append(Event(k, k))
    return events


def _solve(
    graph: ValueGraph, budget: int, at: Collection[int] | None, most: int | None, seconds: float | None
) -> tuple[tuple[int, ...], bool] | None:
    """The sequence of runs and whether it is known to be optimal; None if nothing fits."""
    program, operations = IntegerProgram(), graph.operations
    room = budget - graph.given_bytes
    if room < 0:
        return None
    unit = max([1, *(one.bytes + one.scratch for one in operations)])
    starts: dict[int, dict[int, int]] = {}  # operation -> event -> variable
    events = _events(graph, at)
    covered: dict[int, int] = {}  # operation -> variable at the event before
    for t, (k, j) in enumerate(events):
        start = program.variable(operations[j].time)
        starts.setdefault(j, {})[t] = start
        if j == k:
            program.row({start: 1.0}, 1.0)
        before, covered = covered, {}
        for v in {*before, j}:
            covered[v] = now = program.variable(whole=False)
            # An interval goes on from the event before, or begins here.
            row = {now: 1.0} | ({before[v]: -1.0} if v in before else {}) | ({start: -1.0} if v == j else {})
            program.row(row, high=0.0)
        program.row({covered[j]: 1.0, start: -1.0}, 0.0)
        for i in set(operations[j].inputs):
            if not operations[i].given:
                program.row({covered[i]: 1.0, start: -1.0}, 0.0)
        memory = {x: operations[v].bytes / unit for v, x in covered.items() if operations[v].bytes}
        if operations[j].scratch:
            memory[start] = operations[j].scratch / unit
        program.row(memory, high=room / unit)
    for i in graph.outputs:
        if not operations[i].given:
            program.row({covered[i]: 1.0}, 1.0)
    if most is not None:
        for of in starts.values():
            program.row(dict.fromkeys(of.values(), 1.0), high=float(most))
    found = program.minimise(seconds)
    if found is None:
        return None
    x, optimal = found
    return tuple(j for t, (_, j) in enumerate(events) if x[starts[j][t]] > 0.5), optimal


def _intervals(graph: ValueGraph, sequence: tuple[int, ...]) -> tuple[RetentionInterval, ...]:
    """RetentionInterval intervals of a sequence of runs."""
    open_: dict[int, RetentionInterval] = {}
    done: list[RetentionInterval] = []
    for step, place in enumerate(sequence):
        for i in graph.operations[place].inputs:
            if i in open_:
                open_[i] = open_[i]._replace(last=step)
        if place in open_:
            done.append(open_[place])
        open_[place] = RetentionInterval(place, step, step)
    for i in graph.outputs:
        if i in open_:
            open_[i] = open_[i]._replace(last=len(sequence))
    return tuple(sorted([*done, *open_.values()], key=lambda one: (one.first, one.operation)))
