"""FLOPs of matmuls in compiled programs: dots, convolutions (TPU compilers turn dots into them), cuBLAS calls.

A multiply-add counts as two. Elementwise arithmetic, reductions and sorts are not counted: on every device with matrix
units they are bound by memory.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence

from jaxllm.compiler import hlo

_DIMS = re.compile(r"\b[a-z]+\d*\w*\[([\d,<=]*)\]")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")


def dims(shape: str) -> list[int]:
    """Sizes of the first array of a printed shape."""
    found = _DIMS.search(shape)
    return [int(n.lstrip("<=")) for n in found[1].split(",") if n] if found else []


def products(instruction: hlo.Instruction, computation: hlo.Computation) -> int | None:
    """FLOPs of one instruction, without what it calls; None for a custom call that does not state its cost.

    Raises:
        HloError: the dimensions of a matmul cannot be read.
    """
    opcode = instruction.opcode
    if opcode not in ("dot", "ragged-dot", "convolution", "custom-call"):
        return 0
    given = [dims(computation.instructions[name].shape) for name in instruction.operands]
    if opcode == "dot":
        return _dot(dims(instruction.shape), given[0], _listed(r"lhs_contracting_dims=\{([\d,]*)\}", instruction))
    if opcode == "ragged-dot":  # every row meets one group's matrix, whichever it is
        return _dot(dims(instruction.shape), given[0], _listed(r"lhs_contracting_dims=\{([\d,]*)\}", instruction))
    if opcode == "convolution":
        return _convolution(instruction, given[0], given[1])
    return _custom_call(instruction, given)


def _dot(result: Sequence[int], left: Sequence[int], contracted: Sequence[int]) -> int:
    return 2 * math.prod(result) * math.prod(left[i] for i in contracted)


def _listed(pattern: str, instruction: hlo.Instruction) -> list[int]:
    found = re.search(pattern, instruction.attributes)
    if found is None:
        raise hlo.HloError(f"%{instruction.name}: cannot read which dimensions it sums over")
    return [int(n) for n in found[1].split(",") if n]


def _convolution(instruction: hlo.Instruction, left: Sequence[int], right: Sequence[int]) -> int:
    """FLOPs of a convolution; products with padding or dilation zeros are not counted, as in XLA."""
    labels = _LABELS.search(instruction.attributes)
    if labels is None:
        raise hlo.HloError(f"%{instruction.name}: a convolution without dim_labels")
    given, kernel, made = labels.groups()
    result = dims(instruction.shape)
    window = (
        dict(re.findall(r"(\w+)=([\dx_\-]+)", found[1])) if (found := _WINDOW.search(instruction.attributes)) else {}
    )
    steps = 1
    for place in range(sum(label.isdigit() for label in made)):
        steps *= _steps(
            left[given.index(str(place))],
            right[kernel.index(str(place))],
            result[made.index(str(place))],
            stride=_of(window, "stride", place, 1),
            pad=_of(window, "pad", place, 0),
            spread=_of(window, "lhs_dilate", place, 1),
            kernel_spread=_of(window, "rhs_dilate", place, 1),
        )
    # Each feature of the result sums over the features of its group, which are those that the kernel has.
    return 2 * steps * result[made.index("b")] * result[made.index("f")] * right[kernel.index("i")]


def _of(window: dict[str, str], key: str, place: int, default: int) -> int:
    """The number at one place of ``size=3x1 pad=1_1x0_0``; of padding the low one."""
    return int(window[key].split("x")[place].split("_")[0]) if key in window else default


def _steps(size: int, kernel: int, made: int, *, stride: int, pad: int, spread: int, kernel_spread: int) -> int:
    """Pairs of a place of the result and one of the kernel, along one dimension, that meet an element of the input.

    These are (o, k) with ``o stride + k kernel_spread - pad = i spread`` for some i in [0, size).
    """
    if spread == 1 and kernel == 1 and pad == 0:
        return min(made, (size - 1) // stride + 1)
    period = spread // math.gcd(stride, spread)  # of the places that agree with one k
    total = 0
    for k in range(kernel):
        shift = k * kernel_spread - pad
        first = next((o for o in range(period) if (o * stride + shift) % spread == 0), None)
        if first is None:
            continue
        # o = first + t period, with 0 <= o stride + shift <= (size - 1) spread and o < made
        low = max(0, -(-(-shift - first * stride) // (period * stride)))
        high = min((made - 1 - first) // period, ((size - 1) * spread - shift - first * stride) // (period * stride))
        total += max(0, high - low + 1)
    return total


def _custom_call(instruction: hlo.Instruction, given: list[list[int]]) -> int | None:
    name = instruction.target
    if name in hlo.NO_WORK or name in NO_PRODUCTS:
        return 0
    if "cublas" in name:
        found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.attributes)
        if found is None:
            raise hlo.HloError(f"%{instruction.name}: a call of cuBLAS without its dimensions")
        return _dot(dims(instruction.shape), given[0], [int(n) for n in re.findall(r"\d+", found[1])])
    estimate = cost_estimate(instruction)
    return None if estimate is None else estimate["flops"]


NO_PRODUCTS = {
    *("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "MoveToHost", "MoveToDevice"),
    *("annotate_device_placement", "TopK", "PartialReduce"),
}
"""Custom calls without matmuls: they copy, annotate or sort."""


def cost_estimate(instruction: hlo.Instruction) -> dict[str, int] | None:
    """Cost that a Pallas kernel states: "flops" and "bytes_accessed".

    On TPUs it is ``pallas_call(cost_estimate=)``, on GPUs its ``metadata=`` (``pallas_kernels._pallas.stated``).
    """
    found = re.search(r'"cost_estimate":(\{[^{}]*\})', instruction.attributes)
    if found is None:
        return _of_triton(instruction)
    said = {key: int(float(number)) for key, number in json.loads(found[1]).items()}
    return {"flops": said.get("flops", 0), "bytes_accessed": said.get("bytes_accessed", 0)}


def _of_triton(instruction: hlo.Instruction) -> dict[str, int] | None:
    """Cost in the metadata of a Triton kernel, whose quotes are escaped as hexadecimal numbers."""
    found = re.search(r'serialized_metadata = "([^"]*)"', instruction.attributes)
    said = dict(re.findall(r"\\22(\w+)\\22: \\22(\d+)\\22", found[1])) if found else {}
    if not {"flops", "bytes_accessed"} <= said.keys():
        return None
    return {name: int(said[name]) for name in ("flops", "bytes_accessed")}
