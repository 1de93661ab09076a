"""Schedule of a compiled program: kernels, collectives that start and end, copies, and loops.

    program = read(compiled.as_text(), Placement.of(mesh))
    program.flops, program.bytes, program.cycles          one run on each device, with loops multiplied out
    program.exchanges                                     collectives with the mesh axes or network that they use
    program.unknown                                       kernels that state no cost, by name: never a silent zero

FLOPs are those of matmuls (``jaxllm.compiler.matmul_flops``), bytes those of device memory
(``jaxllm.compiler.hbm_traffic``), cycles the TPU compiler's own estimates. ``jaxllm.compiler.timeline`` turns a
schedule into seconds.
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


class KernelCost(NamedTuple):
    """FLOPs and bytes of one run of a kernel."""

    flops: int
    bytes: int


@dataclass(frozen=True)
class KernelOp:
    """One kernel of the schedule.

    Attributes:
        name: name of its instruction.
        opcode: opcode, such as ``fusion``.
        label: jax's ``op_name``.
        flops: FLOPs of its matmuls.
        bytes: bytes that it reads from and writes to device memory.
        cycles: the TPU compiler's estimate; None where it gives none.
        known: False for a custom call that states no cost: its FLOPs, and its bytes if it works in place, are missing.
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
    """One collective of the schedule.

    Attributes:
        kind: one of ``collectives.KINDS``.
        group_size: number of devices that take part.
        bytes: bytes of the whole array that it moves, see ``collectives.Collective``.
        summed: see ``collectives.Collective``.
        axes: mesh axes along which its devices differ; empty without a ``Placement``.
        islands: number of slices or nodes that one group spans; more than one uses the slow network.
        asynchronous: True if other kernels may run meanwhile.
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
        """Mesh axes that it uses, plus "network" if it leaves a slice or node; for tables."""
        return "+".join((*self.axes, *(("network",) if self.islands > 1 else ()))) or "devices"


@dataclass(frozen=True)
class Fetch:
    """Asynchronous copy by the memory system: a prefetch, or a copy between device and host.

    Attributes:
        bytes: bytes moved in device memory, or to and from the host.
        host: whether it goes to or from the host.
    """

    bytes: int
    host: bool


@dataclass(frozen=True)
class Start:
    """Start of collectives or of a copy; the schedule waits for them at the ``Done`` of the same name."""

    name: str
    what: tuple[Exchange | Fetch, ...]


@dataclass(frozen=True)
class Done:
    """Point at which the schedule waits for the ``Start`` of the same name."""

    name: str


@dataclass(frozen=True)
class Loop:
    """Loop of the schedule: steps with their trip count."""

    name: str
    turns: int
    steps: tuple[Step, ...]


Step = KernelOp | Start | Done | Loop


@dataclass(frozen=True)
class Program:
    """Schedule of a compiled program.

    Attributes:
        steps: steps in order; of the branches of a conditional, the most expensive one.
        num_devices: number of devices that run it together.
        unknown_loops: number of loops whose trip count cannot be read; they count with ``read``'s ``turns``.
    """

    steps: tuple[Step, ...]
    num_devices: int
    unknown_loops: int

    @property
    def ops(self) -> list[tuple[KernelOp, int]]:
        """Kernels with the number of times that each runs."""
        return [(step, times) for step, times in _flat(self.steps) if isinstance(step, KernelOp)]

    @property
    def exchanges(self) -> list[tuple[Exchange, int]]:
        """Collectives with the number of times that each runs."""
        starts = [(step.what, times) for step, times in _flat(self.steps) if isinstance(step, Start)]
        return [(one, times) for what, times in starts for one in what if isinstance(one, Exchange)]

    @property
    def fetches(self) -> list[tuple[Fetch, int]]:
        """Asynchronous copies with the number of times that each runs."""
        starts = [(step.what, times) for step, times in _flat(self.steps) if isinstance(step, Start)]
        return [(one, times) for what, times in starts for one in what if isinstance(one, Fetch)]

    @property
    def flops(self) -> int:
        """FLOPs of matmuls, without those of ``unknown`` kernels."""
        return sum(op.flops * times for op, times in self.ops)

    @property
    def bytes(self) -> int:
        """Bytes read and written in device memory, without those of ``unknown`` kernels."""
        fetched = sum(fetch.bytes * times for fetch, times in self.fetches if not fetch.host)
        return fetched + sum(op.bytes * times for op, times in self.ops)

    @property
    def cycles(self) -> int | None:
        """Sum of the TPU compiler's estimates; None where it gives none."""
        said = [op.cycles * times for op, times in self.ops if op.cycles is not None]
        return sum(said) if said else None

    @property
    def unknown(self) -> dict[str, int]:
        """Kernels that state no cost: name -> number of runs."""
        found: Counter[str] = Counter()
        for op, times in self.ops:
            if not op.known:
                found[kernel_name(op.name)] += times
        return dict(found)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Collectives by kind and size, largest total first, like ``collectives.read``."""
        counts: Counter[collectives.Key] = Counter()
        for one, times in self.exchanges:
            counts[one.kind, one.group_size, one.bytes, one.summed] += times
        rows = [Collective(*key[:3], count, key[3]) for key, count in counts.items()]
        return tuple(sorted(rows, key=lambda row: (-row.total_bytes, row)))


def kernel_name(instruction: str) -> str:
    """Name of a kernel without its number: ``flash_attention_forward.3`` -> ``flash_attention_forward``."""
    return re.sub(r"(\.\d+|\.clone|\.cloned|\.remat\d*)+$", "", instruction)


def _flat(steps: tuple[Step, ...], times: int = 1) -> Iterator[tuple[Step, int]]:
    for step in steps:
        if isinstance(step, Loop):
            yield from _flat(step.steps, times * step.turns)
        else:
            yield step, times


def read(
    text: str, placement: Placement | None = None, *, costs: Mapping[str, KernelCost] | None = None, turns: int = 1
) -> Program:
    """Reads the schedule from the text of a compiled program.

    Args:
        placement: names of the mesh axes, and the slices or nodes, that collectives use.
        costs: costs of kernels that state none, by ``kernel_name``.
        turns: trip count of a loop whose trip count depends on data.

    Raises:
        HloError: the text is not a compiled program, or ``placement`` has another number of devices.
    """
    module = hlo.parse(text)
    if placement is not None and len(placement.islands) != module.num_devices:
        raise hlo.HloError(f"a program of {module.num_devices} devices, placed on {len(placement.islands)}")
    reader = _Reader(module, placement, dict(costs or {}), turns)
    return Program(reader.run(hlo.Frame(module.entry)), module.num_devices, reader.unknown_loops)


class _Reader:
    def __init__(self, module: hlo.Module, placement: Placement | None, costs: dict[str, KernelCost], turns: int):
        self.module, self.placement, self.costs, self.turns = module, placement, costs, turns
        self.sent, self.moved = collectives.CollectiveReader(module).sent, hbm_traffic.TrafficReader(module, 1).moved
        self.unknown_loops = 0

    def run(self, frame: hlo.Frame) -> tuple[Step, ...]:
        """Steps of one run of a computation."""
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
        """Whether an instruction starts something that is still running after it."""
        if instruction.opcode == "fusion":
            return bool(self._chains(instruction))
        return instruction.opcode.endswith("-start") and '"is_sync":true' not in instruction.attributes

    def _chains(self, fusion: hlo.Instruction) -> set[str]:
        """The TPU compiler's numbers of the collectives that a fusion is a piece of."""
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

    def _op(self, instruction: hlo.Instruction, computation: hlo.Computation) -> KernelOp:
        products, moved = self._products(instruction, computation), self.moved(instruction, computation)
        op = KernelOp(
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
        """FLOPs of an instruction, including everything that a fusion holds."""
        if instruction.opcode != "fusion":
            return flops.products(instruction, computation)
        inside = self.module.callee(instruction)
        parts = [self._products(one, inside) for one in inside.instructions.values()]
        return None if None in parts else sum(part or 0 for part in parts)


def _label(instruction: hlo.Instruction) -> str:
    found = _LABEL.search(instruction.attributes)
    return found[1] if found else ""


def _weight(steps: tuple[Step, ...]) -> tuple[int, int, int]:
    """Cost by which the branches of a conditional are ordered, as in ``collectives.read``."""
    program = Program(steps, 1, 0)
    sent = sum(one.bytes * times for one, times in program.exchanges)
    return program.cycles or 0, sent, program.flops + program.bytes
