"""Chunk plans: layouts and evictions by hand, and the moments of a run."""

from __future__ import annotations

import pytest

from benchmarks.memory import chunk_plan
from jaxllm.plan.formulas.chunk_plan import ChunkError, ChunkLayout, Moment, chunk_layout, least_waste, replay
from jaxllm.plan.hardware import Cluster
from recipes.llama3 import llama3_8b


def test_tensors_are_packed_in_order():
    assert chunk_layout([3, 3, 2, 5, 1], 6) == ChunkLayout(6, (0, 0, 1, 2, 2), 14)
    # Sizes 5 to 8 waste 6, 4, 7 and 2: the last has [3 3 2], [5 1].
    assert least_waste([3, 3, 2, 5, 1], 1, 8) == ChunkLayout(8, (0, 0, 0, 1, 1), 14)
    assert least_waste([3, 3, 2, 5, 1], 1, 7).size == 6
    with pytest.raises(ChunkError, match="no tensors"):
        chunk_layout([], 6)


def test_the_chunk_that_is_needed_latest_leaves():
    """Chunks 0 to 2 in turn, with room for two: after 0 and 1, 2 replaces 1, whose next use is later."""
    moments = [Moment(frozenset({n}), 0) for n in (0, 1, 2)]
    latest = replay(moments, 4, 8, 2, "latest use")
    assert [(one.loads, one.evictions, one.most) for one in latest] == [(3, 1, 2), (1, 1, 2)]
    assert [one.loads for one in replay(moments, 4, 8, 2, "oldest use")] == [3, 3]
    with pytest.raises(ChunkError, match="moment 1 needs 1 of them and 5 other bytes"):
        replay([moments[0], Moment(frozenset({1}), 5)], 4, 8, 1, "latest use")


def test_a_run_moves_less_by_its_moments():
    """Llama 8B on an H100 with room for a part of its chunks: GiB by last use and by next use."""
    said = chunk_plan.table(llama3_8b(), Cluster.parse("h100:1x1"), 1, 2.0)
    assert "291 tensors of 14.96 GiB" in said
    moved = [tuple(map(float, line.split()[-2:])) for line in said.splitlines()[2:]]
    assert all(latest <= last for last, latest in moved)
    assert any(latest < 0.9 * last for last, latest in moved)
    with pytest.raises(ChunkError, match="Give smaller chunks"):
        chunk_plan.table(llama3_8b(), Cluster.parse("h100:1x1"), 1, 8.0)
