"""Search of trials with a learned cost model, on costs that are known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxllm.tune.trial_search import search

CANDIDATES = list(itertools.product((16, 32, 64, 128, 256, 512), (16, 32, 64, 128, 256, 512), (1, 2, 4, 8)))


def cost(index: int) -> float | None:
    """Time of a kernel with a best tile; what is too large fails."""
    a, b, c = CANDIDATES[index]
    if a * b * c > 2**18:
        return None
    return 1 + 0.3 * abs(np.log2(a / 128)) + 0.2 * abs(np.log2(b / 64)) + 0.1 * abs(np.log2(c / 4)) + 40 / (a * b)


def test_a_tenth_of_the_trials_finds_nearly_the_best():
    trials = len(CANDIDATES) // 10
    best = min(found for i in range(len(CANDIDATES)) if (found := cost(i)) is not None)
    asked: list[int] = []

    def measure(index: int) -> float | None:
        asked.append(index)
        return cost(index)

    found = search(CANDIDATES, measure, trials)
    assert found.best is not None
    assert len(asked) == len(set(asked)) == len(found.trials) == trials
    assert dict(found.trials)[found.best] == cost(found.best) <= 1.25 * best
    assert search(CANDIDATES, cost, trials) == found, "the same seed proposes the same"
    first = search(CANDIDATES, cost, 3, first=(5, 7))
    assert [index for index, _ in first.trials[:2]] == [5, 7]


def test_all_are_measured_where_there_are_few_and_failures_are_no_result():
    found = search(CANDIDATES[:6], lambda i: float(10 - i), 50)
    assert (found.best, len(found.trials)) == (5, 6)
    assert search(CANDIDATES[:6], lambda i: None, 50).best is None
    with pytest.raises(ValueError, match="0 candidates and 3 trials"):
        search([], cost, 3)
