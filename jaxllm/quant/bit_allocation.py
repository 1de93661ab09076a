"""Bits by layer: a budget of bits is spent where it lowers the error most (greedy mixed precision, arXiv:2401.14895).

In each step the layer whose error falls most for the bytes that it costs gets more bits, until no step fits the budget.
Layers begin with the fewest bits, or with the most that all can have, and the better of the two ends is taken. MPTQ-ViT
measures a layer's error by the model's results; here it is the error of the layer's own results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

BUDGET_BITS = (2, 3, 4, 5, 6, 8)
"""Bits that a budget chooses among."""
Key = tuple[str, int]
"""Matrix: its path, and the row of its layer."""


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
    while True:
        steps = [
            ((layer.error[have] - layer.error[more]) / (more - have) / layer.weights, i, more)
            for i, (layer, have) in enumerate(zip(layers, bits, strict=True))
            for more in layer.error
            if more > have and (more - have) * layer.weights <= left
        ]
        rate, i, more = max(steps, default=(0.0, 0, 0))
        if rate <= 0:
            return bits
        left -= (more - bits[i]) * layers[i].weights
        bits[i] = more


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
    owner = {key: key for key in errors}
    for keys in together:
        mine = [owner[key] for key in keys if key in owner]
        owner = {key: mine[0] if found in mine[1:] else found for key, found in owner.items()} if mine[1:] else owner
    units = [[key for key, found in owner.items() if found == unit] for unit in dict.fromkeys(owner.values())]
    layers = [
        LayerErrors(
            sum(errors[key].weights for key in unit),
            {n: sum(errors[key].error[n] for key in unit) for n in errors[unit[0]].error},
        )
        for unit in units
    ]
    chosen = allocate_bits(layers, budget)
    return {key: n for unit, n in zip(units, chosen, strict=True) for key in unit}
