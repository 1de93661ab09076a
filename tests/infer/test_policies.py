"""Scheduling policies on views by hand; what they are worth under load is in tests/proofs/engine_two/policies.py."""

from __future__ import annotations

from typing import Any

from jaxllm.infer.engine.policies import Deadline, Job, Service, View


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
