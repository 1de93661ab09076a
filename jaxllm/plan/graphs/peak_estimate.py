"""Peak memory of a step without a compiler: live ranges of its jaxpr, packed greedily (arXiv:2001.03288, section 5).

Compilers compute elementwise operations within the loop of the operation that reads them, write over operands that are
not needed any more, put results into the memory of donated arguments, and leave out what no result needs. The
estimate does the same by five rules, and takes the operations in the order in which they were traced:

- An elementwise value that only elementwise operations and reductions read has no memory; what it is computed from
  lives until it is read. Exponentials, quotients and the like have some if there are several readers, unless they are
  far larger than what they are computed from.
- An elementwise operation writes over an operand of as many bytes that nothing reads later.
- A result as large as a donated argument lies in its memory.
- A scan's carry lies in the memory of what it began with if nothing else reads that, and a body writes over its carry.
- What nothing reads on the way to a result has no memory, a loop's stacked values among it.

It is not a bound: compilers reorder, fuse more, and pad. ``docs/train/recomputation.md`` says how far it is off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxllm.compiler import arena
from jaxllm.plan.graphs.jaxpr_graph import ELEMENTWISE, REDUCTIONS, TracedGraph, bytes_of, graph_of

MUCH = 4
"""A value of more than so many times the bytes it is computed from is computed by each of its readers."""
EXPENSIVE = {
    *(
        "div",
        "exp",
        "exp2",
        "log",
        "log1p",
        "expm1",
        "tanh",
        "logistic",
        "erf",
        "erf_inv",
        "sin",
        "cos",
        "sqrt",
        "rsqrt",
    ),
    *("pow", "cbrt", "rem"),
}
"""Elementwise primitives that are not computed twice for two readers."""
_IN_PLACE = ELEMENTWISE | {"dynamic_update_slice", "scatter", "scatter-add", "scatter_add", "scatter-update"}


class StepEstimate(NamedTuple):
    """Estimated bytes of a program on one device.

    Attributes:
        arguments: of the arguments.
        temporaries: of all else, in one packed block: results beyond the donated arguments, and temporaries.
        live: the same without the gaps of the packing.
    """

    arguments: int
    temporaries: int
    live: int

    @property
    def total(self) -> int:
        """Arguments and temporaries."""
        return self.arguments + self.temporaries


def estimate(jaxpr: Any, donated: Sequence[bool] = ()) -> StepEstimate:
    """Estimated bytes of a closed jaxpr.

    Args:
        jaxpr: of ``jax.make_jaxpr`` or ``traced.jaxpr``.
        donated: whether each argument is donated; default none.
    """
    body = getattr(jaxpr, "jaxpr", jaxpr)
    sizes = [bytes_of(var.aval) for var in body.invars]
    free = Counter(size for size, given in zip(sizes, donated, strict=False) if given)
    ranges = live_ranges(graph_of(body, scratch_bytes), free, {})
    live = int(arena.live_bytes(ranges).max(initial=0))
    return StepEstimate(sum(sizes), arena.pack(ranges).bytes, live)


def scratch_bytes(traced: TracedGraph, consts: int, carries: int) -> int:
    """Live bytes of a loop's body at its fullest operation, with its slices of arrays, without its other arguments."""
    begun = {i: consts + n for n, i in enumerate(traced.results[:carries]) if i is not None}
    ranges = live_ranges(traced, Counter(), begun)
    operations = traced.graph.operations
    for j in range(consts + carries, traced.arguments):
        reads = [i for i, one in enumerate(operations) if j in one.inputs]
        if reads:
            ranges.append(arena.LiveRange(operations[j].bytes, reads[0], reads[-1]))
    return int(arena.live_bytes(ranges).max(initial=0))


def live_ranges(traced: TracedGraph, free: Counter[int], begun: Mapping[int, int]) -> list[arena.LiveRange]:
    """Live ranges of the memory that a program's operations take, one step for each.

    Args:
        traced: the program.
        free: sizes of donated arguments, in which results of the same size lie.
        begun: of the operations that are the carries of a loop whose body this is, the arguments that they replace.
    """
    operations, primitives = traced.graph.operations, traced.primitives
    count = len(operations)
    outputs = set(traced.graph.outputs)
    needed = traced.needed()
    readers: list[list[int]] = [[] for _ in operations]
    for i in needed:
        for j in operations[i].inputs:
            readers[j].append(i)
    fused = [False] * count
    sources: list[tuple[int, ...]] = [()] * count  # values in memory that an operation reads, through fused ones
    for i in needed:
        one = operations[i]
        sources[i] = tuple({k for j in one.inputs for k in (sources[j] if fused[j] else (j,))})
        if primitives[i] not in ELEMENTWISE or i in outputs:
            continue
        small = one.bytes > MUCH * sum(operations[j].bytes for j in sources[i])
        within = all(primitives[k] in ELEMENTWISE or primitives[k] in REDUCTIONS for k in readers[i])
        fused[i] = within and (small or len(readers[i]) == 1 or primitives[i] not in EXPENSIVE)
    last = list(range(count))
    for i in needed:
        if not fused[i]:
            for j in sources[i]:
                last[j] = max(last[j], i)
    for i in outputs:
        last[i] = count
    buffers: list[list[int]] = []  # bytes, first, last
    buffer_of: dict[int, list[int]] = {}
    for i in needed:
        one = operations[i]
        if one.scratch:
            buffers.append([one.scratch, i, i])
        if one.given or fused[i] or not one.bytes:
            continue
        if i in outputs and free[one.bytes] > 0:
            free[one.bytes] -= 1
            continue
        if i in begun and (last[begun[i]] < i or (last[begun[i]] == i and primitives[i] in _IN_PLACE)):
            continue
        run = one.inputs[0] if primitives[i] == "result" else i
        before = [traced.carried[i]] if i in traced.carried else sources[i] if primitives[i] in _IN_PLACE else ()
        over = next((j for j in before if j in buffer_of and last[j] == run and operations[j].bytes == one.bytes), None)
        if over is not None:
            buffer_of[i] = buffer_of.pop(over)
            buffer_of[i][2] = last[i]
        else:
            # The results of a loop are filled while it runs.
            buffer_of[i] = [one.bytes, run, last[i]]
            buffers.append(buffer_of[i])
    return [arena.LiveRange(*one) for one in buffers]
