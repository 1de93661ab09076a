"""Live ranges of temporaries in a compiled program: what is in device memory at each step of the schedule, and why.

    memory = read(compiled.as_text())
    memory.peak_bytes, memory.at_peak()          the fullest step, and its bytes by kind of temporary
    memory.largest(10)                           the largest arrays there

Arrays share memory where the compilers must let them: tuples, bitcasts, the state of a loop, in-place updates, donated
arguments; and where an elementwise kernel writes over an operand that is not needed afterwards. Arguments and constants
are not counted, nor arrays in a core's own memory; those in host memory are counted apart. The compilers pack arrays
into one block, which leaves gaps, and may compute in place in more cases, so the peak here is close to theirs, not
equal. The TPU compiler shares buffers of collectives less than their live ranges allow: there it is a lower bound.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxllm.compiler import arena, hbm_traffic, hlo

KINDS = (
    "saved for the backward pass",
    "forward",
    "recomputed",
    "backward",
    "received",
    "optimizer",
    "results",
    "other",
)
"""Kinds of temporaries: saved from the forward for the backward pass; used within one pass, within recomputation or
within the optimizer; received from other devices; results that are in no donated argument's memory; other (everything
in a program without gradients).
"""

_LABEL = re.compile(r'op_name="([^"]*)"')
_SPACE = re.compile(r"S\((\d+)\)")
_HOST = "5"
"""Number of the memory space that is the host's."""
ARGUMENTS = "arguments"
"""Kind of what is in host memory for the whole step, such as offloaded optimizer state."""
_LAYOUT = re.compile(r"\{([\d,]*):?([^{}]*)\}")
_TILE = re.compile(r"T\(([\d,]+)\)")
_NOTHING = {"parameter", "constant", "after-all", "partition-id", "replica-id", "iota"}
_ELEMENTWISE = {
    *("add", "subtract", "multiply", "divide", "maximum", "minimum", "select", "negate", "exponential", "tanh", "log"),
    *("rsqrt", "sqrt", "power", "and", "or", "not", "xor", "clamp", "abs", "sign", "cosine", "sine", "logistic"),
}
_RECEIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")


@dataclass(eq=False)
class Buffer:
    """Live range of one array.

    Attributes:
        bytes: bytes with the padding of its layout; 0 if it is not a temporary or shares another one's memory.
        name: name of the instruction that fills it first.
        label: jax's ``op_name`` of that instruction.
        shape: shape as printed.
        first: step at which it is filled.
        last: step at which it is used last.
        kind: one of ``KINDS``.
        host: it is in host memory.
    """

    bytes: int
    name: str
    label: str
    shape: str
    first: int
    last: int
    kind: str = "other"
    host: bool = False
    received: bool = False
    result: bool = False
    used: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LiveMemory:
    """Memory of temporaries over the schedule.

    Attributes:
        steps: names of the instructions, with one iteration of each loop.
        live: live bytes at each step, by kind.
        buffers: all buffers in device memory.
        loops: (first step, last step, name) of each loop.
        host: bytes in host memory at each step, by kind; ``ARGUMENTS`` among them, which are there throughout.
    """

    steps: tuple[str, ...]
    live: dict[str, np.ndarray]
    buffers: tuple[Buffer, ...]
    loops: tuple[tuple[int, int, str], ...]
    host: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def total(self) -> np.ndarray:
        """Live bytes at each step."""
        return sum(self.live.values(), np.zeros(len(self.steps), np.int64))

    @property
    def temp_bytes(self) -> int:
        """Peak bytes of temporaries beside the results; they may lie where a later result goes."""
        taken = {buffer: [(buffer.first, buffer.last)] for buffer in self.buffers if buffer.kind == "results"}
        changes = np.zeros(len(self.steps) + 1, np.int64)
        for buffer in sorted(self.buffers, key=lambda b: -b.bytes):
            if buffer in taken:
                continue
            for result, ranges in taken.items():
                if buffer.bytes <= result.bytes and all(buffer.last < a or b < buffer.first for a, b in ranges):
                    ranges.append((buffer.first, buffer.last))
                    break
            else:
                changes[buffer.first] += buffer.bytes
                changes[buffer.last + 1] -= buffer.bytes
        return int(changes.cumsum().max(initial=0))

    @property
    def peak(self) -> int:
        """Index of the step with the most live bytes."""
        return int(self.total.argmax()) if len(self.steps) else 0

    @property
    def peak_bytes(self) -> int:
        """Live bytes at the fullest step."""
        return int(self.total.max(initial=0))

    def packed(self) -> arena.Packing:
        """A greedy packing of all buffers into one block, in the order of ``buffers``."""
        return arena.pack([arena.LiveRange(one.bytes, one.first, one.last) for one in self.buffers])

    def at_peak(self) -> dict[str, int]:
        """Live bytes by kind at the fullest step, largest first."""
        found = {kind: int(live[self.peak]) for kind, live in self.live.items()}
        return dict(sorted(((k, n) for k, n in found.items() if n), key=lambda pair: -pair[1]))

    def largest(self, count: int) -> list[Buffer]:
        """The largest buffers at the fullest step."""
        there = [b for b in self.buffers if b.first <= self.peak <= b.last and b.bytes]
        return sorted(there, key=lambda b: -b.bytes)[:count]

    def __str__(self) -> str:
        where = self.steps[self.peak] if self.steps else "nothing"
        lines = [f"beside the arguments, GiB of one device at the fullest step ({where})"]
        lines += [f"  {kind:<33}{size / 2**30:10.3f}" for kind, size in self.at_peak().items()]
        lines += ["", "the largest arrays there"]
        for buffer in self.largest(10):
            shape, label = buffer.shape.split("{")[0], buffer.label.removeprefix("jit(step)/")[-60:]
            lines.append(f"  {buffer.bytes / 2**30:8.3f}  {buffer.kind:<28}{shape:<28}{label}")
        return "\n".join(lines)


