"""Statistics of routing against counts by hand; experts that they load ahead serve the same tokens."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from jaxllm.infer.streaming.experts.expert_statistics import ExpertStatistics
from jaxllm.infer.streaming.streamed_runner import StreamedRunner
from jaxllm.infer.streaming.streamed_weights import WeightPlacement
from tests.infer import engines


def test_guesses_are_the_likeliest_by_hand():
    statistics = ExpertStatistics(3, 4)
    assert statistics.guess(np.array([[0, 1]]), 2).tolist() == [[4, 4]]  # nothing is known
    statistics.see(np.array([[0, 1], [0, 2], [0, 3]]), np.array([[3, 4], [3, 1], [2, 1]]))
    # Expert 0 was followed by 3, 3, 1, 2, 1; expert 1 by 3; expert 2 by 3 and 1; 3 and 4 are of weight 0.
    assert statistics.guess(np.array([[0, 3], [1, 2], [3, 3]]), 2).tolist() == [[1, 3], [3, 1], [4, 4]]
    assert statistics.guess(np.array([[1, 3]]), 2).tolist() == [[3, 4]]


def test_guesses_are_those_of_all_pairs(rng):
    """Drawn routings: the shares of each expert after each, summed over a token's experts."""
    before, after, pairs = rng.integers(0, 6, (40, 2)), rng.integers(0, 5, (40, 3)), Counter()
    statistics = ExpertStatistics(5, 5)
    for part in (slice(0, 11), slice(11, 40)):
        statistics.see(before[part], after[part])
    for first, second in zip(before, after, strict=True):
        pairs.update((int(a), int(b)) for a in first for b in second if a < 5 and b < 5)
    of = Counter()
    for (a, _), many in pairs.items():
        of[a] += many
    for token, guess in zip(before, statistics.guess(before, 2), strict=True):
        score = [sum(pairs[int(a), b] / max(of[int(a)], 1) for a in token if a < 5) for b in range(5)]
        best = sorted(range(5), key=lambda b: (-score[b], b))[:2]
        assert guess.tolist() == [b if score[b] > 0 else 5 for b in best]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("files", [False, True])
def test_experts_by_statistics_serve_the_same(files, rng, float64, tmp_path):
    """Also where layers are streamed, whose routers would come late; some of what is loaded ahead is wanted."""
    config = engines.ENGINES["one after the other"]
    placement = WeightPlacement(
        1, 0, 0 if files else None, tmp_path if files else None, expert_slots=2, ahead="statistics",
        expert_host_bytes=0 if files else None,
    )  # fmt: skip
    engine = engines.build(config, "mixtral", "float64", placement=placement)
    made = engines.serve(engine, engines.traffic(rng, config, 6))
    assert engines.error("mixtral", "float64", made) <= 1e-12
    runner = engine.runner
    assert isinstance(runner, StreamedRunner)
    assert runner.experts is not None
    counts = runner.experts.counts
    assert counts.predicted > 0
    assert counts.predicted_hits > 0
    assert not any("predict" in name for name in runner.programs)
    runner.close()
