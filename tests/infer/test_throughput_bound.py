"""Throughput of alike requests: the engine's own steps, and a bound that no order of steps exceeds."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllm.infer.streaming.throughput_bound import EngineLimits, Workload, bound, predicted, steps_of
from tests.proofs.offload.throughput import steps_of_an_engine


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("sequences", "budget"), [(1, 5), (4, 7)])
def test_steps_are_the_engines(sequences, budget):
    """Tokens of each step of a real engine whose weights are streamed."""
    limits, work = EngineLimits(budget, sequences, 10**6), Workload(5, 9, 4)
    steps = steps_of(limits, work)
    assert [tokens for tokens, _ in steps] == steps_of_an_engine(limits, work)
    assert sum(generated for _, generated in steps) == work.requests * work.generated


def test_the_bound_by_hand():
    """A step takes 2 s up to 100 tokens, then 1/50 s a token."""
    seconds = lambda tokens: max(2.0, tokens / 50)  # noqa: E731
    work = Workload(1, 30, 11)
    found = bound(seconds, EngineLimits(1000, 1000, 350), work)
    assert (found.limit, found.sequences) == ("KV cache", 10.0)
    assert found.tokens == pytest.approx(10 * 40 / 11)
    assert found.tokens_per_second == pytest.approx(5.0)
    assert bound(seconds, EngineLimits(40, 1000, 10**6), work).sequences == pytest.approx(11.0)
    assert bound(seconds, EngineLimits(1000, 7, 10**6), work).limit == "max_sequences"
    with pytest.raises(ValueError, match="holds 40 tokens, and a request has 41"):
        steps_of(EngineLimits(10, 1, 40), work)
    with pytest.raises(ValueError, match="1 or more"):
        Workload(1, 0, 1)


def test_no_finite_number_of_requests_exceeds_the_bound(rng):
    for _ in range(30):
        p, g = (int(n) for n in rng.integers(1, 60, 2))
        limits = EngineLimits(
            int(rng.integers(1, 80)), int(rng.integers(1, 30)), int(rng.integers(p + g, 30 * (p + g)))
        )
        least, each = rng.uniform(0, 2), rng.uniform(0.001, 0.1)
        seconds = lambda tokens, a=least, b=each: max(a, b * tokens)  # noqa: E731
        few, many = (predicted(seconds, limits, Workload(n, p, g)) for n in (int(rng.integers(1, 9)), 400))
        most = bound(seconds, limits, Workload(1, p, g)).tokens_per_second
        assert max(few, many) <= most * (1 + 1e-9)
        assert np.isfinite(most)
