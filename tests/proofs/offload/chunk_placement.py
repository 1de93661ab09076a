"""Chunks of PatrickStar: the size that wastes least, and evictions by a warm-up's moments, against brute force."""

from __future__ import annotations

import itertools
import random

import pytest

from jaxllm.plan.formulas.chunk_plan import ChunkError, Moment, chunk_layout, least_waste, replay
from tests.proofs.harness import proof


def fewest_loads(moments: list[Moment], size: int, capacity: int, steps: int) -> int:
    """Fewest loads of all choices of what stays, by dynamic programming over sets of chunks on the device."""
    best = {frozenset[int](): 0}
    for moment in moments * steps:
        room, after = (capacity - moment.others) // size, dict[frozenset[int], int]()
        for here, loads in best.items():
            others = sorted(here - moment.needs)
            cost = loads + len(moment.needs - here)
            for count in range(min(len(others), room - len(moment.needs)) + 1):
                for stay in itertools.combinations(others, count):
                    now = moment.needs.union(stay)
                    after[now] = min(after.get(now, cost), cost)
        best = after
    return min(best.values())


@proof("offload", count=300, sample=10, counts=("lru", "latest", "less"))
def chunks_move_least(seed: int) -> dict[str, float]:
    """Drawn chunks, moments and other memory that changes: loads by latest use are the fewest of all choices, and not
    more than by LRU; at no moment do chunks and other bytes exceed the device. Loads of both are counted."""
    rng = random.Random(seed)
    chunks, size, capacity = rng.randint(2, 7), rng.randint(1, 5), rng.randint(10, 40)
    length, steps = rng.randint(2, 8), rng.randint(1, 3)
    moments = []
    for _ in range(length):
        others = rng.randint(0, capacity - size)
        room = (capacity - others) // size
        needs = rng.sample(range(chunks), rng.randint(1, min(chunks, room, 3)))
        moments.append(Moment(frozenset(needs), others))
    latest = replay(moments, size, capacity, steps, "latest use")
    lru = replay(moments, size, capacity, steps, "oldest use")
    loads = [sum(step.loads for step in steps) for steps in (latest, lru)]
    assert loads[0] == fewest_loads(moments, size, capacity, steps)
    assert loads[0] <= loads[1]
    for traffic in (latest, lru):
        there = sum(step.loads - step.evictions for step in traffic)
        assert len(moments[-1].needs) <= there <= chunks
        assert max(step.most for step in traffic) <= max((capacity - m.others) // size for m in moments)
    over = Moment(frozenset(range(chunks)), capacity - size * chunks + 1)
    with pytest.raises(ChunkError, match=f"moment {length} needs {chunks}"):
        replay([*moments, over], size, capacity, 1, "latest use")
    return {"lru": loads[1], "latest": loads[0], "less": float(loads[0] < loads[1])}


@proof("offload", count=300, sample=10)
def chunks_waste_least(seed: int) -> None:
    """Drawn tensors and ranges: the waste of the chosen size, against every size of the range; every tensor lies in one
    chunk, in order, and no chunk has more than its size."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 60) for _ in range(rng.randint(1, 25))]
    least = rng.randint(1, 100)
    most = max(least, *sizes) + rng.randint(0, 200)
    layout = least_waste(sizes, least, most)

    def cut(size: int) -> list[list[int]]:
        parts: list[list[int]] = [[]]
        for one in sizes:
            if sum(parts[-1]) + one > size:
                parts.append([])
            parts[-1].append(one)
        return parts

    every = [(len(cut(size)) * size - sum(sizes), size) for size in range(max(least, *sizes), most + 1)]
    assert (layout.waste, layout.size) == min(every)
    packed = [[one for one, chunk in zip(sizes, layout.chunks, strict=True) if chunk == n] for n in range(layout.count)]
    assert packed == cut(layout.size)
    assert list(itertools.chain.from_iterable(packed)) == sizes
    with pytest.raises(ChunkError, match="give larger chunks"):
        chunk_layout(sizes, max(sizes) - 1)


@proof("offload", count=100, sample=4)
def a_streamed_step_needs_no_warm_up(seed: int) -> None:
    """The order in which the disk tier streams layers, forward and back: leaving by last use, as it does, loads as few
    as any choice, with one layer in use at a time and none read ahead. With gradient clipping there are two backward
    passes, and leaving by latest use loads fewer, by as many layers as are in memory."""
    rng = random.Random(seed)
    layers, steps = rng.randint(2, 30), rng.randint(2, 4)
    window = rng.randint(2, layers)
    forward = [Moment(frozenset({n}), 0) for n in range(layers)]
    for order in ([*forward, *reversed(forward)], [*forward, *reversed(forward), *reversed(forward)]):
        latest = replay(order, 1, window, steps, "latest use")
        lru = replay(order, 1, window, steps, "oldest use")
        again = len(order) > 2 * layers
        for step in range(steps):
            fewer = window if again and window < layers else 0
            assert lru[step].loads - latest[step].loads == fewer, (layers, window, step)
