"""Value graphs: recomputation and placement are those of brute force; parts of a graph are legal."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from jaxllm.plan.graphs.kept_values import keep, recompute
from jaxllm.plan.graphs.retention_intervals import rematerialise
from jaxllm.plan.graphs.tensor_placement import Move, check, compulsory_bytes, cut, place
from jaxllm.plan.graphs.value_graph import GraphError, Operation, ValueGraph


def random_graph(rng: np.random.Generator, operations: int, arguments: int = 0) -> ValueGraph:
    """Random operations with small integer sizes and times; of most graphs, like those of a backward pass, the second
    half of the operations read what the first half computes, in reverse.
    """
    out = [Operation(f"argument{i}", (), int(rng.integers(0, 5)), given=True) for i in range(arguments)]
    backward = rng.random() < 0.7
    for n in range(operations):
        reads = {int(i) for i in rng.integers(0, len(out), int(rng.integers(0, 3)))} if out else set()
        if backward:
            reads = {arguments + operations - 1 - n} if 2 * n >= operations else set()
        if out and (backward or rng.random() < 0.7):
            reads.add(len(out) - 1)
        scratch = int(rng.integers(0, 3)) if rng.random() < 0.3 else 0
        out.append(
            Operation(f"v{n}", tuple(sorted(reads)), int(rng.integers(0, 8)), float(rng.integers(0, 8)), scratch)
        )
    outputs = {len(out) - 1} | {int(i) for i in rng.integers(0, len(out), 1) if not backward and rng.random() < 0.3}
    return ValueGraph(tuple(out), tuple(sorted(outputs)))


def drawn_budget(rng: np.random.Generator, graph: ValueGraph) -> int:
    """Bytes that each operation fits into; less than those of the graph's order where these differ."""
    least = max(graph.working_bytes(i) for i in range(len(graph.operations)))
    return int(rng.integers(least, max(least + 1, graph.peak_bytes())))


def subsets(values: frozenset[int]) -> list[frozenset[int]]:
    return [frozenset(one) for n in range(len(values) + 1) for one in itertools.combinations(sorted(values), n)]


def least_time(graph: ValueGraph, budget: int, most: int | None = None) -> float:
    """Least time over all ways to run some operations again before first runs, and to drop values after each run.

    Goes through the events one by one with the set of every state that can be reached: the values in memory, and with
    ``most`` how often each was computed.
    """
    ops = graph.operations
    arguments = frozenset(i for i, one in enumerate(ops) if one.given)
    runs = [i for i, one in enumerate(ops) if not one.given]
    states: dict[tuple[frozenset[int], tuple[int, ...]], float] = {(arguments, (0,) * len(ops)): 0.0}
    for k in runs:
        for j in (i for i in runs if i <= k):
            after: dict[tuple[frozenset[int], tuple[int, ...]], float] = {} if j == k else dict(states)
            for (there, counts), time in states.items():
                if not there.issuperset(ops[j].inputs) or (most is not None and counts[j] >= most):
                    continue
                now = there | {j}
                if sum(ops[i].bytes for i in now) + ops[j].scratch > budget:
                    continue
                counted = counts if most is None else (*counts[:j], counts[j] + 1, *counts[j + 1 :])
                for kept in subsets(now - arguments):
                    key = (kept | arguments, counted)
                    after[key] = min(after.get(key, math.inf), time + ops[j].time)
            # Before the next run anything may be dropped; memory at the run itself counts all that is not.
            states = after
            for (there, counts), time in list(states.items()):
                for kept in subsets(there - arguments):
                    key = (kept | arguments, counts)
                    states[key] = min(states.get(key, math.inf), time)
    ends = frozenset(graph.outputs)
    return min((time for (there, _), time in states.items() if there >= ends), default=math.inf)


def least_time_in_any_order(graph: ValueGraph, budget: int) -> float:
    """Least time over all sequences of runs, by Dijkstra's algorithm over what has run and what is in memory."""
    ops = graph.operations
    arguments = frozenset(i for i, one in enumerate(ops) if one.given)
    everything = frozenset(i for i, one in enumerate(ops) if not one.given)
    start = (frozenset[int](), arguments)
    best, heap, order = {start: 0.0}, [(0.0, 0, start)], itertools.count(1)
    while heap:
        time, _, (ran, there) = heapq.heappop(heap)
        if time > best[ran, there]:
            continue
        if ran == everything and there.issuperset(graph.outputs):
            return time
        ways = [(0.0, (ran, there - {i})) for i in there - arguments]
        for j in everything - there:
            taken = sum(ops[i].bytes for i in there | {j}) + ops[j].scratch
            if there.issuperset(ops[j].inputs) and taken <= budget:
                ways.append((ops[j].time, (ran | {j}, there | {j})))
        for cost, state in ways:
            if time + cost < best.get(state, math.inf):
                best[state] = time + cost
                heapq.heappush(heap, (time + cost, next(order), state))
    return math.inf


