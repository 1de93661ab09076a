"""Processor time of each test, a pytest plugin: the slowest are printed, and a run fails in which one takes too much.

Seconds of this process, all its threads, and of the child processes that ended meanwhile. How long these are depends on
the machine and on what else it does, by a factor of three; so the limit is a share of what all unit tests take, and
holds in runs of the whole suite. What a fixture of the session takes falls to the first test that asks for it. Samples
of proofs have a budget of their own, see `tests.proofs.sampling`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

LIMIT = 0.05
"""Largest share of the seconds of all unit tests that one may take: about 50 s of `make test` on two quick cores."""
WHOLE = 4_000
"""Tests of a run, skipped ones included, from which on it counts as one of the whole suite."""
SHOWN = 10

_NAME = "processor seconds"
_started = pytest.StashKey[float]()


def seconds() -> float:
    """Processor seconds of this process and its children that have ended."""
    return sum(os.times()[:4])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_started] = seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "teardown" and _started in item.stash:
        took = seconds() - item.stash[_started]
        report.user_properties.append((_NAME, took))  # reaches the process that prints
    return report


_took: dict[str, float] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        _took[report.nodeid] = dict(report.user_properties).get(_NAME, 0.0)


def unit_tests() -> dict[str, float]:
    """Seconds of each test that has ended and is no sample of a proof."""
    return {name: took for name, took in _took.items() if "test_sample.py" not in name}


def too_long(took: dict[str, float]) -> list[str]:
    """Unit tests that take more than their share, in a run of the whole suite."""
    most = LIMIT * sum(took.values())
    return [name for name, seconds in took.items() if seconds > most] if len(took) >= WHOLE else []


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == pytest.ExitCode.OK and too_long(unit_tests()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    unit = unit_tests()
    total = sum(unit.values())
    terminalreporter.write_sep("=", "processor time")
    terminalreporter.write_line(
        f"unit tests {total:.0f} s, samples of proofs {sum(_took.values()) - total:.0f} s; the slowest:"
    )
    for name in sorted(_took, key=_took.__getitem__, reverse=True)[:SHOWN]:
        terminalreporter.write_line(f"{_took[name]:7.1f} s  {name}")
    for name in too_long(unit):
        terminalreporter.write_line(f"TOO LONG: {name} takes more than {LIMIT:.0%} of all unit tests' seconds")
