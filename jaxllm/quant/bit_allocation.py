"""Bits by layer: a budget of bits is spent where it lowers the error most (greedy mixed precision, arXiv:2401.14895).

In each step the layer whose error falls most for the bytes that it costs gets more bits, until no step fits the budget.
Layers begin with the fewest bits, or with the most that all can have, and the better of the two ends is taken. MPTQ-ViT
measures a layer's error by the model's results; here it is the error of the layer's own results.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

BUDGET_BITS = (2, 3, 4, 5, 6, 8)
"""Bits that a budget chooses among."""
Key = tuple[str | int, ...]
"""Matrix: its path, the row of its layer, and the number of the expert where experts have bits of their own."""


class LayerErrors(NamedTuple):
    """Errors of a layer.

    Attributes:
        weights: number of its weights.
        error: error by bits of a weight.
    """

    weights: int
    error: Mapping[int, float]


def allocate_bits(layers: Sequence[LayerErrors], budget: float) -> list[int]:
    """Bits of each layer, whose mean over weights is at most the budget.

    The total error is never above that of the best uniform choice within the budget.

    Args:
        layers: errors of layers, all for the same bits.
        budget: mean of bits over weights.

    Raises:
        ValueError: the budget is below the fewest bits; says which they are.
    """
    choices = sorted(layers[0].error)
    if budget < choices[0]:
        raise ValueError(f"a budget of {budget:g} bits is below {choices[0]}, the fewest bits of a layer.")
    most = int(budget * sum(layer.weights for layer in layers) + 1e-6)
    uniform = max(n for n in choices if n <= budget)
    found = [_with_more(layers, [begin] * len(layers), most) for begin in (choices[0], uniform)]
    return min(found, key=lambda bits: total_error(layers, bits))


def _with_more(layers: Sequence[LayerErrors], bits: list[int], most: int) -> list[int]:
    """More bits where they lower the error most for what they cost, until none fit."""
    bits, left = list(bits), most - _size(layers, bits)

    def steps(i: int) -> list[tuple[float, int, int, int]]:
        """Steps of a layer, the best of all layers' first in a heap; a step that does not fit never will."""
        layer, have = layers[i], bits[i]
        rates = {n: (layer.error[have] - layer.error[n]) / (n - have) / layer.weights for n in layer.error if n > have}
        return [(-rate, -i, -more, have) for more, rate in rates.items() if rate > 0]

    heap = [step for i in range(len(layers)) for step in steps(i)]
    heapq.heapify(heap)
    while heap:
        _, i, more, have = heapq.heappop(heap)
        i, more = -i, -more
        cost = (more - have) * layers[i].weights
        if have == bits[i] and cost <= left:
            left, bits[i] = left - cost, more
            for step in steps(i):
                heapq.heappush(heap, step)
    return bits


def _size(layers: Sequence[LayerErrors], bits: Sequence[int]) -> int:
    return sum(n * layer.weights for layer, n in zip(layers, bits, strict=True))


def total_error(layers: Sequence[LayerErrors], bits: Sequence[int]) -> float:
    """Sum of the layers' errors."""
    return sum(layer.error[n] for layer, n in zip(layers, bits, strict=True))


def bits_of_matrices(
    errors: Mapping[Key, LayerErrors], together: Iterable[Sequence[Key]], budget: float
) -> dict[Key, int]:
    """Bits of each matrix, see ``allocate_bits``.

    Args:
        together: matrices that share a tensor of a file, and therefore have the same bits; others are ignored.
    """
    owner, members = {key: key for key in errors}, {key: [key] for key in errors}
    for keys in together:
        mine = list(dict.fromkeys(owner[key] for key in keys if key in owner))
        for other in mine[1:]:
            moved = members.pop(other)
            members[mine[0]] += moved
            owner |= dict.fromkeys(moved, mine[0])
    units = list(members.values())
    layers = [
        LayerErrors(
            sum(errors[key].weights for key in unit),
            {n: sum(errors[key].error[n] for key in unit) for n in errors[unit[0]].error},
        )
        for unit in units
    ]
    chosen = allocate_bits(layers, budget)
    return {key: n for unit, n in zip(units, chosen, strict=True) for key in unit}
