"""Greedy bits by layer: within the budget, the best of all choices for equal sizes, and never worse than uniform."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxllm.quant.bit_allocation import LayerErrors, allocate_bits, bits_of_matrices, total_error

BITS = (2, 3, 4, 5)


def drawn_layers(rng: np.random.Generator, count: int, sizes: tuple[int, ...]) -> list[LayerErrors]:
    """Layers whose errors fall by about four for each bit, from where they begin at random."""
    out = []
    for _ in range(count):
        begin, fall = rng.lognormal(0, 1.5), rng.uniform(2.5, 5)
        out.append(LayerErrors(int(rng.choice(sizes)), {n: begin * fall ** (2 - n) for n in BITS}))
    return out


def mean_bits(layers: list[LayerErrors], bits: list[int]) -> float:
    return sum(n * layer.weights for layer, n in zip(layers, bits, strict=True)) / sum(x.weights for x in layers)


def least_error(layers: list[LayerErrors], budget: float) -> float:
    """The best of all choices within the budget."""
    return min(
        total_error(layers, bits)
        for bits in itertools.product(BITS, repeat=len(layers))
        if mean_bits(layers, list(bits)) <= budget + 1e-9
    )


@pytest.mark.parametrize("budget", [2, 2.6, 3, 3.5, 5])
def test_greedy_bits_are_within_the_budget_and_not_above_uniform(budget, rng):
    layers = drawn_layers(rng, 5, (1000,))
    bits = allocate_bits(layers, budget)
    assert mean_bits(layers, bits) <= budget
    assert total_error(layers, bits) <= total_error(layers, [max(n for n in BITS if n <= budget)] * 5)
    # With layers of one size and errors that fall convexly no choice is better.
    assert total_error(layers, bits) <= least_error(layers, budget) * (1 + 1e-12)


def test_matrices_of_a_tensor_have_the_same_bits():
    steep, flat = {2: 8.0, 4: 1.0}, {2: 1.0, 4: 0.9}
    errors = {("q", 0): LayerErrors(10, steep), ("k", 0): LayerErrors(10, flat), ("o", 0): LayerErrors(10, flat)}
    assert bits_of_matrices(errors, [], 8 / 3) == {("q", 0): 4, ("k", 0): 2, ("o", 0): 2}
    found = bits_of_matrices(errors, [[("q", 0), ("k", 0), ("norm", 0)]], 10 / 3)
    assert found == {("q", 0): 4, ("k", 0): 4, ("o", 0): 2}
    with pytest.raises(ValueError, match=r"a budget of 1\.5 bits is below 2"):
        allocate_bits(list(errors.values()), 1.5)
