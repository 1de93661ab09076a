"""Collectives of a compiled program, and the TPU compiler's own estimate of its cycles.

Loop bodies are multiplied by their trip counts. Forms are normalised, so that counts can be compared between compilers:

    printed as                                                          counted as
    all-gather-start / -done, async-start calling it (GPU)              all-gather
    AsyncCollectiveStart ... async_collective_fusion ... Done (TPU)     the one collective that these share
    fusion of all-reduce and dynamic-slice, all-reduce-scatter (TPU)    reduce-scatter
    all-reduce of whose result each device uses a slice (TPU)           reduce-scatter, summed
    all-reduce of zeros with a device's own slice put in (TPU)          all-gather, summed
    call-start of a computation that is one of these (TPU7x)            the same

The TPU compiler writes the last two for groups that span more than one dimension of the torus, and for small arrays.
A "summed" collective is carried out as an all-reduce: it sends twice the bytes of the collective that it stands for.

Remote copies inside Pallas kernels are not seen. Copies between host and device: ``jaxllm.compiler.host_transfers``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxllm.compiler import hlo
from jaxllm.compiler.replica_groups import group_size

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
    "send",
)
"""The kinds of collective, by XLA's names. ``send`` stands for a send and its receive."""

_PASSES = (
    "all-reduce-done",
    "call-done",
    "copy-start",
    "copy-done",
    "get-tuple-element",
    "bitcast",
    "copy",
    "convert",
    "reshape",
    "transpose",
)  # a slice before is a slice after
_CYCLES = re.compile(r'"estimated_cycles":"(\d{1,18})"')  # 19 digits: "no idea", said of work for the SparseCore
_CHAIN, _STARTS = 'chain_id="', 'custom_call_target="AsyncCollectiveStart"'


@dataclass(frozen=True, order=True)
class Collective:
    """Collectives of one kind and size in one run of a program.

    Attributes:
        kind: one of ``KINDS``.
        group_size: number of devices that take part in one.
        bytes: bytes of one on one device, as the whole array that it moves: an all-gather's result, a reduce-scatter's
            operand. Several arrays in one instruction are one collective.
        count: number of times that a device takes part, with loops multiplied out.
        summed: True if it is carried out as an all-reduce, which sends twice as much.
    """

    kind: str
    group_size: int
    bytes: int
    count: int
    summed: bool = False

    @property
    def total_bytes(self) -> int:
        """Bytes of all of them together."""
        return self.bytes * self.count


@dataclass(frozen=True)
class ProgramWork:
    """Communication and estimated computation of one run of a program on each device.

    Attributes:
        collectives: collectives, largest total first.
        cycles: sum of the TPU compiler's estimates over all instructions: an upper bound of the time to compute,
            without
            waiting for collectives. None where the compiler gives no estimates.
        unknown_loops: number of loops whose trip count cannot be read; each is counted as one iteration.
    """

    collectives: tuple[Collective, ...]
    cycles: int | None
    unknown_loops: int


def read(text: str) -> ProgramWork:
    """Reads collectives and cycles from the text of a compiled program.

    Of the branches of a conditional, the most expensive one counts.

    Raises:
        HloError: the text is not a compiled program.
    """
    module = hlo.parse(text)
    sums = CollectiveReader(module).run(hlo.Frame(module.entry))
    collectives = [Collective(*key[:3], count, key[3]) for key, count in sums.collectives.items()]
    collectives.sort(key=lambda collective: (-collective.total_bytes, collective))
    return ProgramWork(tuple(collectives), sums.cycles if _CYCLES.search(text) else None, sums.unknown_loops)


Key = tuple[str, int, int, bool]
"""Kind, group size, bytes and summed of a ``Collective``."""


def cycles_of(instruction: hlo.Instruction) -> int | None:
    """The TPU compiler's estimate of the cycles of an instruction; None where it gives none."""
    found = _CYCLES.search(instruction.attributes)
    return int(found[1]) if found else None


@dataclass
class _Sums:
    """Running totals of ``ProgramWork``; ``collectives`` by (kind, group size, bytes, summed)."""

    collectives: Counter[Key] = field(default_factory=Counter)
    cycles: int = 0
    unknown_loops: int = 0

    def add(self, other: _Sums, times: int = 1) -> None:
        for key, count in other.collectives.items():
            self.collectives[key] += count * times
        self.cycles += other.cycles * times
        self.unknown_loops += other.unknown_loops

    @property
    def weight(self) -> tuple[int, int]:
        """Cost by which the branches of a conditional are ordered."""
        return self.cycles, sum(size * count for (_, _, size, _), count in self.collectives.items())