def recomputation_is_brute_force(seed: int) -> dict[str, float]:
    """A random graph and budget: the time of brute force; counts what is recomputed, what does not fit, and where
    another order of first runs would take less time.
    """
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, int(rng.integers(4, 9)), int(rng.random() < 0.2))
    budget = drawn_budget(rng, graph)
    most = None if rng.random() < 0.7 else int(rng.integers(1, 3))
    time = least_time(graph, budget, most)
    free = least_time_in_any_order(graph, budget)
    once = sum(one.time for one in graph.operations)
    assert free <= time
    if math.isinf(time):
        with pytest.raises(GraphError, match="no schedule keeps"):
            rematerialise(graph, budget, intervals=most)
        return {"recomputed": 0.0, "infeasible": 1.0, "better in another order": float(most is None and free < time)}
    found = rematerialise(graph, budget, intervals=most)
    assert found.optimal
    assert found.time == time, (graph, budget, most)
    assert found.peak_bytes == graph.peak_bytes(found.sequence) <= budget
    for step in range(len(found.sequence)):
        live = sum(graph.operations[one.operation].bytes for one in found.intervals if one.first <= step <= one.last)
        running = graph.operations[found.sequence[step]]
        assert live + running.scratch + graph.given_bytes <= budget
    return {
        "recomputed": float(time > once),
        "infeasible": 0.0,
        "better in another order": float(most is None and free < time),
    }


def kept_is_brute_force(seed: int) -> dict[str, float]:
    """A random block and room for what it keeps: the time of all sets of values, and of retention intervals in a graph
    with a gap, in which nothing but the room is left, and a backward pass that reads all that it needs.
    """
    rng = np.random.default_rng(seed)
    drawn = random_graph(rng, int(rng.integers(3, 8)), int(rng.integers(0, 3)))
    graph = ValueGraph(tuple(one if one.given else replace(one, bytes=one.bytes + 1) for one in drawn.operations))
    count = len(graph.operations)
    computed = [i for i, one in enumerate(graph.operations) if not one.given]
    needed = frozenset(int(i) for i in rng.choice(computed, int(rng.integers(1, len(computed) + 1)), replace=False))
    total = sum(graph.operations[i].bytes for i in computed)
    room = int(rng.integers(0, total + 1))
    found = keep(graph, needed, room)
    ways = [recompute(graph, needed, way) for n in range(len(computed) + 1) for way in combinations(computed, n)]
    best = min((one.time, one.bytes) for one in ways if one.bytes <= room)
    assert (found.time, found.bytes) == best, (graph, needed, room)
    most = 2 * total + graph.given_bytes + sum(one.scratch for one in graph.operations)  # more than any step takes
    gap = Operation("gap", (), 0, 0.0, most - room - graph.given_bytes)
    backward = Operation("backward", tuple(sorted(needed)), 0)
    whole = ValueGraph((*graph.operations, gap, backward), (count + 1,))
    schedule = rematerialise(whole, most, at=[count + 1])
    assert schedule.again == found.time, (graph, needed, room)
    return {"recomputed": float(found.time > 0)}


def fewest_moved(graph: ValueGraph, capacity: int) -> float:
    """Fewest moved bytes over all sequences of runs, writes, fetches and drops, by Dijkstra's algorithm."""
    ops = graph.operations
    everything = frozenset(i for i, one in enumerate(ops) if not one.given)
    start = (frozenset[int](), frozenset[int](), frozenset(i for i, one in enumerate(ops) if one.given))
    best, heap, order = {start: 0}, [(0, 0, start)], itertools.count(1)
    while heap:
        moved, _, (ran, device, host) = heapq.heappop(heap)
        if moved > best[ran, device, host]:
            continue
        if ran == everything and host.issuperset(graph.outputs):
            return float(moved)
        taken = sum(ops[i].bytes for i in device)
        ways = [(0, (ran, device - {i}, host)) for i in device]
        ways += [(ops[i].bytes, (ran, device, host | {i})) for i in device - host]
        ways += [(ops[i].bytes, (ran, device | {i}, host)) for i in host - device if taken + ops[i].bytes <= capacity]
        ways += [
            (0, (ran | {j}, device | {j}, host))
            for j in everything - ran
            if device.issuperset(ops[j].inputs) and taken + ops[j].bytes + ops[j].scratch <= capacity
        ]
        for cost, state in ways:
            if moved + cost < best.get(state, math.inf):
                best[state] = moved + cost
                heapq.heappush(heap, (moved + cost, next(order), state))
    return math.inf


def drawn_placement(seed: int) -> tuple[ValueGraph, int]:
    """A random graph and a device that holds each of its operations, but rarely all values."""
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, int(rng.integers(4, 8)), int(rng.integers(0, 2)))
    return graph, drawn_budget(rng, graph)


