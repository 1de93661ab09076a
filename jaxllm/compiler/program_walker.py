"""Reads a compiled program as what it is: a schedule of kernels, of collectives that start and end, and of loops.

    program = read(compiled.as_text(), Placement.of(mesh))
    program.flops, program.bytes, program.cycles          of one run on each device, loops multiplied out
    program.exchanges                                     collectives with the mesh axes or network that they go over
    program.unknown                                       kernels whose cost nobody says, by name: never a silent zero

FLOPs are those of products (``jaxllm.compiler.matmul_flops``), bytes those of the device's memory (``traffic``), cycles the
TPU compiler's own estimates. ``jaxllm.compiler.timeline`` turns a schedule into seconds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxllm.compiler import collectives, hbm_traffic, hlo, replica_groups
from jaxllm.compiler import matmul_flops as flops
from jaxllm.compiler.collectives import Collective
from jaxllm.compiler.replica_groups import Placement

_LABEL = re.compile(r'op_name="([^"]*)"')
_CHAIN_END = 'custom_call_target="AsyncCollectiveDone"'
_CHAIN = re.compile(r'chain_id="(\d+)"')
_HOST = "S(5)"
_FETCHES = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")


class Cost(NamedTuple):
    """What one run of a kernel takes."""

    flops: int
    bytes: int


@dataclass(frozen=True)
class Op:
    """A kernel.

    Attributes:
        name: of its instruction.
        opcode: such as ``fusion``.
        label: where it comes from, jax's ``op_name``.
        flops: of products.
        bytes: that it reads from and writes to the device's memory.
        cycles: the TPU compiler's estimate; None where it gives none.
        known: False for a custom call that does not say what it does: its FLOPs, and if it works in place its bytes,
            are missing.
    """

    name: str
    opcode: str
    label: str
    flops: int
    bytes: int
    cycles: int | None
    known: bool = True


@dataclass(frozen=True)
class Exchange:
    """A collective.

    Attributes:
        kind: from ``collectives.KINDS``.
        group_size: devices that take part.
        bytes: the whole that it moves, see ``collectives.Collective``.
        summed: see there.
        axes: of the mesh, along which its devices differ; empty where no ``Placement`` was given.
        islands: slices or nodes that one group spans; more than one means the slow network.
        asynchronous: other kernels may run meanwhile.
        label: jax's ``op_name``.
    """

    kind: str
    group_size: int
    bytes: int
    summed: bool
    axes: tuple[str, ...]
    islands: int
    asynchronous: bool
    label: str

    @property
    def where(self) -> str:
        """What it goes over, for tables: the mesh axes, and the network between slices or nodes if it takes that."""
        return "+".join((*self.axes, *(("network",) if self.islands > 1 else ()))) or "devices"


@dataclass(frozen=True)
class Fetch:
    """A copy by the memory system itself, while kernels run: ahead of its use, or between device and host.

    Attributes:
        bytes: moved in the device's memory, or to and from the host.
        host: whether it goes to or from the host.
    """

    bytes: int
    host: bool


@dataclass(frozen=True)
class Start:
    """Where collectives or a copy start; ``Done`` of that name is where the schedule waits for them."""

    name: str
    what: tuple[Exchange | Fetch, ...]


@dataclass(frozen=True)
class Done:
    """Where the schedule waits for what was started under that name."""

    name: str


@dataclass(frozen=True)
class Loop:
    """Steps that run several times."""

    name: str
    turns: int
    steps: tuple[Step, ...]


Step = Op | Start | Done | Loop


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
        steps: in the order of the schedule; of a conditional's branches, the most expensive.
        num_devices: that run it together.
        unknown_loops: loops whose number of turns cannot be read; they count as ``read``'s ``turns``.
    """

    steps: tuple[Step, ...]
    num_devices: int
    unknown_loops: int

    @property
    def ops(self) -> list[tuple[Op, int]]:
        """Every kernel and how often it runs."""
        return [(step, times) for step, times in _flat(self.steps) if isinstance(step, Op)]

    @property
    def exchanges(self) -> list[tuple[Exchange, int]]:
        """Every collective and how often it runs."""
        starts = [(step.what, times) for step, times in _flat(self.steps) if isinstance(step, Start)]
        return [(one, times) for what, times in starts for one in what if isinstance(one, Exchange)]

    @property
    def fetches(self) -> list[tuple[Fetch, int]]:
        """Every copy by the memory system and how often it runs."""
        starts = [(step.what, times) for step, times in _flat(self.steps) if isinstance(step, Start)]
        return [(one, times) for what, times in starts for one in what if isinstance(one, Fetch)]

    @property
    def flops(self) -> int:
        """Of products, without those of ``unknown``."""
        return sum(op.flops * times for op, times in self.ops)

    @property
    def bytes(self) -> int:
        """Read and written in the device's memory, without those of ``unknown``."""
        fetched = sum(fetch.bytes * times for fetch, times in self.fetches if not fetch.host)
        return fetched + sum(op.bytes * times for op, times in self.ops)

    @property
    def cycles(self) -> int | None:
        """Estimates of the TPU compiler; None where it gives none."""
        said = [op.cycles * times for op, times in self.ops if op.cycles is not None]
        return sum(said) if said else None

    @property
    def unknown(self) -> dict[str, int]:
        """Kernels that do not say what they cost, by name, and how often they run."""
        found: Counter[str] = Counter()
        for op, times in self.ops:
            if not op.known:
                found[kernel_name(op.name)] += times
        return dict(found)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """By kind and size, largest total first, as ``collectives.read`` gives them."""
        counts: Counter[collectives.Key] = Counter()
        for one, times in self.exchanges:
            counts[one.kind, one.group_size, one.bytes, one.summed] += times
        rows = [Collective(*key[:3], count, key[3]) for key, count in counts.items()]
        return tuple(sorted(rows, key=lambda row: (-row.total_bytes, row)))


