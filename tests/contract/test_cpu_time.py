"""The share of a run's processor time that one unit test may take."""

from __future__ import annotations

from tests import cpu_time


def test_a_test_that_takes_more_than_its_share_is_named():
    took = {f"test_{number}": 0.5 for number in range(cpu_time.WHOLE)}
    total = sum(took.values())
    assert cpu_time.too_long(took) == []
    slow = cpu_time.LIMIT * total / (1 - cpu_time.LIMIT)  # which is just the share of what all take with it
    assert cpu_time.too_long(took | {"test_slow": 0.99 * slow}) == []
    assert cpu_time.too_long(took | {"test_slow": 1.01 * slow}) == ["test_slow"]


def test_a_run_of_some_tests_has_no_limit():
    assert cpu_time.too_long({"test_one": 1.0, "test_slow": 100.0}) == []
