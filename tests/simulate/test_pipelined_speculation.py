"""Pipelined speculation, simulated: greedy decoding's tokens, time by hand where it is plain, cancelled runs."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import pytest

from jaxllm.simulate.pipelined_speculation import (
    NextToken,
    PipelineCosts,
    pipelined_speculation,
    synchronous_speculation,
)

VOCAB = 17


def target(tokens: Many[int]) -> int:
    """A model whose next token depends on the last two and on their number."""
    return (5 * tokens[-1] + 3 * tokens[-2] + len(tokens)) % VOCAB


def draft_of(rate: float, seed: int) -> NextToken:
    """A draft that is right in so many places, the same for the same tokens."""

    def draft(tokens: Many[int]) -> int:
        right = np.random.default_rng([seed, len(tokens), *tokens[-3:]]).random() < rate
        return target(tokens) if right else (target(tokens) + 1) % VOCAB

    return draft


def greedy(prompt: list[int], tokens: int) -> list[int]:
    made = list(prompt)
    for _ in range(tokens):
        made.append(target(made))
    return made[len(prompt) :]


def test_time_of_plain_cases():
    """No draft is right: a token a pass. All are: the pipeline is full, at the draft's rate or a stage's."""
    costs, prompt = PipelineCosts(stages=4, stage=1.0, draft=0.25), [1, 2]
    plain = synchronous_speculation(target, draft_of(1, 0), prompt, 40, costs, 0)
    assert (plain.seconds, plain.stage_steps) == (160, 160)
    wrong = pipelined_speculation(target, draft_of(0, 0), prompt, 40, costs)
    assert wrong.seconds == 160, "drafting takes no time of the model's"
    right = pipelined_speculation(target, draft_of(1, 0), prompt, 200, costs)
    assert right.cancelled == 0
    assert right.seconds / 200 == pytest.approx(0.25, rel=0.1), "the draft's time is the limit"
    slow = pipelined_speculation(target, draft_of(1, 0), prompt, 200, costs, batch=1)
    assert slow.seconds / 200 == pytest.approx(1.0, rel=0.1), "a stage's time is the limit"
    waits = synchronous_speculation(target, draft_of(1, 0), prompt, 200, costs, 4)
    assert waits.seconds == 40 * (4 * 0.25 + 4)
    none = pipelined_speculation(target, draft_of(1, 0), prompt, 40, costs, ahead=0)
    assert (none.seconds, none.runs) == (160, 40)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
def test_tokens_are_those_of_greedy_decoding(rate, rng):
    for _ in range(20):
        costs = PipelineCosts(int(rng.integers(1, 6)), 1.0, float(rng.choice([0, 0.1])), float(rng.uniform(0, 3)))
        prompt, count, seed = rng.integers(0, VOCAB, int(rng.integers(2, 5))).tolist(), int(rng.integers(1, 40)), 3
        want, draft = greedy(prompt, count), draft_of(rate, seed)
        assert synchronous_speculation(target, draft, prompt, count, costs, int(rng.integers(0, 6))).tokens == want
        batch = int(rng.integers(1, 6))
        both = [
            pipelined_speculation(target, draft, prompt, count, costs, batch=batch, cancel=cancel)
            for cancel in (True, False)
        ]
        assert all(one.tokens == want for one in both)
        assert both[0].stage_steps <= both[1].stage_steps
        assert rate < 1 or not both[0].cancelled


def test_a_cancelled_run_is_computed_by_no_further_stage():
    """Every draft is wrong: the runs behind a valid one stop where they are."""
    costs, prompt = PipelineCosts(stages=4, stage=1.0, draft=1.0), [1, 2]
    found = {
        cancel: pipelined_speculation(target, draft_of(0, 0), prompt, 12, costs, batch=1, cancel=cancel)
        for cancel in (True, False)
    }
    # A pass takes 4 seconds; runs behind it begin after 1, 2 and 3 seconds, and have begun 3, 2 and 1 stages by then.
    assert (found[True].seconds, found[True].stage_steps) == (12 * 4, 12 * (4 + 3 + 2 + 1))
    assert found[False].stage_steps > 160


def test_settings_are_checked():
    with pytest.raises(ValueError, match="give 1 stage or more"):
        PipelineCosts(stages=0)
    with pytest.raises(ValueError, match="batch = 0"):
        pipelined_speculation(target, target, [1, 2], 3, PipelineCosts(), batch=0)