def kernel_name(instruction: str) -> str:
    """``flash_attention_forward.3`` -> ``flash_attention_forward``."""
    return re.sub(r"(\.\d+|\.clone|\.cloned|\.remat\d*)+$", "", instruction)


def _flat(steps: tuple[Step, ...], times: int = 1) -> Iterator[tuple[Step, int]]:
    for step in steps:
        if isinstance(step, Loop):
            yield from _flat(step.steps, times * step.turns)
        else:
            yield step, times


def read(
    text: str, placement: Placement | None = None, *, costs: Mapping[str, Cost] | None = None, turns: int = 1
) -> Program:
    """Reads a compiled program's text.

    Args:
        placement: names the mesh axes, and the slices or nodes, that collectives go over.
        costs: of kernels that do not say what they cost, by ``kernel_name``.
        turns: of a loop whose number of turns depends on data.

    Raises:
        HloError: it is no such text, or ``placement`` is of another number of devices.
    """
    module = hlo.parse(text)
    if placement is not None and len(placement.islands) != module.num_devices:
        raise hlo.HloError(f"a program of {module.num_devices} devices, placed on {len(placement.islands)}")
    reader = _Reader(module, placement, dict(costs or {}), turns)
    return Program(reader.run(hlo.Frame(module.entry)), module.num_devices, reader.unknown_loops)


