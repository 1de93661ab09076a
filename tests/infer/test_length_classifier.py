"""Lengths learned from prompts: what is predicted without data, with some, and who asks for it."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllm.infer import SamplingParams
from jaxllm.infer.scheduling.length_classifier import SEEN, UNKNOWN, LengthClassifier
from jaxllm.infer.scheduling.policies import POLICIES
from jaxllm.infer.scheduling.policy_state import PolicyState
from jaxllm.infer.scheduling.sequence import Request, Sequence


def test_nothing_is_known_at_first() -> None:
    assert LengthClassifier().predict([1, 2], 4096) == UNKNOWN
    assert LengthClassifier().predict([1, 2], 5) == 5.0


def test_one_range_predicts_its_mean() -> None:
    found = LengthClassifier()
    for generated in (8, 12, 10):
        found.learn([1, 2, 3], generated)
    assert found.predict([7, 8], 4096) == pytest.approx(10.0)
    assert found.predict([7, 8], 6) == 6.0


def test_rare_tokens_do_not_count() -> None:
    found = LengthClassifier()
    for number in range(SEEN - 1):
        found.learn([1, 9 + number], 4 if number % 2 else 64)
    assert found.predict([1, 9], 4096) == found.predict([2, 10], 4096)


def test_a_word_of_the_prompt_decides() -> None:
    rng, found = np.random.default_rng(0), LengthClassifier()
    for number in range(200):
        found.learn([*rng.integers(10, 1000, 20).tolist(), number % 2], 100 if number % 2 else 5)
    assert found.predict([50, 60, 1], 4096) > 80
    assert found.predict([50, 60, 0], 4096) < 20
    assert found.predict([*range(10, 2000), 1], 4096) > 80  # both ends of a long prompt are looked at


def test_the_policy_learns_from_what_ended() -> None:
    state = PolicyState(POLICIES["learned"])
    request = Request(0, [1, 2, 3], SamplingParams(max_tokens=300), b"", 0, frozenset())
    sequence = Sequence(request, 0, 0, [1, 2, 3, *range(20)], finish="stop")
    assert state.predict(request) == UNKNOWN
    state.finish(sequence)
    assert state.predict(request) == pytest.approx(20.0)
    assert PolicyState(POLICIES["predicted"]).classifier is None
    assert PolicyState(POLICIES["learned"], predict=lambda prompt, most: 7.0).predict(request) == 7.0
