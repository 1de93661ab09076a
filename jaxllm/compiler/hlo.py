"""Reads the text of compiled programs (``jax.stages.Compiled.as_text()``): computations, instructions, loops.

The text is XLA's optimised HLO, one instruction a line: ``%name = shape opcode(operands), attributes``. Only what the
compilers for TPU, GPU and CPU really print is read; see https://openxla.org/xla/operation_semantics.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r" ?([\w\-]+)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,<=]*)\](?:\{[^{}]*?E\((\d+)\)[^{}]*\})?")
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_MOVES = ("copy", "bitcast", "convert", "reshape")  # their value is their operand's

CALLS = ("call", "call-start", "async-start")
"""Instructions that run another computation."""

NO_WORK = {
    *("AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast", "GatherScatterIndicesBitpacked"),
    *("AsyncCollectiveStart", "AsyncCollectiveDone", "PrepareAsyncCallStart", "PrepareAsyncCallDone"),
}
"""Custom calls that only tell the TPU compiler something."""


class HloError(ValueError):
    """The text is not a compiled program as this module knows them."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
        name: without the percent sign.
        opcode: such as ``all-gather-start``.
        shape: of the result, as printed.
        inside: the text between the parentheses: operands, or a constant's value.
        attributes: the text after them.
    """

    name: str
    opcode: str
    shape: str
    inside: str
    attributes: str

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return _NAME.findall(self.inside)

    def callee(self, *attributes: str) -> str | None:
        """Name of the computation in the first of these attributes that there is."""
        for attribute in attributes:
            if found := re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes):
                return found[1]
        return None

    @property
    def target(self) -> str:
        """What a custom call calls; "" of others."""
        found = re.search(r'\bcustom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def index(self) -> int:
        """Which element a ``get-tuple-element`` takes."""
        found = re.search(r"\bindex=(\d+)", self.attributes)
        if found is None:
            raise HloError(f"%{self.name} has no index")
        return int(found[1])


@dataclass(frozen=True, slots=True)
class Computation:
    """A function of the program: its instructions by name, in the order of the schedule."""

    name: str
    instructions: dict[str, Instruction]
    root: Instruction


@dataclass(frozen=True, slots=True)
class Module:
    """A compiled program.

    Attributes:
        computations: by name.
        entry: where it starts.
        num_devices: that run it together.
    """

    computations: dict[str, Computation]
    entry: Computation
    num_devices: int

    def callee(self, instruction: Instruction) -> Computation:
        """The computation that a fusion or a call runs.

        Raises:
            HloError: it is not in the text.
        """
        name = instruction.callee("calls", "to_apply")
        if name not in self.computations:
            raise HloError(f"%{instruction.name} calls a computation that is not in the text: {name}")
        return self.computations[name]

    def branches(self, conditional: Instruction) -> list[Computation]:
        """The computations of a ``conditional``."""
        listed = re.search(r"branch_computations=\{(.*?)\}", conditional.attributes)
        names = re.findall(r"[\w.\-]+", listed[1]) if listed else []
        names = names or re.findall(r"\b(?:true|false)_computation=%?([\w.\-]+)", conditional.attributes)
        return [self.computations[name] for name in names]


def parse(text: str) -> Module:
    """Reads a compiled program's text.

    Raises:
        HloError: there is no entry computation in it.
    """
    computations: dict[str, Computation] = {}
    entry = name = root = ""
    instructions: dict[str, Instruction] | None = None
    for line in text.splitlines():
        if instructions is None:
            if header := _HEADER.match(line):
                name, root, instructions = header[2], "", {}
                entry = name if header[1] else entry
        elif line.startswith("}"):
            if instructions:
                last = root or next(reversed(instructions))
                computations[name] = Computation(name, instructions, instructions[last])
            instructions = None
        elif found := _INSTRUCTION.match(line):
            instruction = _instruction(found[2], line[found.end() :])
            instructions[instruction.name] = instruction
            root = instruction.name if found[1] else root
    if entry not in computations:
        raise HloError(f"this is not the text of a compiled program: {text[:80]!r}")
    head = text[: text.find("\n")]
    sizes = [int(size) for size in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", head)]
    return Module(computations, computations[entry], math.prod(sizes))


def _instruction(name: str, rest: str) -> Instruction:
    shape_end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode = _OPCODE.match(rest, shape_end)
    if opcode is None:
        raise HloError(f"cannot read the instruction %{name} = {rest[:120]}")
    end = _closing(rest, opcode.end() - 1)
    return Instruction(name, opcode[1], rest[:shape_end], rest[opcode.end() : end], rest[end + 1 :])


def _closing(text: str, start: int) -> int:
    """Position of the parenthesis that closes the one at ``start``."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    raise HloError(f"unbalanced parentheses in {text[:120]!r}")


def shape_bytes(shape: str) -> int:
    """Bytes of an array, or of a tuple's arrays, as printed: the elements alone, without a layout's padding.

    ``bf16[8,128]{1,0}`` has 2048. Types of less than a byte are packed where the layout packs them (``E(4)``).
    """
    total = 0
    for dtype, bits, dims, packed in _ARRAY.findall(shape):
        width = int(packed) if packed else 8 if dtype == "pred" else max(8, int(bits))
        elements = math.prod(int(dim.lstrip("<=")) for dim in dims.split(",") if dim)
        total += (elements * width + 7) // 8
    return total


