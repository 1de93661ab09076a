"""Value graph: operations in order, each with one value that later operations read, their bytes and times.

``jaxllm.plan.graphs.jaxpr_graph`` reads one from a jaxpr. The solvers take it as it is: recomputation by retention
intervals (``retention_intervals``), and order with placement over two tiers (``tensor_placement``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxllm.compiler import arena


class GraphError(ValueError):
    """A graph that is not one, or a memory budget that no schedule of it keeps."""


@dataclass(frozen=True)
class Operation:
    """Operation and the value that it computes.

    Attributes:
        name: name for people.
        inputs: indices of the operations whose values it reads, all of them before it.
        bytes: bytes of its value.
        time: cost of computing it once, in seconds, FLOPs or any other unit.
        scratch: bytes that are taken while it runs only.
        given: an argument: nothing computes it, and its time is 0.
    """

    name: str
    inputs: tuple[int, ...]
    bytes: int
    time: float = 0.0
    scratch: int = 0
    given: bool = False


@dataclass(frozen=True)
class ValueGraph:
    """Operations in an order in which they can run, and the values that must be there at the end.

    Raises:
        GraphError: an operation reads a value that no earlier one computes, a size is negative, or an argument has
            inputs, time or scratch bytes.
    """

    operations: tuple[Operation, ...]
    outputs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for place, one in enumerate(self.operations):
            if any(not 0 <= i < place for i in one.inputs):
                raise GraphError(f"operation {place} ({one.name}) reads {one.inputs}; legal: 0 to {place - 1}.")
            if one.bytes < 0 or one.scratch < 0 or not one.time >= 0:
                raise GraphError(f"operation {place} ({one.name}) has negative bytes or time; give none below zero.")
            if one.given and (one.inputs or one.time or one.scratch):
                raise GraphError(f"argument {place} ({one.name}) has inputs, time or scratch bytes; leave them out.")
        if any(not 0 <= i < len(self.operations) for i in self.outputs):
            raise GraphError(f"outputs = {self.outputs}; legal: 0 to {len(self.operations) - 1}.")

    @property
    def given_bytes(self) -> int:
        """Bytes of the arguments."""
        return sum(one.bytes for one in self.operations if one.given)

    @cached_property
    def last_uses(self) -> tuple[int, ...]:
        """Last operation that reads each value; its own index if none does, the number of operations for outputs."""
        last = list(range(len(self.operations)))
        for place, one in enumerate(self.operations):
            for i in one.inputs:
                last[i] = place
        for i in self.outputs:
            last[i] = len(self.operations)
        return tuple(last)

    def working_bytes(self, place: int) -> int:
        """Bytes that an operation needs at once: its inputs, its value and its scratch bytes."""
        one = self.operations[place]
        return one.bytes + one.scratch + sum(self.operations[i].bytes for i in set(one.inputs))

    def live_ranges(self, sequence: Sequence[int]) -> list[arena.LiveRange]:
        """Live ranges of the values when operations run in a sequence, in which some may run several times.

        Each run of an operation has a range: from there to the last read before the operation runs again. Scratch
        bytes have ranges of one step. Arguments are live in every step. Step ``len(sequence)`` is the end.

        Raises:
            GraphError: an operation of the sequence reads a value that is not there, or one for an output is missing.
        """
        end = len(sequence)
        born = {i: 0 for i, one in enumerate(self.operations) if one.given}
        last = dict.fromkeys(born, end)
        ranges: list[arena.LiveRange] = []

        def close(i: int) -> None:
            ranges.append(arena.LiveRange(self.operations[i].bytes, born[i], last[i]))

        for step, place in enumerate(sequence):
            one = self.operations[place]
            for i in one.inputs:
                if i not in born:
                    raise GraphError(f"step {step} ({one.name}) reads {self.operations[i].name}, which is not there.")
                last[i] = max(last[i], step)
            if place in born:
                close(place)
            born[place] = last[place] = step
            if one.scratch:
                ranges.append(arena.LiveRange(one.scratch, step, step))
        for i in self.outputs:
            if i not in born:
                raise GraphError(f"the sequence never computes the output {self.operations[i].name}.")
            last[i] = end
        for i in born:
            close(i)
        return ranges

    def peak_bytes(self, sequence: Sequence[int] | None = None) -> int:
        """Live bytes at the fullest step of a sequence, by default of every operation once, in order."""
        if sequence is None:
            sequence = [i for i, one in enumerate(self.operations) if not one.given]
        return int(arena.live_bytes(self.live_ranges(sequence)).max(initial=0))
