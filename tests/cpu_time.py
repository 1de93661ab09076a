"""Processor time of each test, a pytest plugin: the slowest are printed, and a unit test of over a minute fails.

Of the processor, since that is the same beside other work: seconds of this process, all its threads, and of the child
processes that ended meanwhile. What a fixture of the session takes falls to the first test that asks for it. Samples of
proofs have a budget of their own, see `tests.proofs.sampling`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

LIMIT = 60.0
"""Most seconds of a unit test: `make test` has less than 15 minutes on two cores for more than 3,000 of them."""
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
        if report.passed and took > LIMIT and item.path.name != "test_sample.py":
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} took {took:.0f} seconds of the processor, more than {LIMIT:.0f}"
    return report


_took: dict[str, float] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        _took[report.nodeid] = dict(report.user_properties).get(_NAME, 0.0)


def pytest_terminal_summary(terminalreporter) -> None:
    samples = sum(took for name, took in _took.items() if "test_sample.py" in name)
    terminalreporter.write_sep("=", "processor time")
    terminalreporter.write_line(
        f"unit tests {sum(_took.values()) - samples:.0f} s, samples of proofs {samples:.0f} s; the slowest:"
    )
    for name in sorted(_took, key=_took.__getitem__, reverse=True)[:SHOWN]:
        terminalreporter.write_line(f"{_took[name]:7.1f} s  {name}")