def read(text: str) -> LiveMemory:
    """Reads live ranges from the text of a compiled program, which must be scheduled.

    Raises:
        HloError: the text is not a compiled program.
    """
    module = hlo.parse(text)
    reader = _Reader(module)
    entry = module.entry
    given = {
        one.name: reader.outside(one) for one in entry.instructions.values() if one.opcode == "parameter"
    }  # arguments are no temporaries
    donated = _donated(text)
    for place, buffer in enumerate(reader.run(entry, given)):
        buffer.result = True
        if place in donated:
            buffer.bytes = 0
        buffer.last = reader.now
    reader.share()
    gradients = any("transpose(" in b.label or "jvp(" in b.label for b in reader.buffers)
    for buffer in reader.buffers:
        buffer.kind = _kind(buffer, gradients)
    own, there = ([b for b in reader.buffers if b.bytes and b.host == host] for host in (False, True))
    steps = len(reader.steps)
    host = _live(there, steps)
    if arguments := sum(
        _padded(shape)
        for one in entry.instructions.values()
        if one.opcode == "parameter"
        for shape in hbm_traffic.shapes_of(one.shape)
        if _space(shape) == _HOST
    ):
        host = {ARGUMENTS: np.full(steps, arguments, np.int64), **host}
    return LiveMemory(tuple(reader.steps), _live(own, steps), tuple(own), tuple(reader.loops), host)


def _live(buffers: Sequence[Buffer], steps: int) -> dict[str, np.ndarray]:
    """Live bytes at each step, by kind, of kinds that there are."""
    live = {kind: np.zeros(steps + 1, np.int64) for kind in KINDS}
    for buffer in buffers:
        live[buffer.kind][buffer.first] += buffer.bytes
        live[buffer.kind][buffer.last + 1] -= buffer.bytes
    return {kind: changes.cumsum()[:steps] for kind, changes in live.items() if changes.any()}


def _space(shape: str) -> str:
    """Number of the memory space of an array; "" for device memory."""
    found = _SPACE.search(shape)
    return found[1] if found else ""


def phase(label: str) -> str:
    """Pass that an ``op_name`` belongs to: "forward", "backward", "recomputed" or "optimizer"; "" if unknown."""
    if "rematted_computation" in label:
        return "recomputed"
    if "transpose(" in label:
        return "backward"
    if "jvp(" in label:
        return "forward"
    return "optimizer" if label.startswith("jit(") else ""


def _donated(text: str) -> set[int]:
    """Indices of the results that are in the memory of donated arguments."""
    head = text[: text.find("\n")]
    found = re.search(r"input_output_alias=\{(.*?)\}, \w+=", head)
    return {int(place or 0) for place in re.findall(r"\{(\d*)\}: \(", found[1])} if found else set()


def _kind(buffer: Buffer, gradients: bool) -> str:
    if buffer.result:
        return "results"
    if not gradients:
        return "received" if buffer.received else "other"
    phases = [found for label in (buffer.label, *buffer.used) if (found := phase(label))]
    if phases and phases[0] == "forward" and {"backward", "recomputed"} & set(phases):
        return "saved for the backward pass"
    if buffer.received:
        return "received"
    return phases[0] if phases else "other"


def padded_bytes(shape: str) -> int:
    """Bytes of an array or of a tuple, with the padding of TPU tiles: ``f32[8,100]{1,0:T(8,128)}`` has 4096."""
    return sum(_padded(one) for one in hbm_traffic.shapes_of(shape))


