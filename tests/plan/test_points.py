"""Formulas against stored compiler figures: memory, order of layouts, published MFU."""

from __future__ import annotations

import statistics

import pytest

from tests.proofs.plan import mfu, points, ranking, unseen
from tests.proofs.plan.points import predicted

STORED = points.stored()


def test_all_points_are_stored():
    assert len(set(STORED) & set(points.POINTS)) == len(STORED) == 30


@pytest.mark.parametrize("name", STORED)
def test_a_points_memory_is_predicted(name):
    said, found = STORED[name], predicted(name)
    assert found.total == pytest.approx(said.total, rel=0.10)
    assert found.arguments == pytest.approx(said.arguments, rel=1e-3)


def test_the_page_has_the_points():
    page = points.PAGE.read_text()
    assert page == points.with_table(page), "docs/train/plan.md is stale: python -m tests.proofs.plan.points table"


def test_the_median_error_of_memory_is_small():
    errors = [abs(predicted(name).total / said.total - 1) for name, said in STORED.items()]
    assert statistics.median(errors) <= 0.05


def test_published_utilisations_are_predicted():
    found = mfu.published_mfu("all rows")
    assert found["median"] <= 0.20
    assert found["worst"] <= 0.35


@pytest.mark.parametrize("name", unseen.RUNS)
def test_the_time_of_a_run_that_nothing_was_fitted_to_is_predicted(name):
    assert unseen.predicted(name) == pytest.approx(unseen.stored()[name]["seconds"], rel=0.15)


def test_the_order_of_layouts_is_held_to_its_bounds():
    """The bounds themselves: what a wrong order would do to them."""
    right = [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]
    assert ranking.kendall(right) == 1
    assert ranking.kendall([(a, -b) for a, b in right]) == -1
    assert ranking.kendall([(1.0, 1.0), (2.0, 3.0), (3.0, 2.0)]) == pytest.approx(1 / 3)
