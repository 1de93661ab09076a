"""Bytes of a compiled step's collectives that go between replicas: inside a round, and in the outer step."""

from __future__ import annotations

from jaxllm.compiler import hlo
from jaxllm.compiler.collectives import KINDS, CollectiveReader
from jaxllm.compiler.replica_groups import Placement, groups


def traffic_between(text: str, placement: Placement, axis: str) -> tuple[int, int, int]:
    """Bytes of collectives whose groups do not span ``axis``, of those that do, and of those inside conditionals.

    Args:
        text: of a compiled program.
        placement: of its devices.
        axis: mesh axis.
    """
    module = hlo.parse(text)
    reader = CollectiveReader(module)
    devices = len(placement.islands)

    def of(computation: hlo.Computation, conditional: bool) -> tuple[int, int, int]:
        local = inside = outer = 0
        for instruction in computation.instructions.values():
            sent = [key for key, _ in reader.sent(instruction, computation)]
            if instruction.opcode.removesuffix("-start") in KINDS:
                axes, _ = placement.joins(groups(instruction.attributes, devices))
                size = sum(key[2] for key in sent)
                if axis not in axes:
                    local += size
                elif conditional:
                    outer += size
                else:
                    inside += size
                continue
            parts: list[tuple[hlo.Computation, bool]] = []
            if instruction.opcode == "while":
                parts = [
                    (frame.computation, conditional)
                    for frame in hlo.loop_frames(module, instruction, hlo.Frame(computation))
                ]
            elif instruction.opcode == "conditional":
                parts = [(branch, True) for branch in module.branches(instruction)]
            elif instruction.opcode in hlo.CALLS or instruction.opcode == "fusion":
                parts = [(module.callee(instruction), conditional)]
            for part in parts:
                found = of(*part)
                local, inside, outer = local + found[0], inside + found[1], outer + found[2]
        return local, inside, outer

    return of(module.entry, False)