class _Reader:
    def __init__(self, module: hlo.Module, placement: Placement | None, costs: dict[str, Cost], turns: int):
        self.module, self.placement, self.costs, self.turns = module, placement, costs, turns
        self.sent, self.moved = collectives.Reader(module).sent, hbm_traffic.Reader(module, 1).moved
        self.unknown_loops = 0

    def run(self, frame: hlo.Frame) -> tuple[Step, ...]:
        """One run of a computation."""
        steps: list[Step] = []
        running: dict[str, str] = {}  # value or chain that stands for something on its way -> name of its start
        for instruction in frame.computation.instructions.values():
            steps += self._steps(instruction, frame, running)
        return tuple(steps)

    def _steps(self, instruction: hlo.Instruction, frame: hlo.Frame, running: dict[str, str]) -> list[Step]:
        opcode, computation = instruction.opcode, frame.computation
        if opcode == "while":
            return [self._loop(instruction, frame)]
        if opcode == "conditional":
            before = self.unknown_loops
            runs = [self.run(hlo.Frame(branch)) for branch in self.module.branches(instruction)]
            weights = [_weight(run) for run in runs]
            self.unknown_loops = max(before, self.unknown_loops)
            return list(runs[weights.index(max(weights))])
        sent = self.sent(instruction, computation)
        if opcode in hlo.CALLS and not sent:
            return list(self.run(hlo.Frame(self.module.callee(instruction))))
        if opcode.endswith(("-done", "-update")):
            name = next((running[operand] for operand in instruction.operands if operand in running), "")
            if opcode.endswith("-update") and name:
                running[instruction.name] = name
                return []
            return [Done(name)] if name else []
        if opcode in _FETCHES:
            running[instruction.name] = instruction.name
            return [Start(instruction.name, (self._fetch(instruction, computation),))]
        steps: list[Step] = []
        if sent:
            steps.append(self._start(instruction, sent, running))
        free = opcode in hbm_traffic.FREE and collectives.cycles_of(instruction) is None
        if not free and not (sent and opcode != "fusion"):
            steps.append(self._op(instruction, computation))
        if sent and not self._continues(instruction):
            steps.append(Done(instruction.name))
        steps += [Done(name) for name in self._ends(instruction, running)]
        return steps

    def _loop(self, loop: hlo.Instruction, frame: hlo.Frame) -> Loop:
        turns = hlo.trip_count(self.module, loop, frame)
        self.unknown_loops += turns is None
        condition, body = hlo.loop_frames(self.module, loop, frame)
        return Loop(loop.name, self.turns if turns is None else turns, (*self.run(condition), *self.run(body)))

    def _start(self, instruction: hlo.Instruction, sent: list[tuple[collectives.Key, str]], running: dict) -> Start:
        asynchronous = self._continues(instruction)
        if asynchronous:
            running[instruction.name] = instruction.name
            running.update({f"chain {chain}": instruction.name for chain in self._chains(instruction)})
        label = _label(instruction)
        exchanges = [self._exchange(key, attributes, asynchronous, label) for key, attributes in sent]
        return Start(instruction.name, tuple(exchanges))

    def _exchange(self, key: collectives.Key, attributes: str, asynchronous: bool, label: str) -> Exchange:
        axes, islands = (), 1
        if self.placement is not None and key[0] != "send":
            axes, islands = self.placement.joins(replica_groups.groups(attributes, self.module.num_devices))
        label = found[1] if (found := _LABEL.search(attributes)) else label
        return Exchange(*key, axes=axes, islands=islands, asynchronous=asynchronous, label=label)

    def _continues(self, instruction: hlo.Instruction) -> bool:
        """Whether what an instruction starts goes on after it."""
        if instruction.opcode == "fusion":
            return bool(self._chains(instruction))
        return instruction.opcode.endswith("-start") and '"is_sync":true' not in instruction.attributes

    def _chains(self, fusion: hlo.Instruction) -> set[str]:
        """The TPU compiler's numbers of the collectives of which a fusion is a piece."""
        if fusion.opcode != "fusion":
            return set()
        inside = self.module.callee(fusion).instructions.values()
        own = {found[1] for one in inside if (found := _CHAIN.search(one.attributes))}
        return own.union(*(self._chains(one) for one in inside))

    def _ends(self, instruction: hlo.Instruction, running: dict[str, str]) -> list[str]:
        """Names of the starts of which a fusion is the last piece."""
        if instruction.opcode != "fusion":
            return []
        inside = self.module.callee(instruction).instructions.values()
        if not any(_CHAIN_END in one.attributes for one in inside):
            return []
        return [running[f"chain {chain}"] for chain in self._chains(instruction) if f"chain {chain}" in running]

    def _fetch(self, instruction: hlo.Instruction, computation: hlo.Computation) -> Fetch:
        shapes = [computation.instructions[name].shape for name in instruction.operands]
        host = _HOST in instruction.shape or any(_HOST in shape for shape in shapes)
        moved = self.moved(instruction, computation) or 0
        return Fetch(moved // 2 if host else moved, host)

    def _op(self, instruction: hlo.Instruction, computation: hlo.Computation) -> Op:
        products, moved = self._products(instruction, computation), self.moved(instruction, computation)
        op = Op(
            name=instruction.name,
            opcode=instruction.opcode,
            label=_label(instruction),
            flops=products or 0,
            bytes=moved or 0,
            cycles=collectives.cycles_of(instruction),
            known=products is not None and moved is not None,
        )
        if instruction.opcode != "custom-call":
            return op
        if (said := flops.cost_estimate(instruction)) is not None:
            return replace(op, flops=said["flops"], bytes=said["bytes_accessed"], known=True)
        if (cost := self.costs.get(kernel_name(instruction.name))) is not None:
            return replace(op, flops=cost.flops, bytes=cost.bytes, known=True)
        return op

    def _products(self, instruction: hlo.Instruction, computation: hlo.Computation) -> int | None:
        """FLOPs of an instruction and of all that a fusion holds."""
        if instruction.opcode != "fusion":
            return flops.products(instruction, computation)
        inside = self.module.callee(instruction)
        parts = [self._products(one, inside) for one in inside.instructions.values()]
        return None if None in parts else sum(part or 0 for part in parts)


def _label(instruction: hlo.Instruction) -> str:
    found = _LABEL.search(instruction.attributes)
    return found[1] if found else ""


def _weight(steps: tuple[Step, ...]) -> tuple[int, int, int]:
    """Orders the branches of a conditional as ``collectives.read`` does."""
    program = Program(steps, 1, 0)
    sent = sum(one.bytes * times for one, times in program.exchanges)
    return program.cycles or 0, sent, program.flops + program.bytes