class CollectiveReader:
    """Finds the collectives of single instructions and sums them over a program."""

    def __init__(self, module: hlo.Module) -> None:
        self.module = module

    def run(self, frame: hlo.Frame) -> _Sums:
        """Totals of one run of a computation."""
        sums = _Sums()
        for instruction in frame.computation.instructions.values():
            sums.cycles += cycles_of(instruction) or 0
            sent = self.sent(instruction, frame.computation)
            sums.collectives.update(key for key, _ in sent)
            if instruction.opcode == "while":
                turns = hlo.trip_count(self.module, instruction, frame)
                sums.unknown_loops += turns is None
                for part in hlo.loop_frames(self.module, instruction, frame):
                    sums.add(self.run(part), 1 if turns is None else turns)
            elif instruction.opcode == "conditional":
                branches = [self.run(hlo.Frame(branch)) for branch in self.module.branches(instruction)]
                sums.add(max(branches, key=lambda branch: branch.weight))
            elif instruction.opcode in hlo.CALLS and not sent:
                sums.add(self.run(hlo.Frame(self.module.callee(instruction))))
        return sums

    def sent(self, instruction: hlo.Instruction, computation: hlo.Computation) -> list[tuple[Key, str]]:
        """Collectives that one instruction starts, including those inside a fusion, each with its attributes."""
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in KINDS:
            kind, summed = opcode, False
            if opcode == "all-reduce":
                kind, summed = self._stands_for(instruction.operands, instruction.name, computation)
            return self._collective(kind, instruction, computation, summed)
        if opcode == "fusion":
            return self._fused(instruction)
        if instruction.opcode in hlo.CALLS:
            inside = self.module.callee(instruction)
            if inside.root.opcode == "all-reduce":  # all of a computation that the SparseCore runs (TPU7x)
                begun = self._given(instruction, computation)
                given = begun.operands[begun is not instruction :][: len(inside.root.operands)]  # tokens follow them
                kind, summed = self._stands_for(given, begun.name, computation)
                return self._collective(kind, inside.root, inside, summed)
        return []

    def _given(self, call: hlo.Instruction, computation: hlo.Computation) -> hlo.Instruction:
        """Instruction that gives a call its operands: itself, or the call-update behind it (jax 0.12 on a TPU7x)."""
        if call.operands or call.opcode != "call-start":
            return call
        updates = (one for one in computation.instructions.values() if one.opcode == "call-update")
        return next((one for one in updates if one.operands[0] == call.name), call)

    def _fused(self, fusion: hlo.Instruction) -> list[tuple[Key, str]]:
        """Collectives inside a fusion (TPU); a collective in pieces, which loops may hold, counts where it starts."""
        inside = self.module.callee(fusion)
        starts = any(_STARTS in instruction.attributes for instruction in inside.instructions.values())
        found = []
        for instruction in inside.instructions.values():
            if instruction.opcode == "fusion":
                found += self._fused(instruction)
            if instruction.opcode not in KINDS:
                continue
            if _CHAIN in instruction.attributes and not starts:
                continue
            kind = instruction.opcode
            if kind == "all-reduce" and self._only_sliced(instruction.name, inside):
                kind = "reduce-scatter"
            found += self._collective(kind, instruction, inside)
        return found

    def _stands_for(self, given: Sequence[str], name: str, computation: hlo.Computation) -> tuple[str, bool]:
        """(kind, summed) of an all-reduce outside fusions, from the names of its operands and of its result."""
        if all(self._is_padded(array, computation) for array in given):
            return "all-gather", True
        return ("reduce-scatter", True) if self._only_sliced(name, computation) else ("all-reduce", False)

    def _is_padded(self, name: str, computation: hlo.Computation) -> bool:
        """Whether an array has one value everywhere but in one slice."""
        array = computation.instructions[name]
        if array.opcode in _PASSES:
            return self._is_padded(array.operands[0], computation)
        if array.opcode == "fusion":
            inside = self.module.callee(array)
            root = inside.root
            if root.opcode != "dynamic-update-slice":
                return False
            around = inside.instructions[root.operands[0]]
            if around.opcode != "parameter":
                return around.opcode == "broadcast"
            return self._is_filled(array.operands[int(around.inside)], computation)
        return array.opcode == "dynamic-update-slice" and self._is_filled(array.operands[0], computation)

    def _is_filled(self, name: str, computation: hlo.Computation) -> bool:
        """Whether an array has one value everywhere."""
        array = computation.instructions[name]
        if array.opcode in _PASSES:
            return self._is_filled(array.operands[0], computation)
        return array.opcode == "broadcast"

    def _only_sliced(self, name: str, computation: hlo.Computation) -> bool:
        """Whether only slices of a value are used, here and in fusions."""
        users = [user for user in computation.instructions.values() if name in user.operands]
        return (
            bool(users)
            and computation.root.name != name
            and all(self._slices(user, name, computation) for user in users)
        )

    def _slices(self, user: hlo.Instruction, name: str, computation: hlo.Computation) -> bool:
        if user.opcode == "dynamic-slice":
            return user.operands[0] == name
        if user.opcode in _PASSES:
            return self._only_sliced(user.name, computation)
        if user.opcode != "fusion":
            return False
        inside = self.module.callee(user)
        places = [place for place, operand in enumerate(user.operands) if operand == name]
        parameters = [
            p.name for p in inside.instructions.values() if p.opcode == "parameter" and int(p.inside) in places
        ]
        return all(self._only_sliced(parameter, inside) for parameter in parameters)

    def _collective(
        self, kind: str, instruction: hlo.Instruction, computation: hlo.Computation, summed: bool = False
    ) -> list[tuple[Key, str]]:
        operands = [computation.instructions[name].shape for name in instruction.operands]
        if kind == "ragged-all-to-all" or "slice_sizes=" in instruction.attributes:
            operands = operands[:1]  # the others are offsets, or the buffer to write into
        size = sum(hlo.shape_bytes(shape) for shape in operands)
        group = group_size(instruction.attributes, self.module.num_devices) if kind != "send" else 2
        if group == 1:
            return []
        whole = size * group if kind == "all-gather" and not summed else size
        return [((kind, group, whole, summed), instruction.attributes)]
