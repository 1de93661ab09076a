"""Scheduling policies on views by hand; what they are worth under load is in tests/proofs/engine_two/policies.py."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.infer.scheduling.policies import (
    Deadline,
    Fair,
    FirstCome,
    Grouped,
    Job,
    LengthPredictor,
    Packed,
    Priority,
    Service,
    Shortest,
    View,
    raise_new_key,
    revise_prediction,
)
from jaxllm.infer.scheduling.prefix_groups import prefix_groups
from jaxllm.infer.scheduling.step_times import StepTimes


def job(number: int, arrived: float, ttft: float | None, prompt: int = 10, **fields: Any) -> Job:
    return Job(number, arrived, list(range(prompt)), service=Service(ttft=ttft), **fields)


def test_deadlines_come_before_arrival():
    """Later arrivals with earlier deadlines are first; equal deadlines are served as they came."""
    jobs = [job(0, 0.0, 9.0), job(1, 1.0, 2.0), job(2, 2.0, 4.0), job(3, 3.0, 3.0)]
    assert Deadline().order(View(3.0, jobs)) == [1, 2, 3, 0]


def test_deadlines_that_cannot_be_met_wait():
    """At 1 s, with 0.1 s a prompt token: 20 tokens are not there by 2.7 s, 10 are, and cached ones need no time."""
    late = job(0, 0.0, 2.5, prompt=20)
    others = [job(1, 0.1, 2.5, prompt=10), job(2, 0.2, 2.5, prompt=20, computed=10)]
    assert Deadline().order(View(1.0, [late, *others], token_seconds=0.1)) == [1, 2, 0]
    assert Deadline().order(View(1.0, [late, *others], token_seconds=0.0)) == [0, 1, 2]
    begun, ahead = job(0, 0.0, 2.5, prompt=20, generated=1), job(3, 0.3, 20.0)
    assert Deadline().order(View(9.0, [begun, ahead], token_seconds=0.1)) == [0, 3], "its first token was in time"


def test_patience_is_the_deadline_of_requests_without_one():
    jobs = [job(0, 0.0, None), job(1, 1.0, 20.0), job(2, 2.0, 40.0)]
    assert Deadline(patience=30.0).order(View(2.0, jobs)) == [1, 0, 2]
    assert Deadline(patience=10.0).order(View(2.0, jobs)) == [0, 1, 2]


def test_priorities_rise_with_waiting():
    """A level of priority is worth 10 s of waiting: at 20 s, the job of level 0 has waited for two levels."""
    levels = [
        Job(n, arrived, [1], service=Service(priority=level))
        for n, arrived, level in ((0, 0, 0), (1, 19, 1), (2, 19, 3))
    ]
    assert Priority(age=10.0).order(View(20.0, levels)) == [2, 0, 1]
    assert Priority(age=100.0).order(View(20.0, levels)) == [2, 1, 0]
    assert FirstCome().order(View(20.0, levels[::-1])) == [0, 1, 2]


def test_the_key_that_was_served_least_is_next():
    """Prompts that are about to be served count at once; running jobs have been charged already."""
    jobs = [Job(n, 0.0, list(range(10)), service=Service(key=key)) for n, key in enumerate("aaabb")]
    assert Fair().order(View(0.0, jobs, served={"a": 0.0, "b": 5.0})) == [0, 3, 1, 4, 2]
    assert Fair().order(View(0.0, jobs, served={"a": 100.0})) == [3, 4, 0, 1, 2]
    running = [Job(5, 0.0, list(range(50)), running=True, service=Service(key="b")), *jobs]
    assert Fair().order(View(0.0, running, served={"a": 6.0, "b": 5.0})) == [5, 3, 0, 4, 1, 2]
    half = [Job(0, 0.0, list(range(10)), computed=8, service=Service(key="a")), *jobs[1:]]
    assert Fair().order(View(0.0, half, served={"b": 3.0})) == [0, 1, 3, 2, 4]


def test_a_new_key_begins_at_the_least_of_the_active_ones():
    assert raise_new_key({"a": 7.0, "b": 3.0, "c": 1.0}, "c", ["a", "b"]) == {"a": 7.0, "b": 3.0, "c": 3.0}
    assert raise_new_key({"a": 7.0, "c": 9.0}, "c", ["a"])["c"] == 9.0
    assert raise_new_key({}, "c", [])["c"] == 0.0


def test_the_shortest_remaining_work_is_first():
    """Remaining prompt and predicted tokens, less 2 tokens for each second of waiting."""
    jobs = [
        Job(0, 0.0, [1] * 30, predicted=10.0),
        Job(1, 0.0, [1] * 30, computed=25, predicted=20.0),
        Job(2, 0.0, [1] * 4, computed=4, generated=9, predicted=10.0),
    ]
    assert Shortest(patience=2.0).order(View(0.0, jobs)) == [2, 1, 0]
    late = Job(3, -30.0, [1] * 30, predicted=31.0)
    assert Shortest(patience=2.0).order(View(0.0, [*jobs, late])) == [2, 3, 1, 0]
    assert [revise_prediction(10.0, n) for n in (0, 9, 10, 19, 20, 45)] == [10, 10, 20, 20, 40, 80]


def test_predictions_are_the_mean_of_completions_of_such_prompts():
    """One completion of 64 tokens counts beforehand; prompts of 16 to 31 tokens are alike."""
    found = LengthPredictor().with_completion(16, 10).with_completion(31, 22)
    assert found.predict(20, 1000) == (64 + 10 + 22) / 3
    assert found.predict(32, 1000) == 64
    assert found.predict(20, 30) == 30


def test_step_times_are_a_line(rng):
    """Steps of 3 ms and 0.5 ms a token: the line is found, and how many tokens fit into a time."""
    times = StepTimes()
    assert times.tokens_within(1.0, 1, 99) == 99
    for tokens in rng.integers(1, 100, 30).tolist():
        times = times.with_step(tokens, 3e-3 + 5e-4 * tokens)
    assert times.line == (pytest.approx(3e-3, rel=1e-6), pytest.approx(5e-4, rel=1e-6))
    assert times.tokens_within(0.013 + 1e-6, 1, 99) == 20
    assert times.tokens_within(1e-3, 4, 99) == 4
    assert times.tokens_within(1.0, 4, 99) == 99


def paged(number: int, text: str, predicted: float = 1.0, **fields: Any) -> Job:
    """Job whose prompt has a page for each letter."""
    digests = [text[: end + 1].encode() for end in range(len(text))]
    return Job(number, 0.0, [0] * len(text), predicted=predicted, pages=digests, **fields)


def grouped(jobs: list[Job], policy: Grouped | None = None) -> list[int]:
    return (policy or Grouped()).order(View(0.0, jobs, groups=prefix_groups({job.id: job.pages for job in jobs})))


def test_groups_are_of_the_prefixes_that_save_the_most():
    """Instructions "a" before two documents: a prefix of three pages for each saves 2 x 3, "a" for all four only 3."""
    prompts = {0: "abc1", 1: "ade1", 2: "abc2", 3: "ade2", 4: "q", 5: "az"}
    rows = {one: [text[: end + 1].encode() for end in range(len(text))] for one, text in prompts.items()}
    found = {group.members: group.pages for group in prefix_groups(rows)}
    assert found == {(0, 2): 3, (1, 3): 3, (4,): 0, (5,): 1}
    assert prefix_groups({}) == []


def test_groups_that_generate_much_come_first():
    """A group whose prompts are short beside their completions is first; begun ones are before all others."""
    light = [paged(n, f"abc{n}", predicted=2.0) for n in (0, 2)]
    heavy = [paged(n, f"ade{n}", predicted=9.0) for n in (1, 3)]
    assert grouped([*light, *heavy])[0] == 1
    assert grouped([paged(0, "abc0", predicted=2.0, running=True, computed=4), light[1], *heavy])[:2] == [0, 2]


def test_what_a_running_job_computes_is_waited_for():
    """Only pages that both have, and that are not computed yet, are waited for."""
    first = paged(0, "abcd", running=True, computed=1)
    later = [paged(1, "abce"), paged(2, "axyz")]
    assert grouped([first, *later]) == [0, 2]
    assert grouped([paged(0, "abcd", running=True, computed=3), *later]) == [0, 1, 2]
    assert grouped([paged(0, "abcd"), paged(1, "abce")]) == [0], "the second waits for the first to be admitted"


def test_the_largest_job_that_fits_is_admitted_first():
    """Room for 10 pages of 4: 24 + 4 tokens take 7, then 8 + 4 take 3; 20 + 4 are passed, until they have waited."""
    jobs = [Job(n, 0.0, [0] * prompt, predicted=4.0) for n, prompt in enumerate((20, 8, 24))]
    assert Packed(patience=30.0).order(View(1.0, jobs, page_size=4, room=10)) == [2, 1]
    assert Packed(patience=30.0).order(View(31.0, jobs, page_size=4, room=10)) == [0, 1]
    assert Packed(patience=30.0).order(View(31.0, jobs, page_size=4, room=8)) == [0], "nothing passes the second"
    assert Packed().order(View(1.0, jobs, page_size=4, room=0)) == [2], "one runs, whatever was predicted"
    stopped = Job(3, 0.0, [0] * 24, predicted=4.0, generated=5)
    assert Packed().order(View(1.0, [*jobs, stopped], page_size=4, room=12)) == [3, 1], "its prediction is doubled"