def placement_is_brute_force(seed: int) -> dict[str, float]:
    """A random graph and device: as few bytes moved as in brute force; counts graphs that move more than compulsory."""
    graph, capacity = drawn_placement(seed)
    found = place(graph, capacity)
    assert found.optimal
    assert check(graph, capacity, found.moves) <= capacity
    assert found.moved_bytes == fewest_moved(graph, capacity), (graph, capacity)
    return {"beyond compulsory": float(found.moved_bytes > compulsory_bytes(graph))}


def parts_are_legal(seed: int) -> dict[str, float]:
    """A larger random graph with the smallest device that holds each of its operations: parts have a legal placement,
    and move no less than all operations together where that is solved; the moved bytes of both are counted.
    """
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, int(rng.integers(8, 12)), int(rng.integers(0, 3)))
    capacity = drawn_budget(rng, graph)
    size = int(rng.integers(2, 6))
    parts = cut(graph, size)
    assert sorted(itertools.chain(*parts)) == [i for i, one in enumerate(graph.operations) if not one.given]
    assert all(len(one) <= size for one in parts)
    found = place(graph, capacity, part=size)
    assert check(graph, capacity, found.moves) <= capacity
    whole = place(graph, capacity)
    assert whole.optimal
    assert compulsory_bytes(graph) <= whole.moved_bytes <= found.moved_bytes
    return {"moved in parts": float(found.moved_bytes), "moved at least": float(whole.moved_bytes)}


def chain(sizes: list[int], *, backward: bool) -> ValueGraph:
    """Operations of time 1, each reading the one before; the second half reads the first half in reverse."""
    count = len(sizes)
    reads = [[n - 1] if n else [] for n in range(count)]
    for n in range((count + 1) // 2, count) if backward else ():
        reads[n].append(count - 1 - n)
    return ValueGraph(
        tuple(Operation(f"v{n}", tuple(reads[n]), size, 1.0) for n, size in enumerate(sizes)), (count - 1,)
    )


def test_a_backward_pass_in_less_memory_computes_two_values_again():
    """Eight values of one byte: 5 are live at the turn. In 4 bytes one that is dropped is computed from another."""
    graph = chain([1] * 8, backward=True)
    assert graph.peak_bytes() == 5
    assert rematerialise(graph, 5).sequence == tuple(range(8))
    found = rematerialise(graph, 4)
    assert (found.peak_bytes, found.again, found.optimal) == (4, least_time(graph, 4) - 8, True)
    assert found.again > 0
    assert len(found.intervals) == len(found.sequence) == 8 + found.again
    with pytest.raises(GraphError, match="no schedule keeps 2 bytes: without recomputation the graph takes 5, and v"):
        rematerialise(graph, 2)
    with pytest.raises(GraphError, match="intervals = 0"):
        rematerialise(graph, 4, intervals=0)
    assert rematerialise(graph, 5, at=()).again == 0
    with pytest.raises(GraphError, match="no schedule keeps 4 bytes"):
        rematerialise(graph, 4, at=())


def test_what_does_not_fit_waits_on_the_host():
    graph = chain([1] * 8, backward=True)
    assert place(graph, 5).moved_bytes == compulsory_bytes(graph) == 1  # the output
    assert place(graph, 4).moved_bytes == 3  # a value goes out and comes back
    with pytest.raises(GraphError, match="v5 takes 3 bytes with its inputs, the device has 2"):
        place(graph, 2)
    with pytest.raises(GraphError, match="part = 0"):
        place(graph, 4, part=0)


def test_graphs_that_are_none_are_refused():
    with pytest.raises(GraphError, match=r"operation 0 \(a\) reads \(0,\)"):
        ValueGraph((Operation("a", (0,), 1),))
    with pytest.raises(GraphError, match="negative"):
        ValueGraph((Operation("a", (), -1),))
    with pytest.raises(GraphError, match=r"argument 0 \(a\)"):
        ValueGraph((Operation("a", (), 1, 1.0, given=True),))
    with pytest.raises(GraphError, match="outputs"):
        ValueGraph((Operation("a", (), 1),), (1,))
    graph = chain([1, 1], backward=False)
    with pytest.raises(GraphError, match="which is not there"):
        graph.peak_bytes([1])
    with pytest.raises(GraphError, match="never computes the output v1"):
        graph.peak_bytes([0])


def test_moves_that_are_not_possible_are_found():
    graph = chain([1, 1], backward=False)
    moves = place(graph, 2).moves
    assert check(graph, 2, moves) == 2
    for wrong in (moves[1:], moves[:-2], [Move("fetch", 1), *moves], [*moves, Move("run", 1)]):
        with pytest.raises(GraphError, match=r"is not possible there|is not on the host"):
            check(graph, 2, wrong)
    with pytest.raises(GraphError, match="the device has 1"):
        check(graph, 1, moves)
