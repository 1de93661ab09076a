"""Splits of a step between prompts and decoding: what they choose by hand, and that no token depends on them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.infer import EngineConfig, SamplingParams
from jaxllm.infer.scheduling.phase_split import EvenShares, LeastWaiting, StepDemand, TokenTime, phase_split
from jaxllm.infer.scheduling.step_times import StepTimes
from tests.infer import engines

SIZES: tuple[int, ...] = (16, 64, 256)


def times(seconds: dict[int, float], decoding: float | None = 0.01) -> StepTimes:
    """Times of programs that took as long whenever they ran."""
    found = StepTimes()
    for size, took in seconds.items():
        found = found.with_step(size, took)
    return found if decoding is None else found.with_decoding(decoding)


FLAT = times({16: 0.010, 64: 0.012, 256: 0.030})
"""Times of a device that waits for weights up to some tens of tokens, and computes beyond."""


def test_programs_that_have_run_take_what_they_took():
    """The mean of a program, whose newest step counts a fifth; another size is on the line through them."""
    found = StepTimes().with_step(10, 0.1).with_step(10, 0.2).with_step(30, 0.3)
    assert found.of_program(10) == pytest.approx(0.12)
    assert found.of_program(30) == pytest.approx(0.3)
    base, slope = found.line
    assert found.of_program(20) == pytest.approx(base + 20 * slope)
    assert found.with_decoding(0.05).with_decoding(0.1).decoding == pytest.approx(0.06)


def test_least_waiting_by_hand():
    """512 tokens of two prompts beside 8 sequences: with 256 rows 3 steps of 30 ms, with 64 rows 10 of 12 ms.

    Each prompt waits half of 90 or 120 ms, and output tokens of each sequence 60 or 20 ms.
    """
    demand = StepDemand(8, 2, 512, SIZES)
    assert LeastWaiting(12.0).size(demand, FLAT) == 256  # 12 x 90 + 8 x 60 < 12 x 120 + 8 x 20
    assert LeastWaiting(1.0).size(demand, FLAT) == 64
    more = dataclasses.replace(demand, decodes=12)
    assert LeastWaiting(12.0).size(more, FLAT) == 64  # 12 x 90 + 12 x 60 > 12 x 120 + 12 x 20
    assert LeastWaiting(20.0).size(more, FLAT) == 256


def test_the_least_waiting_is_that_of_steps_taken_one_by_one(rng):
    """Random times of programs, numbers of prompts and of sequences that decode."""
    for _ in range(200):
        seconds = dict(zip(SIZES, np.sort(rng.uniform(0.01, 0.2, 3)).tolist(), strict=True))
        alone = float(rng.uniform(0.005, 0.02))
        demand = StepDemand(int(rng.integers(1, 16)), int(rng.integers(1, 9)), int(rng.integers(1, 2000)), SIZES)
        split = LeastWaiting(float(rng.uniform(0.1, 30)))

        def waiting(
            size: int,
            seconds: dict[int, float] = seconds,
            alone: float = alone,
            demand: StepDemand = demand,
            weight: float = split.weight,
        ) -> float:
            left, clock, tokens_late = demand.tokens, 0.0, 0.0
            while left > 0:
                left -= size - demand.decodes
                clock += seconds[size]
                tokens_late += demand.decodes * max(0.0, seconds[size] - alone)
            return weight * demand.prompts * clock / 2 + tokens_late

        chosen = split.size(demand, times(seconds, alone))
        assert waiting(chosen) == pytest.approx(min(map(waiting, SIZES)))


def test_half_and_token_time():
    """Twice the 10 ms of decoding is more than 12 ms and less than 30; a line through the times for a target."""
    demand = StepDemand(4, 1, 100, SIZES)
    assert EvenShares().size(demand, FLAT) == 64
    assert EvenShares().size(demand, times({16: 0.03, 64: 0.04})) == 16
    line = times({16: 0.016, 64: 0.064}, None)
    assert TokenTime(0.07).size(demand, line) == 64
    assert TokenTime(0.001).size(demand, line) == 16


@pytest.mark.parametrize("text", ["nexu", "tpot", "half:2", "tpot:-1", "nexus:", "nexus:x", "whole:1", "tpot:inf"])
def test_splits_that_are_none_are_named(text: str):
    """A typo, a number that is missing, not one, or too many."""
    with pytest.raises(ConfigError, match="tpot:SECONDS, nexus, nexus:WEIGHT"):
        EngineConfig(phase_split=text)


def test_what_does_not_go_with_a_split():
    """Pools have no step with both phases, and batch-invariant engines one size of step."""
    assert phase_split("whole") is None
    assert phase_split("nexus:3") == LeastWaiting(3.0)
    with pytest.raises(ConfigError, match="phase_split = 'half'"):
        EngineConfig(pools="prefill=tensor:1 x1, decode=tensor:1 x1", phase_split="half")
    with pytest.raises(ConfigError, match="all steps have one size"):
        dataclasses.replace(engines.ENGINES["invariant"], phase_split="half")


class Smallest:
    """Split with the smallest steps."""

    def size(self, demand: StepDemand, times: StepTimes) -> int:
        return demand.sizes[0]


@pytest.mark.drawn(2)
def test_no_token_depends_on_the_split(rng):
    """Requests that come while others decode, with each split: its sizes of steps differ, the tokens do not."""
    config = dataclasses.replace(engines.ENGINES["roomy"], buckets=(6, 16), decode_steps=1, prefix_cache=False)
    engine = engines.build(config)
    asked = [
        {
            "prompt": rng.integers(0, engines.VOCAB, int(rng.integers(8, 30))).tolist(),
            "params": SamplingParams(max_tokens=9, temperature=0.0),
            "at": 3 * number,
        }
        for number in range(6)
    ]
    state, tokens, steps = engine.scheduler.policy_state, {}, {}
    for name, split in (("whole", None), ("small", Smallest()), ("nexus", LeastWaiting())):
        state.split, state.step_times = split, times({6: 0.1, 16: 0.2})
        engine.metrics.programs.clear()
        tokens[name] = [request.sequences[0].completion for request in engines.serve(engine, asked)]
        steps[name] = {program: found.passes for program, found in engine.metrics.programs.items()}
    assert tokens["small"] == tokens["nexus"] == tokens["whole"]
    assert steps["small"] != steps["whole"]
