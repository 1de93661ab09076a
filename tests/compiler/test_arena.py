"""Arena: greedy packings are legal, close to the least block of all, and never below the live bytes."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.compiler import arena, live_ranges
from jaxllm.compiler.arena import LiveRange
from tests import environment


def drawn(rng: np.random.Generator, count: int, steps: int) -> list[LiveRange]:
    ends = np.sort(rng.integers(0, steps, (count, 2)), axis=1).tolist()
    return [LiveRange(int(rng.integers(1, 20)), first, last) for first, last in ends]


def least(ranges: list[LiveRange]) -> int:
    """The least block: some order of the arrays, each as low as those before it allow, gives it."""
    best = sum(one.bytes for one in ranges)
    for order in itertools.permutations(range(len(ranges))):
        offsets: dict[int, int] = {}
        for i in order:
            met = sorted((offsets[j], offsets[j] + ranges[j].bytes) for j in offsets if ranges[j].meets(ranges[i]))
            low = 0
            for start, end in met:
                if start - low >= ranges[i].bytes:
                    break
                low = max(low, end)
            offsets[i] = low
        best = min(best, max(offsets[i] + ranges[i].bytes for i in offsets))
    return best


def check_legal(ranges: list[LiveRange], found: arena.Packing) -> None:
    spans = [(at, at + one.bytes) for at, one in zip(found.offsets, ranges, strict=True)]
    assert min(start for start, _ in spans) == 0
    assert max(end for _, end in spans) == found.bytes
    for i, j in itertools.combinations(range(len(ranges)), 2):
        if ranges[i].meets(ranges[j]):
            assert spans[i][1] <= spans[j][0] or spans[j][1] <= spans[i][0]


def test_close_to_the_least_block(rng):
    over = []
    for _ in range(40):
        ranges = drawn(rng, 6, int(rng.integers(2, 9)))
        found, best = arena.pack(ranges), least(ranges)
        check_legal(ranges, found)
        assert arena.live_bytes(ranges).max() <= best <= found.bytes
        over.append(found.bytes / best)
    assert np.mean(over) < 1.02


def test_a_gap_is_used_and_the_smallest_that_holds():
    """Two gaps of 4 and 2 bytes between long-lived arrays: an array of 2 goes into the second."""
    walls = [LiveRange(10, 0, 3), LiveRange(4, 0, 1), LiveRange(9, 0, 3), LiveRange(2, 0, 1), LiveRange(8, 0, 3)]
    found = arena.place([*walls, LiveRange(2, 2, 3)], range(6))
    assert found.offsets == (0, 10, 14, 23, 25, 23)
    assert found.bytes == 33


def test_orders():
    ranges = [LiveRange(5, 0, 0), LiveRange(2, 1, 2), LiveRange(4, 1, 1), LiveRange(3, 2, 3)]
    assert arena.live_bytes(ranges).tolist() == [5, 6, 5, 3]
    assert arena.by_size(ranges) == [0, 2, 3, 1]
    assert arena.by_breadth(ranges) == [2, 1, 0, 3]
    assert arena.pack([]) == arena.Packing(0, ())


@pytest.mark.parametrize("layers", [1, 6])
def test_programs_take_no_more_than_their_compiler_gives_them(layers):
    """Gradients of products, results in the block too: between the live bytes and what the compiler allocates."""

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    w, x = jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((512, 256), jnp.float32)
    lowered: Any = jax.jit(jax.grad(loss)).lower([w] * layers, x)
    program = lowered.compile(environment.AS_EVER)
    memory = live_ranges.read(program.as_text() or "")
    packed, live = memory.packed(), memory.peak_bytes
    ranges = [LiveRange(one.bytes, one.first, one.last) for one in memory.buffers]
    check_legal(ranges, packed)
    assert live == arena.live_bytes(ranges).max()
    assert live <= packed.bytes <= 1.1 * live
    analysis = program.memory_analysis()
    assert analysis is not None
    taken = analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    assert packed.bytes <= taken, "results have memory of their own there"