def _padded(shape: str) -> int:
    layout, size = _LAYOUT.search(shape), hlo.shape_bytes(shape)
    tile = _TILE.search(layout[2]) if layout else None
    if layout is None or tile is None or size == 0:
        return size
    dims = [int(n.lstrip("<=")) for n in shape[shape.index("[") + 1 : shape.index("]")].split(",") if n]
    order = [int(n) for n in layout[1].split(",") if n]  # from minor to major
    tiles = [int(n) for n in tile[1].split(",")][::-1]
    physical = [dims[i] for i in order] or [1]
    physical += [1] * (len(tiles) - len(physical))
    whole = [-(-n // tiles[i]) * tiles[i] if i < len(tiles) else n for i, n in enumerate(physical)]
    return size * math.prod(whole) // math.prod(dims)


class _Reader:
    """Symbolic execution of a program without values: tracks the memory of each instruction's arrays."""

    def __init__(self, module: hlo.Module) -> None:
        self.module = module
        self.steps: list[str] = []
        self.buffers: list[Buffer] = []
        self.loops: list[tuple[int, int, str]] = []
        self.shareable: list[tuple[int, list[Buffer], list[Buffer]]] = []  # step, operands, results

    @property
    def now(self) -> int:
        """Index of the current step."""
        return max(0, len(self.steps) - 1)

    def outside(self, instruction: hlo.Instruction) -> list[Buffer]:
        """Arrays that are not temporaries, such as arguments."""
        label = _label(instruction)
        return [Buffer(0, instruction.name, label, one, 0, 0) for one in hbm_traffic.shapes_of(instruction.shape)]

    def run(self, computation: hlo.Computation, given: dict[str, list[Buffer]]) -> list[Buffer]:
        """Runs a computation whose parameters are in given memory, and returns the memory of its result."""
        arrays: dict[str, list[Buffer]] = {}
        for one in computation.instructions.values():
            arrays[one.name] = given[one.name] if one.name in given else self._run(one, computation, arrays)
        return arrays[computation.root.name]

    def _run(self, one: hlo.Instruction, computation: hlo.Computation, arrays: dict[str, list[Buffer]]) -> list[Buffer]:
        operands = [arrays[name] for name in one.operands] if one.opcode != "constant" else []
        flat = [buffer for operand in operands for buffer in operand]
        if one.opcode in _NOTHING:
            return self.outside(one)
        if one.opcode == "get-tuple-element":
            return self._element(one, computation, operands[0])
        if one.opcode in ("bitcast", "opt-barrier", "tuple", "domain"):
            return flat
        if one.opcode == "add-dependency":
            return operands[0]
        self.steps.append(one.name)
        self._use(flat, _label(one))
        if one.opcode.endswith(("-done", "-update")):
            return self._finished(one, operands[0])
        if one.opcode == "while":
            return self._while(one, flat)
        if one.opcode == "conditional":
            for branch in self.module.branches(one):
                parameter = next(p for p in branch.instructions.values() if p.opcode == "parameter")
                index = self.module.branches(one).index(branch)
                for buffer in self.run(branch, {parameter.name: operands[1 + index]}):
                    buffer.bytes = 0  # written to where the conditional's own result is
                self._use(flat, "")
            return self._new(one)
        if one.opcode == "call":
            inside = self.module.callee(one)
            names = [p for p in inside.instructions.values() if p.opcode == "parameter"]
            result = self.run(inside, {p.name: operands[int(p.inside)] for p in names})
            self._use(flat, "")
            return result
        return self._kernel(one, computation, operands)

    def _kernel(self, one: hlo.Instruction, computation: hlo.Computation, operands: list[list[Buffer]]) -> list[Buffer]:
        results = self._new(one)
        for place, (operand, element) in self._in_place(one, len(results)).items():
            if operand < len(operands) and element < len(operands[operand]) and place < len(results):
                results[place] = self._merge(results[place], operands[operand][element])
        if one.opcode in _ELEMENTWISE or (one.opcode == "fusion" and "kind=kLoop" in one.attributes):
            self.shareable.append((self.now, [b for operand in operands for b in operand], results))
        return results

    def _in_place(self, one: hlo.Instruction, results: int) -> dict[int, tuple[int, int]]:
        """Results that share an operand's memory: place in the result -> (operand, place in it)."""
        if "output_to_operand_aliasing=" in one.attributes:
            listed = one.attributes.split("output_to_operand_aliasing=", 1)[1]
            pairs = re.findall(r"\{(\d*)\}: \((\d+), \{(\d*)\}\)", listed.split("}}")[0] + "}}")
            return {int(place or 0): (int(operand), int(element or 0)) for place, operand, element in pairs}
        if one.opcode in ("dynamic-update-slice", "scatter"):
            return {0: (0, 0)}
        if one.opcode == "copy-start":
            return {1: (0, 0)}
        if one.opcode.endswith("-start") and one.opcode != "all-reduce-start" and results > 1:
            updated = {len(one.operands): (0, 0)} if one.opcode == "dynamic-update-slice-start" else {}
            return updated | {place: (place, 0) for place in range(len(one.operands))}
        if one.opcode == "fusion":
            return self._updated(self.module.callee(one))
        return {}

    def _updated(self, inside: hlo.Computation) -> dict[int, tuple[int, int]]:
        """Parameters of a fusion that it updates in place."""
        roots = [inside.root.name] if inside.root.opcode != "tuple" else inside.root.operands
        found = {}
        for place, name in enumerate(roots):
            one = inside.instructions[name]
            while one.opcode in ("bitcast", "copy", "reshape") and one.operands:
                one = inside.instructions[one.operands[0]]
            if one.opcode == "fusion" and 0 in (deeper := self._updated(self.module.callee(one))):
                one = inside.instructions[one.operands[deeper[0][0]]]
            elif one.opcode in ("dynamic-update-slice", "scatter"):
                one = inside.instructions[one.operands[0]]
            else:
                continue
            while one.opcode in ("bitcast", "copy", "reshape") and one.operands:
                one = inside.instructions[one.operands[0]]
            if one.opcode == "parameter":
                found[place] = (int(one.inside), 0)
        return found

    def _while(self, loop: hlo.Instruction, state: list[Buffer]) -> list[Buffer]:
        start = self.now
        condition, body = (self.module.computations[loop.callee(part) or ""] for part in ("condition", "body"))
        for part in (condition, body):
            parameter = next(p for p in part.instructions.values() if p.opcode == "parameter")
            result = self.run(part, {parameter.name: state})
            for place, buffer in enumerate(result):
                if part is body and place < len(state) and buffer is not state[place]:
                    self._merge(buffer, state[place])  # the next turn's state is where this turn's was
        self._use(state, _label(loop))
        self.loops.append((start, self.now, loop.name))
        return state

    def _element(self, one: hlo.Instruction, computation: hlo.Computation, array: list[Buffer]) -> list[Buffer]:
        """Arrays of one element of a tuple, which may be a tuple itself."""
        parts = _elements(computation.instructions[one.operands[0]].shape)
        before = sum(len(hbm_traffic.shapes_of(part)) for part in parts[: one.index])
        return array[before : before + len(hbm_traffic.shapes_of(parts[one.index]))]

    def _finished(self, one: hlo.Instruction, started: list[Buffer]) -> list[Buffer]:
        """Arrays that a ``-done`` returns: those of its ``-start`` that are new there and have the same shapes."""
        if one.opcode.endswith("-update"):
            return started
        wanted = [hlo.shape_bytes(shape) for shape in hbm_traffic.shapes_of(one.shape)]
        own = [b for b in started if b.name == one.operands[0]]
        found = [next((b for b in own if hlo.shape_bytes(b.shape) == size), None) for size in wanted]
        if one.opcode == "copy-done" and own:
            return own[:1]
        return [b for b in found if b is not None] if None not in found else started[-len(wanted) :]

    def _new(self, one: hlo.Instruction) -> list[Buffer]:
        label, received = _label(one), one.opcode.removesuffix("-start") in _RECEIVES
        made = []
        for shape in hbm_traffic.shapes_of(one.shape):
            space = _space(shape)
            far = space in ("", _HOST) and one.target not in hlo.NO_WORK - {"AllocateBuffer"}
            size = _padded(shape) if far else 0
            made.append(
                Buffer(size, one.name, label, shape, self.now, self.now, host=space == _HOST, received=received)
            )
        self.buffers += made
        return made

    def _merge(self, buffer: Buffer, into: Buffer) -> Buffer:
        """Puts an array into the memory of another one."""
        buffer.bytes = 0
        into.last = max(into.last, buffer.last)
        return into

    def _use(self, buffers: Sequence[Buffer], label: str) -> None:
        for buffer in buffers:
            buffer.last = self.now
            buffer.used.append(label)

    def share(self) -> None:
        """Lets elementwise kernels write over an operand that is not needed afterwards."""
        for step, operands, results in self.shareable:
            free = [b for b in operands if b.last == step and b.first < step and b.bytes]
            for result in results:
                same = next((b for b in free if b.bytes == result.bytes and b.host == result.host), None)
                if same is not None and result.first == step:
                    same.last = step - 1
                    free.remove(same)


def _elements(shape: str) -> list[str]:
    """Splits the shape of a tuple: ``((a, b), c)`` -> ``(a, b)`` and ``c``."""
    parts, depth, start = [], 0, 1
    for place, sign in enumerate(shape):
        depth += (sign in "([{") - (sign in ")]}")
        if (sign == "," and depth == 1) or (sign == ")" and depth == 0):
            parts.append(shape[start:place])
            start = place + 1
    return parts


def _label(instruction: hlo.Instruction) -> str:
    found = _LABEL.search(instruction.attributes)
    return found[1] if found else ""