@dataclass(frozen=True, slots=True)
class Frame:
    """A computation while it runs: enough of its caller to follow a number through loops.

    Attributes:
        computation: the one that runs.
        body: for a loop's body or condition, the body; None elsewhere.
        start: name of the tuple, in the caller, with which the loop starts.
        caller: the frame of the computation that holds the loop.
    """

    computation: Computation
    body: Computation | None = None
    start: str = ""
    caller: Frame | None = None

    def number(self, name: str) -> int | None:
        """The integer that an instruction always has; None if it is not plain to see."""
        instruction = self.computation.instructions[name]
        if instruction.opcode == "constant":
            return int(instruction.inside) if re.fullmatch(r"-?\d+", instruction.inside) else None
        if instruction.opcode in _MOVES:
            return self.number(instruction.operands[0])
        if instruction.opcode == "get-tuple-element":
            return self._element(instruction.operands[0], instruction.index)
        return None

    def _element(self, name: str, index: int) -> int | None:
        """The integer that element ``index`` of a tuple always is."""
        source = self.computation.instructions[name]
        if source.opcode == "tuple":
            return self.number(source.operands[index])
        if source.opcode == "parameter" and self.caller is not None and _unchanged(self.body, index):
            return self.caller._element(self.start, index)
        return None

    def element_index(self, name: str) -> int | None:
        """Which element of the loop's state an instruction is; None if it is not one."""
        instruction = self.computation.instructions[name]
        if instruction.opcode in _MOVES:
            return self.element_index(instruction.operands[0])
        if instruction.opcode != "get-tuple-element":
            return None
        source = self.computation.instructions[instruction.operands[0]]
        return instruction.index if source.opcode == "parameter" else None


def _unchanged(body: Computation | None, index: int) -> bool:
    """Whether a loop's body hands element ``index`` of its state on as it is."""
    if body is None or body.root.opcode != "tuple":
        return False
    return Frame(body).element_index(body.root.operands[index]) == index


def loop_frames(module: Module, loop: Instruction, frame: Frame) -> tuple[Frame, Frame]:
    """Frames of the condition and the body of a ``while`` that ``frame`` runs."""
    condition, body = loop.callee("condition"), loop.callee("body")
    if condition not in module.computations or body not in module.computations:
        raise HloError(f"%{loop.name}: its condition or its body is not in the text")
    inside = module.computations[body]
    start = loop.operands[0]
    return Frame(module.computations[condition], inside, start, frame), Frame(inside, inside, start, frame)


def trip_count(module: Module, loop: Instruction, frame: Frame) -> int | None:
    """How often a ``while`` runs its body: what the compiler notes (GPU, CPU), or what its condition says (TPU).

    Read from a condition ``counter < bound``, for a counter that starts at a number and grows by one. None if the
    count depends on data, or cannot be read.
    """
    if known := _KNOWN_TRIPS.search(loop.attributes):
        return int(known[1])
    condition, body = loop_frames(module, loop, frame)
    test = condition.computation.root
    if test.opcode != "compare" or body.computation.root.opcode != "tuple":
        return None
    direction = re.search(r"\bdirection=(\w\w)", test.attributes)
    left, right = test.operands
    for counter, bound, order in ((left, right, "LT LE GT GE NE"), (right, left, "GT GE LT LE NE")):
        index, end = condition.element_index(counter), condition.number(bound)
        if index is None or end is None or direction is None or direction[1] not in order:
            continue
        step, start = _step(body, index), frame._element(loop.operands[0], index)
        if step and start is not None:
            meaning = dict(zip(order.split(), ("LT", "LE", "GT", "GE", "NE"), strict=True))[direction[1]]
            return _trips(start, end, step, meaning)
    return None


def _step(body: Frame, index: int) -> int | None:
    """By how much each turn of a loop changes element ``index`` of its state."""
    instructions = body.computation.instructions
    update = instructions[body.computation.root.operands[index]]
    while update.opcode in _MOVES:
        update = instructions[update.operands[0]]
    if update.opcode not in ("add", "subtract"):
        return None
    first, second = update.operands
    if update.opcode == "add" and body.element_index(second) == index:
        first, second = second, first
    step = body.number(second)
    if body.element_index(first) != index or step is None:
        return None
    return step if update.opcode == "add" else -step


def _trips(start: int, end: int, step: int, meaning: str) -> int | None:
    """Turns of ``for (i = start; i meaning end; i += step)``; None if it does not end."""
    if meaning == "NE":
        turns, rest = divmod(end - start, step)
        return turns if rest == 0 and turns >= 0 else None
    if meaning in ("GT", "GE"):
        start, end, step = -start, -end, -step
    end += meaning in ("LE", "GE")
    if step < 0:
        return 0 if start >= end else None
    return max(0, -(-(end - start) // step))
