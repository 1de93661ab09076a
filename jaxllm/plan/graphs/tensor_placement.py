"""Order of operations and placement of values over two tiers with the fewest moved bytes (COSMA, arXiv:2311.18246).

The device holds few bytes, the host all. Arguments begin on the host, and outputs end there. An operation runs with its
inputs and its value on the device. In between, values wait on the device, or are written to the host once and fetched
back whenever they are read; a value that is on the host leaves the device for nothing. The integer program chooses in
which step each operation runs and what is on the device in each step. The moved bytes, each way, are minimal.

For large graphs the operations are divided into parts, each ordered and placed by itself with what the part before it
left where it is. A cut lies where the fewest bytes cross it. Any graph that fits at all has such a solution: in the
worst case a part begins by writing everything out. How far it is from the least is measured
(``make proof plan ONLY=placements_in_parts_are_legal``). The paper chooses addresses on the device as well; here
``jaxllm.compiler.arena`` packs the live ranges afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxllm.plan.graphs.integer_program import IntegerProgram
from jaxllm.plan.graphs.value_graph import GraphError, ValueGraph

Kind = Literal["run", "write", "fetch", "drop"]
PART = 8
"""Most operations of a part by default."""


class Move(NamedTuple):
    """Something that is done with a value: computed, written to the host, fetched from it, or dropped on the device."""

    kind: Kind
    operation: int


@dataclass(frozen=True)
class GraphPlacement:
    """Order of operations, and moves of values between the tiers.

    Attributes:
        moves: in order.
        moved_bytes: bytes of all writes and fetches.
        optimal: whether no order and placement move less.
    """

    moves: tuple[Move, ...]
    moved_bytes: int
    optimal: bool

    @property
    def order(self) -> tuple[int, ...]:
        """Operations in the order in which they run."""
        return tuple(one.operation for one in self.moves if one.kind == "run")


def compulsory_bytes(graph: ValueGraph) -> int:
    """Bytes that every placement moves: arguments that are read, once, and computed outputs, once."""
    read = {i for one in graph.operations for i in one.inputs if graph.operations[i].given}
    written = {i for i in graph.outputs if not graph.operations[i].given}
    return sum(graph.operations[i].bytes for i in read | written)


def place(graph: ValueGraph, capacity: int, *, part: int | None = None, seconds: float | None = None) -> GraphPlacement:
    """Order and placement with the fewest moved bytes.

    Args:
        graph: the graph.
        capacity: bytes of the device.
        part: most operations that are ordered and placed together; None: all of them, which gives the least.
        seconds: for each part, after which the best placement so far is taken.

    Raises:
        GraphError: an operation does not fit with its inputs, or ``part`` is less than one.
        TimeoutError: no placement was found in time.
    """
    for i, one in enumerate(graph.operations):
        if not one.given and graph.working_bytes(i) > capacity:
            raise GraphError(
                f"{one.name} takes {graph.working_bytes(i):,} bytes with its inputs, the device has {capacity:,}."
            )
    if part is not None and part < 1:
        raise GraphError(f"part = {part}; give at least 1 operation.")
    runs = [i for i, one in enumerate(graph.operations) if not one.given]
    parts = [runs] if part is None else cut(graph, part)
    device: set[int] = set()
    host = {i for i, one in enumerate(graph.operations) if one.given}
    moves: list[Move] = []
    optimal = len(parts) <= 1
    for n, own in enumerate(parts):
        later = {i for other in parts[n + 1 :] for j in other for i in graph.operations[j].inputs}
        found, known = _place_part(graph, own, capacity, device, host, later, n == len(parts) - 1, seconds)
        moves += found
        optimal &= known
    moved = sum(graph.operations[one.operation].bytes for one in moves if one.kind in ("write", "fetch"))
    check(graph, capacity, moves)
    return GraphPlacement(tuple(moves), moved, optimal)


def cut(graph: ValueGraph, most: int) -> list[list[int]]:
    """The operations in parts of at most ``most`` and, but for the last, at least half of it, in the graph's order.

    Each cut lies where the fewest bytes of values cross it; the later one of equal ones.
    """
    runs = [i for i, one in enumerate(graph.operations) if not one.given]
    parts: list[list[int]] = []
    first = 0
    while len(runs) - first > most:
        ends = range(first + max(1, most // 2), first + most + 1)
        crossing = {end: _crossing(graph, runs[end - 1]) for end in ends}
        end = min(ends, key=lambda end: (crossing[end], -end))
        parts.append(runs[first:end])
        first = end
    return [*parts, runs[first:]] if runs[first:] else parts


def _crossing(graph: ValueGraph, last: int) -> int:
    """Bytes of computed values that operations behind ``last`` read."""
    values = zip(graph.operations, graph.last_uses, strict=True)
    return sum(one.bytes for i, (one, use) in enumerate(values) if i <= last < use and not one.given)


def _place_part(
    graph: ValueGraph,
    own: Sequence[int],
    capacity: int,
    device: set[int],
    host: set[int],
    later: Collection[int],
    ends: bool,
    seconds: float | None,
) -> tuple[list[Move], bool]:
    """Moves of a part with the fewest bytes; changes ``device`` and ``host`` to what is there after it.

    Args:
        own: the part's operations.
        device, host: values that are there before it.
        later: values that parts behind it read.
        ends: whether it is the last part.
    """
    operations, program = graph.operations, IntegerProgram()
    steps, needed = range(len(own)), {*later, *graph.outputs}
    values = sorted({i for j in own for i in operations[j].inputs} | set(own) | (device & needed))
    unit = max([1, *(operations[i].bytes + operations[i].scratch for i in values)])
    size = {v: operations[v].bytes / unit for v in values}
    runs = {v: [program.variable() for _ in steps] for v in own}
    on = {v: [program.variable() for _ in steps] for v in values}  # on the device during the step
    fetches = {v: [program.variable(size[v], whole=False) for _ in steps] for v in values}  # before the step
    writes = {v: program.variable(size[v], whole=False) for v in values if v not in host}
    for v in own:
        program.row(dict.fromkeys(runs[v], 1.0), 1.0, 1.0)
    for t in steps:
        program.row({runs[v][t]: 1.0 for v in own}, 1.0, 1.0)
        memory = {on[v][t]: size[v] for v in values}
        memory |= {runs[v][t]: operations[v].scratch / unit for v in own if operations[v].scratch}
        program.row(memory, high=capacity / unit)
        for v in values:
            row = {on[v][t]: 1.0, fetches[v][t]: -1.0}
            row |= {runs[v][t]: -1.0} if v in runs else {}
            row |= {on[v][t - 1]: -1.0} if t else {}
            program.row(row, high=float(not t and v in device))
            if v in writes:  # what is fetched was written, when it left the device
                program.row({fetches[v][t]: 1.0, writes[v]: -1.0}, high=0.0)
            if v in runs:
                program.row({fetches[v][t]: 1.0} | dict.fromkeys(runs[v][:t], -1.0), high=0.0)
        for j in own:
            for i in {*operations[j].inputs, j}:
                program.row({on[i][t]: 1.0, runs[j][t]: -1.0}, 0.0)
    for v, written in writes.items():
        if v in graph.outputs and ends:
            program.row({written: 1.0}, 1.0)
        elif v in needed:
            program.row({on[v][-1]: 1.0, written: 1.0}, 1.0)
    found = program.minimise(seconds)
    assert found is not None, "every operation fits, so that a part which first writes everything out has a solution"
    x, optimal = found
    moves: list[Move] = []

    def leave(kept: Collection[int], wanted: Collection[int]) -> None:
        """Drops what is on the device and not kept; writes it out before if it is wanted and not on the host."""
        for v in sorted(device - set(kept)):
            if v in wanted and v not in host:
                moves.append(Move("write", v))
                host.add(v)
            moves.append(Move("drop", v))
            device.remove(v)

    for t in steps:
        run = next(v for v in own if x[runs[v][t]] > 0.5)
        there = {v for v in values if x[on[v][t]] > 0.5 and v != run}
        leave(there, needed | {v for v in values if any(x[one] > 0.5 for one in fetches[v][t:])})
        moves += [Move("fetch", v) for v in sorted(there - device)]
        moves.append(Move("run", run))
        device |= there | {run}
    leave(set() if ends else needed, graph.outputs if ends else ())
    return moves, optimal


def check(graph: ValueGraph, capacity: int, moves: Sequence[Move]) -> int:
    """Plays moves back, and returns the live bytes of the device at the fullest one.

    Raises:
        GraphError: a move is not possible, the device is too small, or an output is not on the host at the end.
    """
    operations = graph.operations
    device: set[int] = set()
    host = {i for i, one in enumerate(operations) if one.given}
    ran: set[int] = set()
    most = 0
    for step, (kind, i) in enumerate(moves):
        one = operations[i]
        legal = {
            "run": not one.given and i not in ran and device.issuperset(one.inputs),
            "write": i in device,
            "fetch": i in host and i not in device,
            "drop": i in device,
        }[kind]
        if not legal:
            raise GraphError(f"move {step}: {kind} {one.name} is not possible there.")
        if kind == "drop":
            device.remove(i)
        elif kind == "write":
            host.add(i)
        else:
            device.add(i)
            ran |= {i} if kind == "run" else set()
        taken = sum(operations[v].bytes for v in device) + one.scratch * (kind == "run")
        if taken > capacity:
            raise GraphError(f"move {step}: {kind} {one.name} takes {taken:,} bytes, the device has {capacity:,}.")
        most = max(most, taken)
    missing = [operations[i].name for i in graph.outputs if i not in host]
    missing += [one.name for i, one in enumerate(operations) if not one.given and i not in ran]
    if missing:
        raise GraphError(f"at the end {', '.join(missing)} did not run, or is not on the host.")
    return most
