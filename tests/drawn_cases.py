"""Matrices of tests of which each run draws some cases, a pytest plugin: ``@pytest.mark.drawn(0.3)``.

For tests whose cases are many and costly, and say the same of one code: a model family each, a mesh each, a kernel's
shapes. The seed, another with every commit, draws the given share of a test's cases, which may be none of few; a test
without parameters is itself drawn or not. All shares are multiplied by `OF_SHARES`, the one number that sets the time
of the whole suite; a share above 1 is of tests that are to be in more runs than that. `make test ALL=1` runs all cases,
as does naming a folder, a file or a test.

    JAXLLM_ALL_CASES    1: run all, as `--all-cases`
"""

from __future__ import annotations

import os
import random

import pytest

from tests import environment

OF_SHARES = 0.12
"""Part of each marked share that runs: `make test` has 15 minutes on two cores, however many tests there are."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "drawn(share): each run draws so many of the test's cases by the seed")
    named = config.args_source is config.ArgsSource.ARGS
    if config.getoption("--all-cases") or config.getoption("-k") or named:
        os.environ["JAXLLM_ALL_CASES"] = "1"  # reaches xdist's workers


def left_out(cases: dict[str, list[str]], shares: dict[str, float], seed: int) -> set[str]:
    """Ids of the cases that the seed leaves out.

    Args:
        cases: test -> ids of its cases.
        shares: test -> share of its cases that runs.
    """
    left: set[str] = set()
    for test, ids in cases.items():
        draw = random.Random(environment.derive(seed, "drawn", test))
        run = int(shares[test] * len(ids) + draw.random())
        left |= set(ids) - set(draw.sample(ids, run))
    return left


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("JAXLLM_ALL_CASES") == "1":
        return
    cases: dict[str, list[str]] = {}
    shares: dict[str, float] = {}
    for item in items:
        if mark := item.get_closest_marker("drawn"):
            test = item.nodeid.split("[")[0]
            cases.setdefault(test, []).append(item.nodeid)
            (share,) = mark.args
            shares[test] = OF_SHARES * share
    left = left_out(cases, shares, environment.seed())
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
        items[:] = [item for item in items if item.nodeid not in left]
