"""Host offload in a compiled program: copies between device and host memory, and the computation that hides them.

    printed as                                               on
    dynamic-slice-start / -done, dynamic-update-slice-start  TPU: a slice of an array in host memory
    fusion-start / -done of these                            GPU
    copy-start / -done                                       both: whole arrays

An array in host memory has ``S(5)`` in its layout. Loop bodies are multiplied by their trip counts.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from jaxllm.compiler import hlo
from jaxllm.compiler.collectives import cycles_of

To = Literal["host", "device"]
_HOST = "S(5)"
_ARRAY = re.compile(r"\w+\[\d[\d,]*\](?:\{[^{}]*\})?")


@dataclass(frozen=True, order=True)
class Transfer:
    """Copies of one size and direction in one run of a program, on one device.

    Attributes:
        to: destination of the copies.
        bytes: bytes of one copy.
        count: number of copies, with loops multiplied out.
        beside: the TPU compiler's estimate of the cycles computed between start and end of one copy; 0 elsewhere.
    """

    to: To
    bytes: int
    count: int
    beside: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all of them together."""
        return self.bytes * self.count


def transfers(text: str) -> tuple[Transfer, ...]:
    """Copies between device and host of a compiled program, largest total first.

    Raises:
        HloError: the text is not a compiled program.
    """
    module = hlo.parse(text)
    found: Counter[tuple[To, int, int]] = Counter()
    _run(module, hlo.Frame(module.entry), 1, found)
    rows = [Transfer(to, size, count, beside) for (to, size, beside), count in found.items()]
    return tuple(sorted(rows, key=lambda row: (-row.total_bytes, row)))


def _run(module: hlo.Module, frame: hlo.Frame, times: int, found: Counter[tuple[To, int, int]]) -> None:
    open_: dict[str, tuple[To, int, int]] = {}
    now = 0
    for instruction in frame.computation.instructions.values():
        if (moved := _moved(instruction)) is not None:
            open_[instruction.name] = (*moved, now)
        elif instruction.opcode.endswith("-done") and instruction.operands[0] in open_:
            to, size, since = open_.pop(instruction.operands[0])
            found[to, size, now - since] += times
        else:
            now += cycles_of(instruction) or 0
        if instruction.opcode == "while":
            turns = hlo.trip_count(module, instruction, frame)
            for part in hlo.loop_frames(module, instruction, frame):
                _run(module, part, times * (1 if turns is None else turns), found)


def _moved(instruction: hlo.Instruction) -> tuple[To, int] | None:
    """Destination and bytes of the copy that an instruction starts; None if it starts none."""
    if not instruction.opcode.endswith("-start") or _HOST not in instruction.shape:
        return None
    if instruction.opcode in hlo.CALLS:
        return None  # a computation that the host runs
    arrays = _ARRAY.findall(instruction.shape)
    here = [array for array in arrays if _HOST not in array]
    if not here:
        return None
    # A copy says its result first, a slice its operands.
    result = arrays[0] if instruction.opcode == "copy-start" else arrays[-1]
    return ("host" if _HOST in result else "device"), hlo.shape_bytes(here[0])
