"""What a compiled program sends between its devices, and the TPU compiler's own estimate of its work.

Loops are multiplied out. Forms are normalised, so that a plan's table of collectives can be compared between compilers:

    printed as                                                          counted as
    all-gather-start / -done, async-start calling it (GPU)              all-gather
    AsyncCollectiveStart ... async_collective_fusion ... Done (TPU)     the one collective that these share
    fusion of all-reduce and dynamic-slice, all-reduce-scatter (TPU)    reduce-scatter
    all-reduce of whose result each device uses a slice (TPU)           reduce-scatter, summed
    all-reduce of zeros with a device's own slice put in (TPU)          all-gather, summed
    call-start of a computation that is one of these (TPU7x)            the same

The TPU compiler writes the last two for groups that span more than one dimension of the torus, and for small arrays.
"Summed" ones send what an all-reduce sends: twice the bytes of the collective that they stand for.

Not seen: remote copies inside Pallas kernels, and copies between host and device.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxllm.compiler import hlo

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
_MESH_GROUPS = re.compile(r"replica_groups=\{?mesh\[(.*?)\](?:, device_ids=\(.*?\)\)|, device_ids=\(.*?\))? ?\{(.*?)\}")


@dataclass(frozen=True, order=True)
class Collective:
    """Collectives of one kind and size in one run of a program.

    Attributes:
        kind: from ``KINDS``.
        group_size: devices that take part in one.
        bytes: of one, on one device: the whole that it moves, be it split before (all-gather) or after
            (reduce-scatter). Several arrays sent together are one collective.
        count: how often a device takes part, loops multiplied out.
        summed: it is carried out as an all-reduce, which sends twice as much.
    """

    kind: str
    group_size: int
    bytes: int
    count: int
    summed: bool = False

    @property
    def total_bytes(self) -> int:
        """Bytes of all of them."""
        return self.bytes * self.count


@dataclass(frozen=True)
class Work:
    """What one run of a program does, on each device.

    Attributes:
        collectives: largest total first.
        cycles: the sum of the TPU compiler's estimates over all instructions: an upper bound of the time to compute,
            without waiting for collectives. None where the compiler gives no estimates.
        unknown_loops: loops whose number of turns cannot be read; they are counted as one turn.
    """

    collectives: tuple[Collective, ...]
    cycles: int | None
    unknown_loops: int


def read(text: str) -> Work:
    """Reads a compiled program's text.

    Of the branches of a conditional, the most expensive counts.

    Raises:
        HloError: it is no such text.
    """
    module = hlo.parse(text)
    sums = _Walker(module).run(hlo.Frame(module.entry))
    collectives = [Collective(*key[:3], count, key[3]) for key, count in sums.collectives.items()]
    collectives.sort(key=lambda collective: (-collective.total_bytes, collective))
    return Work(tuple(collectives), sums.cycles if _CYCLES.search(text) else None, sums.unknown_loops)


_Key = tuple[str, int, int, bool]


@dataclass
class _Sums:
    """``Work`` in the making; ``collectives`` by (kind, group size, bytes, summed)."""

    collectives: Counter[_Key] = field(default_factory=Counter)
    cycles: int = 0
    unknown_loops: int = 0

    def add(self, other: _Sums, times: int = 1) -> None:
        for key, count in other.collectives.items():
            self.collectives[key] += count * times
        self.cycles += other.cycles * times
        self.unknown_loops += other.unknown_loops

    @property
    def weight(self) -> tuple[int, int]:
        """Orders the branches of a conditional."""
        return self.cycles, sum(size * count for (_, _, size, _), count in self.collectives.items())


class _Walker:
    def __init__(self, module: hlo.Module) -> None:
        self.module = module

    def run(self, frame: hlo.Frame) -> _Sums:
        """One run of a computation."""
        sums = _Sums()
        for instruction in frame.computation.instructions.values():
            if cycles := _CYCLES.search(instruction.attributes):
                sums.cycles += int(cycles[1])
            opcode = instruction.opcode.removesuffix("-start")
            if opcode in KINDS:
                kind, summed = opcode, False
                if opcode == "all-reduce":
                    kind, summed = self._stands_for(instruction.operands, instruction.name, frame.computation)
                sums.collectives.update(self._collective(kind, instruction, frame.computation, summed))
            elif opcode == "while":
                turns = hlo.trip_count(self.module, instruction, frame)
                sums.unknown_loops += turns is None
                for part in hlo.loop_frames(self.module, instruction, frame):
                    sums.add(self.run(part), 1 if turns is None else turns)
            elif opcode == "conditional":
                branches = [self.run(hlo.Frame(branch)) for branch in self._branches(instruction)]
                sums.add(max(branches, key=lambda branch: branch.weight))
            elif opcode == "fusion":
                sums.collectives.update(self._fused(instruction))
            elif opcode in ("call", "async"):
                inside = self._callee(instruction)
                if inside.root.opcode == "all-reduce":  # all of a computation that the SparseCore runs (TPU7x)
                    given = instruction.operands[: len(inside.root.operands)]  # what follows them are tokens
                    kind, summed = self._stands_for(given, instruction.name, frame.computation)
                    sums.collectives.update(self._collective(kind, inside.root, inside, summed))
                else:
                    sums.add(self.run(hlo.Frame(inside)))
        return sums

    def _fused(self, fusion: hlo.Instruction) -> Counter[_Key]:
        """The collectives inside a fusion (TPU); of one in pieces, which loops may hold, the piece that starts it."""
        inside = self._callee(fusion)
        starts = any(_STARTS in instruction.attributes for instruction in inside.instructions.values())
        found: Counter[_Key] = Counter()
        for instruction in inside.instructions.values():
            if instruction.opcode == "fusion":
                found.update(self._fused(instruction))
            if instruction.opcode not in KINDS:
                continue
            if _CHAIN in instruction.attributes and not starts:
                continue
            kind = instruction.opcode
            if kind == "all-reduce" and self._only_sliced(instruction.name, inside):
                kind = "reduce-scatter"
            found.update(self._collective(kind, instruction, inside))
        return found

    def _stands_for(self, given: Sequence[str], name: str, computation: hlo.Computation) -> tuple[str, bool]:
        """(kind, summed) of an all-reduce outside fusions, from the names of what it is given and of its result."""
        if all(self._is_padded(array, computation) for array in given):
            return "all-gather", True
        return ("reduce-scatter", True) if self._only_sliced(name, computation) else ("all-reduce", False)

    def _is_padded(self, name: str, computation: hlo.Computation) -> bool:
        """Whether an array is one value everywhere but in a slice."""
        array = computation.instructions[name]
        if array.opcode in _PASSES:
            return self._is_padded(array.operands[0], computation)
        if array.opcode == "fusion":
            inside = self._callee(array)
            root = inside.root
            if root.opcode != "dynamic-update-slice":
                return False
            around = inside.instructions[root.operands[0]]
            if around.opcode != "parameter":
                return around.opcode == "broadcast"
            return self._is_filled(array.operands[int(around.inside)], computation)
        return array.opcode == "dynamic-update-slice" and self._is_filled(array.operands[0], computation)

    def _is_filled(self, name: str, computation: hlo.Computation) -> bool:
        """Whether an array is one value everywhere."""
        array = computation.instructions[name]
        if array.opcode in _PASSES:
            return self._is_filled(array.operands[0], computation)
        return array.opcode == "broadcast"

    def _only_sliced(self, name: str, computation: hlo.Computation) -> bool:
        """Whether of a value only slices are used, here and in fusions."""
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
        inside = self._callee(user)
        places = [place for place, operand in enumerate(user.operands) if operand == name]
        parameters = [
            p.name for p in inside.instructions.values() if p.opcode == "parameter" and int(p.inside) in places
        ]
        return all(self._only_sliced(parameter, inside) for parameter in parameters)

    def _collective(
        self, kind: str, instruction: hlo.Instruction, computation: hlo.Computation, summed: bool = False
    ) -> Counter[_Key]:
        operands = [computation.instructions[name].shape for name in instruction.operands]
        if kind == "ragged-all-to-all" or "slice_sizes=" in instruction.attributes:
            operands = operands[:1]  # the others are offsets, or the buffer to write into
        size = sum(hlo.shape_bytes(shape) for shape in operands)
        group = group_size(instruction.attributes, self.module.num_devices) if kind != "send" else 2
        if group == 1:
            return Counter()
        whole = size * group if kind == "all-gather" and not summed else size
        return Counter({(kind, group, whole, summed): 1})

    def _callee(self, instruction: hlo.Instruction) -> hlo.Computation:
        name = instruction.callee("calls", "to_apply")
        if name not in self.module.computations:
            raise hlo.HloError(f"%{instruction.name} calls a computation that is not in the text: {name}")
        return self.module.computations[name]

    def _branches(self, instruction: hlo.Instruction) -> list[hlo.Computation]:
        listed = re.search(r"branch_computations=\{(.*?)\}", instruction.attributes)
        names = re.findall(r"[\w.\-]+", listed[1]) if listed else []
        names = names or re.findall(r"\b(?:true|false)_computation=%?([\w.\-]+)", instruction.attributes)
        return [self.module.computations[name] for name in names]


def group_size(attributes: str, num_devices: int) -> int:
    """How many devices a collective joins, from its attributes; the largest group where they differ.

    For a collective-permute: those among which an array can travel, such as a ring.

    Raises:
        HloError: the attributes name no groups in a known way.
    """
    if pairs := re.search(r"source_target_pairs=\{(.*?\})\}", attributes):
        return _largest_island([(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs[1])])
    if mesh := _MESH_GROUPS.search(attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        used = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", mesh[2])  # 'axis':(before)size is a part of an axis
        return math.prod(int(part) if part else sizes[name] for name, part in used)
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=", attributes):
        return int(iota[1].split(",")[-1])
    if listed := re.search(r"replica_groups=\{(\{.*?\})\}", attributes):
        return max(group.count(",") + 1 for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    if "replica_groups={}" in attributes:
        return num_devices
    raise hlo.HloError(f"cannot read the groups of a collective: {attributes[:200]}")


def _largest_island(pairs: list[tuple[int, int]]) -> int:
    """Size of the largest set of devices joined by pairs of source and target."""
    island: dict[int, set[int]] = {}
    for source, target in pairs:
        joined = island.get(source, {source}) | island.get(target, {target})
        for device in joined:
            island[device] = joined
    return max(map(len, island.values()), default=1)
