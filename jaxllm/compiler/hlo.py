"""Parser of optimised HLO (``jax.stages.Compiled.as_text()``): computations, instructions, loops and trip counts.

One instruction: ``%name = shape opcode(operands), attributes``, whose attributes may go on over further lines. It
reads what the compilers for TPU, GPU and CPU really print; see https://openxla.org/xla/operation_semantics.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import NamedTuple

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_END = re.compile(r"\}(, execution_thread=.*)?$")  # a line of metadata may begin with a brace too
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
"""Custom calls that are annotations for the TPU compiler and do no work."""


class HloError(ValueError):
    """The text is not a compiled program that this parser understands."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One HLO instruction.

    Attributes:
        name: name without the percent sign.
        opcode: opcode, such as ``all-gather-start``.
        shape: shape of the result, as printed.
        inside: text between the parentheses: operands, or the value of a constant.
        attributes: text after the parentheses.
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
        """Name of the computation in the first of these attributes that is present."""
        for attribute in attributes:
            if found := re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes):
                return found[1]
        return None

    @property
    def target(self) -> str:
        """Target of a custom call; "" for other instructions."""
        found = re.search(r'\bcustom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def index(self) -> int:
        """Index of the element that a ``get-tuple-element`` takes."""
        found = re.search(r"\bindex=(\d+)", self.attributes)
        if found is None:
            raise HloError(f"%{self.name} has no index")
        return int(found[1])


@dataclass(frozen=True, slots=True)
class Computation:
    """One HLO computation: its instructions by name, in the order of the schedule."""

    name: str
    instructions: dict[str, Instruction]
    root: Instruction


@dataclass(frozen=True, slots=True)
class Module:
    """One HLO module, which is a compiled program.

    Attributes:
        computations: computations by name.
        entry: the entry computation.
        num_devices: number of devices that run it together.
    """

    computations: dict[str, Computation]
    entry: Computation
    num_devices: int

    def callee(self, instruction: Instruction) -> Computation:
        """The computation that a fusion or a call runs.

        Raises:
            HloError: the computation is not in the text.
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
    """Parses the text of a compiled program.

    Raises:
        HloError: it has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = name = root = last = ""
    instructions: dict[str, Instruction] | None = None
    for line in text.splitlines():
        if instructions is None:
            if header := _HEADER.match(line):
                name, root, instructions = header[2], "", {}
                entry = name if header[1] else entry
        elif _END.match(line):
            if instructions:
                computations[name] = Computation(name, instructions, instructions[root or last])
            instructions = None
        elif found := _INSTRUCTION.match(line):
            last = found[2]
            instructions[last] = _instruction(last, line[found.end() :])
            root = last if found[1] else root
        elif instructions:  # the TPU compiler prints a kernel's metadata on lines of their own
            begun = instructions[last]
            instructions[last] = dataclasses.replace(begun, attributes=begun.attributes + line)
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
    """Bytes of an array, or of the arrays of a tuple, as printed: elements alone, without the padding of a layout.

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
    """Stack frame of a computation: enough of its caller to follow an integer through loops.

    Attributes:
        computation: the computation that runs.
        body: for the body or condition of a loop, the body; None elsewhere.
        start: name, in the caller, of the tuple with which the loop starts.
        caller: frame of the computation that holds the loop.
    """

    computation: Computation
    body: Computation | None = None
    start: str = ""
    caller: Frame | None = None

    def number(self, name: str) -> int | None:
        """Constant integer value of an instruction; None if it cannot be read."""
        instruction = self.computation.instructions[name]
        if instruction.opcode == "constant":
            return int(instruction.inside) if re.fullmatch(r"-?\d+", instruction.inside) else None
        if instruction.opcode in _MOVES:
            return self.number(instruction.operands[0])
        if instruction.opcode == "get-tuple-element":
            return self._element(instruction.operands[0], instruction.index)
        return None

    def _element(self, name: str, index: int) -> int | None:
        """Constant integer value of element ``index`` of a tuple; None if it cannot be read."""
        source = self.computation.instructions[name]
        if source.opcode == "tuple":
            return self.number(source.operands[index])
        if source.opcode == "parameter" and self.caller is not None and _unchanged(self.body, index):
            return self.caller._element(self.start, index)
        return None

    def element_index(self, name: str) -> int | None:
        """Index of the element of the loop's state that an instruction is; None if it is not one."""
        instruction = self.computation.instructions[name]
        if instruction.opcode in _MOVES:
            return self.element_index(instruction.operands[0])
        if instruction.opcode != "get-tuple-element":
            return None
        source = self.computation.instructions[instruction.operands[0]]
        return instruction.index if source.opcode == "parameter" else None


def _unchanged(body: Computation | None, index: int) -> bool:
    """Whether the body of a loop passes element ``index`` of its state on unchanged."""
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


class _Operand(NamedTuple):
    """Operand of an integer operation: an instruction of a frame."""

    frame: Frame
    name: str

    @property
    def number(self) -> int | None:
        """Constant integer value; None if it cannot be read."""
        return self.frame.number(self.name)

    @property
    def element(self) -> int | None:
        """Index of the element of the loop's state that it is; None if it is not one."""
        return self.frame.element_index(self.name)


def _operation(module: Module, frame: Frame, instruction: Instruction) -> tuple[Instruction, list[_Operand]]:
    """An operation and its operands; of a fusion, the operation of its root."""
    while instruction.opcode in _MOVES:
        instruction = frame.computation.instructions[instruction.operands[0]]
    if instruction.opcode != "fusion":
        return instruction, [_Operand(frame, name) for name in instruction.operands]
    inside = Frame(module.callee(instruction))
    found = []
    for name in inside.computation.root.operands:
        one = inside.computation.instructions[name]
        while one.opcode in _MOVES:
            one = inside.computation.instructions[one.operands[0]]
        if one.opcode == "parameter":
            found.append(_Operand(frame, instruction.operands[int(one.inside)]))
        else:
            found.append(_Operand(inside, one.name))
    return inside.computation.root, found


def trip_count(module: Module, loop: Instruction, frame: Frame) -> int | None:
    """Trip count of a ``while``: the compiler's annotation (GPU, CPU), or read from its condition.

    TPU compilers write no annotation, nor do GPU compilers where they have peeled an iteration off. The condition must
    be ``counter < bound`` for a counter that starts at a constant and changes by a constant. None if the count depends
    on data or cannot be read.
    """
    if known := _KNOWN_TRIPS.search(loop.attributes):
        return int(known[1])
    condition, body = loop_frames(module, loop, frame)
    test, operands = _operation(module, condition, condition.computation.root)
    if test.opcode != "compare" or body.computation.root.opcode != "tuple":
        return None
    direction = re.search(r"\bdirection=(\w\w)", test.attributes)
    left, right = operands
    for counter, bound, order in ((left, right, "LT LE GT GE NE"), (right, left, "GT GE LT LE NE")):
        index, end = counter.element, bound.number
        if index is None or end is None or direction is None or direction[1] not in order:
            continue
        step, start = _step(module, body, index), frame._element(loop.operands[0], index)
        if step and start is not None:
            meaning = dict(zip(order.split(), ("LT", "LE", "GT", "GE", "NE"), strict=True))[direction[1]]
            return _trips(start, end, step, meaning)
    return None


def _step(module: Module, body: Frame, index: int) -> int | None:
    """Change of element ``index`` of a loop's state in each iteration; None if it cannot be read."""
    name = body.computation.root.operands[index]
    update, operands = _operation(module, body, body.computation.instructions[name])
    if update.opcode not in ("add", "subtract"):
        return None
    first, second = operands
    if update.opcode == "add" and second.element == index:
        first, second = second, first
    step = second.number
    if first.element != index or step is None:
        return None
    return step if update.opcode == "add" else -step


def _trips(start: int, end: int, step: int, meaning: str) -> int | None:
    """Iterations of ``for (i = start; i meaning end; i += step)``; None if it does not end."""
    if meaning == "NE":
        turns, rest = divmod(end - start, step)
        return turns if rest == 0 and turns >= 0 else None
    if meaning in ("GT", "GE"):
        start, end, step = -start, -end, -step
    end += meaning in ("LE", "GE")
    if step < 0:
        return 0 if start >= end else None
    return max(0, -(-(end - start) // step))
