"""Values of a block that are kept for its backward pass, the best of all: retention intervals with one gap.

Between a block's forward pass and its backward pass all other layers run. A value is retained over that gap, or
computed again behind it from what is retained, or not needed. Of the schedules of ``retention_intervals`` with
recomputation at one place, behind the gap, this integer program finds the best with one binary for "is retained" and
one for "runs again" an operation, so that the hundreds of operations of a traced block take a second. Both solvers
agree on random graphs (``make proof plan ONLY=kept_values_are_retention_intervals``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from jaxllm.plan.graphs.integer_program import IntegerProgram
from jaxllm.plan.graphs.value_graph import GraphError, ValueGraph


class KeptValues(NamedTuple):
    """Retained values, and what the others cost.

    Attributes:
        kept: operations whose values are retained.
        again: operations that run again.
        bytes: bytes of ``kept``.
        time: time of ``again``.
    """

    kept: tuple[int, ...]
    again: tuple[int, ...]
    bytes: int
    time: float


def keep(
    graph: ValueGraph,
    needed: Collection[int],
    room: int,
    *,
    together: Sequence[Collection[int]] | None = None,
    seconds: float | None = None,
) -> KeptValues:
    """Values to retain in ``room`` bytes so that those behind the gap take the least time; of equal times the fewest
    bytes.

    Args:
        graph: operations before the gap. Arguments are always there.
        needed: values that are read behind it.
        room: bytes for retained values.
        together: sets of values, each retained as a whole or not at all; values in none of them are not retained.
            None: any value may be retained.
        seconds: after which the best choice so far is taken.

    Raises:
        GraphError: ``room`` is negative.
        TimeoutError: no choice was found in time.
    """
    if room < 0:
        raise GraphError(f"room = {room:,} bytes; give none below zero.")
    operations, reach = graph.operations, _ancestors(graph, needed)
    program = IntegerProgram()
    unit = max([1, *(operations[i].bytes for i in reach)])
    total = sum(operations[i].bytes for i in reach) or 1
    # Bytes decide between equal times: all of them together cost less than the shortest operation.
    least = min((operations[i].time for i in reach if operations[i].time), default=1.0)
    # What has no bytes is a run with several results, which are kept in its place.
    sets = [{i} for i in reach] if together is None else [set(one) & set(reach) for one in together]
    kept: dict[int, int] = {}
    for one in sets:
        if size := sum(operations[i].bytes for i in one):
            kept |= dict.fromkeys((i for i in one if operations[i].bytes), program.variable(least / 8 * size / total))
    again = {i: program.variable(operations[i].time) for i in reach}

    def there(i: int) -> dict[int, float]:
        return {again[i]: 1.0} | ({kept[i]: 1.0} if i in kept else {})

    sizes: dict[int, float] = {}
    for i, x in kept.items():
        sizes[x] = sizes.get(x, 0.0) + operations[i].bytes / unit
    program.row(sizes, high=room / unit)
    for i in reach:
        if i in needed:
            program.row(there(i), 1.0)
        for j in operations[i].inputs:
            if not operations[j].given:
                program.row({again[i]: -1.0} | there(j), 0.0)
    found = program.minimise(seconds)
    assert found is not None, "everything can be computed again"
    x, _ = found
    held = tuple(i for i, one in kept.items() if x[one] > 0.5)
    return recompute(graph, needed, held)


def recompute(graph: ValueGraph, needed: Collection[int], kept: Collection[int]) -> KeptValues:
    """Operations that run again behind the gap if these values are retained, and their time."""
    again: set[int] = set()
    stack = [i for i in needed if i not in kept]
    while stack:
        i = stack.pop()
        if i not in again and not graph.operations[i].given:
            again.add(i)
            stack += [j for j in graph.operations[i].inputs if j not in kept]
    return KeptValues(
        tuple(sorted(kept)),
        tuple(sorted(again)),
        sum(graph.operations[i].bytes for i in kept),
        sum(graph.operations[i].time for i in again),
    )


def _ancestors(graph: ValueGraph, needed: Collection[int]) -> list[int]:
    """Operations that the needed values come from, themselves included, in order."""
    found: set[int] = set()
    stack = list(needed)
    while stack:
        i = stack.pop()
        if i not in found and not graph.operations[i].given:
            found.add(i)
            stack += graph.operations[i].inputs
    return sorted(found)
