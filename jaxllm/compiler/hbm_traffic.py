"""Memory traffic of a compiled program: bytes that it reads from and writes to device memory (HBM), by its text.

Counted are the operands and results of each kernel: of a slice the sliced part, of an in-place update the updated
part, nothing that a fusion keeps inside, nothing that lies in a core's own memory (TPU, ``S(1)``). Loops count with
their trip counts. Loops whose trip count depends on data, and custom calls that work in place (kernels that fetch by
themselves), are left out and counted by number.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from jaxllm.compiler import hlo

_ONE = re.compile(r"[a-z]+\d*\w*\[[\d,<=]*\](?:\{[^{}]*\})?")
FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("opt-barrier", "iota", "copy-done", "slice-done", "async-done", "async-update", "dynamic-slice-done"),
    *("call-done", "call-update"),
}
_SLICES = {"dynamic-slice", "slice", "gather"}
_PASSES = {"bitcast", "reshape", "copy", "convert", "transpose"}


@dataclass
class Traffic:
    """Memory traffic of one run of a program.

    Attributes:
        bytes: bytes read and written.
        data_loops: number of outermost loops left out because their trip count depends on data, see ``read``.
        kernels: number of custom calls left out.
    """

    bytes: int = 0
    data_loops: int = 0
    kernels: int = 0


def read(text: str, turns: int = 1) -> Traffic:
    """Reads the memory traffic from the text of a compiled program.

    Args:
        turns: trip count to assume for an outermost loop whose trip count depends on data.

    Raises:
        HloError: the text is not a compiled program.
    """
    module = hlo.parse(text)
    return TrafficReader(module, turns).run(hlo.Frame(module.entry), outermost=True)


class TrafficReader:
    """Reads the memory traffic of single instructions and sums it over a program."""

    def __init__(self, module: hlo.Module, turns: int):
        self.module, self.turns = module, turns

    def run(self, frame: hlo.Frame, outermost: bool) -> Traffic:
        """Bytes of one run of a computation."""
        total, computation = Traffic(), frame.computation
        for instruction in computation.instructions.values():
            opcode = instruction.opcode
            if opcode == "while":
                turns = hlo.trip_count(self.module, instruction, frame)
                if turns is None and not outermost:
                    total.data_loops += 1
                    continue
                times = self.turns if turns is None else turns
                for part in hlo.loop_frames(self.module, instruction, frame):
                    inside = self.run(part, False)
                    total.bytes += times * inside.bytes
                    total.data_loops += times * inside.data_loops
                    total.kernels += times * inside.kernels
            elif opcode == "conditional":
                branches = [self.run(hlo.Frame(branch), False) for branch in self.module.branches(instruction)]
                dearest = max(branches, key=lambda branch: branch.bytes, default=Traffic())
                total.bytes += dearest.bytes
                total.data_loops += dearest.data_loops
                total.kernels += dearest.kernels
            elif opcode in hlo.CALLS:
                inside = self.run(hlo.Frame(self.module.callee(instruction)), outermost)
                total.bytes += inside.bytes
                total.data_loops += inside.data_loops
                total.kernels += inside.kernels
            else:
                moved = self.moved(instruction, computation)
                total.bytes += moved or 0
                total.kernels += moved is None
        return total

    def moved(self, instruction: hlo.Instruction, computation: hlo.Computation) -> int | None:
        """Bytes that one instruction, or fusion, reads and writes; None for a kernel that works in place."""
        if instruction.opcode in FREE or instruction.target in hlo.NO_WORK:
            return 0
        if instruction.opcode == "custom-call" and "output_to_operand_aliasing" in instruction.attributes:
            return None
        if instruction.opcode == "fusion":
            return self._fusion(instruction, computation)
        return self._plain(instruction, computation)

    def _plain(self, instruction: hlo.Instruction, computation: hlo.Computation) -> int:
        opcode = instruction.opcode.removesuffix("-start")
        shapes = [computation.instructions[name].shape for name in instruction.operands]
        if instruction.opcode == "slice-start":  # its result holds operand, result and a context
            made = shapes_of(instruction.shape)[1]
            return hlo.shape_bytes(made) * bool(far(shapes_of(shapes[0]))) + far([made])
        if opcode in _SLICES:
            return 2 * far(shapes_of(instruction.shape)[-1:])
        if opcode == "dynamic-update-slice":
            return 2 * far(shapes_of(shapes[1]))
        if opcode == "scatter":
            return 2 * far(shapes_of(shapes[-1]))
        if instruction.opcode.endswith("-start"):  # its result holds operand, result and a context
            return far(shapes_of(shapes[0])) + far(shapes_of(instruction.shape)[:1])
        return far(shapes_of(instruction.shape)) + sum(far(shapes_of(shape)) for shape in shapes)

    def _fusion(self, fusion: hlo.Instruction, computation: hlo.Computation) -> int:
        inside = self.module.callee(fusion)
        total = 0
        for parameter in inside.instructions.values():
            if parameter.opcode == "parameter":
                outer = computation.instructions[fusion.operands[int(parameter.inside)]].shape
                total += min(far(shapes_of(outer)), self._used(parameter.name, inside, far(shapes_of(outer))))
        return total + self._written(inside.root, inside, fusion.shape)

    def _used(self, name: str, inside: hlo.Computation, whole: int) -> int:
        """Bytes that a fusion reads of one of its parameters."""
        total = 0
        for user in inside.instructions.values():
            if name not in user.operands:
                continue
            if user.opcode in _SLICES and user.operands[0] == name:
                total += hlo.shape_bytes(user.shape)
            elif user.opcode in ("dynamic-update-slice", "scatter") and user.operands[0] == name:
                continue  # in place
            elif user.opcode in _PASSES:
                total += whole if user.name == inside.root.name else self._used(user.name, inside, whole)
            elif user.opcode == "fusion":
                deeper = self.module.callee(user)
                places = [i for i, operand in enumerate(user.operands) if operand == name]
                for inner in deeper.instructions.values():
                    if inner.opcode != "parameter" or int(inner.inside) not in places:
                        continue
                    if user.name != inside.root.name and _hands_on(inner.name, deeper):
                        total += self._used(user.name, inside, whole)
                    else:
                        total += self._used(inner.name, deeper, whole)
            else:
                return whole
        return total

    def _written(self, root: hlo.Instruction, inside: hlo.Computation, shape: str) -> int:
        if root.opcode in _PASSES and root.opcode != "convert":
            return self._written(inside.instructions[root.operands[0]], inside, shape)
        if root.opcode in ("dynamic-update-slice", "scatter"):
            update = inside.instructions[root.operands[1 if root.opcode == "dynamic-update-slice" else -1]]
            return min(far(shapes_of(shape)), hlo.shape_bytes(update.shape))
        if root.opcode == "fusion":
            deeper = self.module.callee(root)
            return self._written(deeper.root, deeper, shape)
        if root.opcode == "tuple":
            parts, total = iter(shapes_of(shape)), 0
            for name in root.operands:  # one that is itself a tuple, as a Triton kernel's, takes several parts
                own = inside.instructions[name]
                total += self._written(own, inside, ", ".join(itertools.islice(parts, len(shapes_of(own.shape)))))
            return total
        return far(shapes_of(shape))


def _hands_on(name: str, inside: hlo.Computation) -> bool:
    """Whether a parameter's only use is to be the result as it is, but for its layout or dtype."""
    while name != inside.root.name:
        users = [user for user in inside.instructions.values() if name in user.operands]
        if len(users) != 1 or users[0].opcode not in _PASSES:
            return False
        name = users[0].name
    return True


def shapes_of(shape: str) -> list[str]:
    """Arrays of a printed shape, each with its layout."""
    return _ONE.findall(shape)


def far(shapes: list[str]) -> int:
    """Bytes of the arrays that lie in device memory."""
    return sum(hlo.shape_bytes(shape) for shape in shapes if "S(1)" not in shape)
