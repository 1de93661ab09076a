"""Formulas beside what compilers said, all of it stored: memory, order of layouts, published utilisations."""

from __future__ import annotations

import statistics

import pytest

from tests.proofs.plan import mfu, points, ranking
from tests.proofs.plan.hbm import predicted

STORED = points.stored()


def test_all_points_are_stored():
    assert len(set(STORED) & set(points.POINTS)) == len(STORED) == 30


@pytest.mark.parametrize("name", STORED)
def test_a_points_memory_ispredicted(name):
    said, found = STORED[name], predicted(name)
    assert found.total == pytest.approx(said.total, rel=0.10)
    if said.arguments is not None:
        assert found.arguments == pytest.approx(said.arguments, rel=1e-3)


def test_the_median_error_of_memory_is_small():
    errors = [abs(predicted(name).total / said.total - 1) for name, said in STORED.items()]
    assert statistics.median(errors) <= 0.05


def test_published_utilisations_are_predicted():
    found = mfu.published_mfu("all rows")
    assert found["median"] <= 0.20
    assert found["worst"] <= 0.35


def test_layouts_are_ranked_as_their_programs_are():
    stored = ranking.stored()
    if missing := sorted(set(ranking.LAYOUTS) - set(stored)):
        pytest.skip(f"not compiled yet: python -m tests.proofs.plan.ranking, {len(missing)} layouts")
    compiled = {name: said["seconds"] for name, said in stored.items()}
    formula = {name: ranking.predicted(name) for name in compiled}
    assert max(compiled.values()) >= 2 * min(compiled.values())
    assert ranking.kendall([(compiled[name], formula[name]) for name in compiled]) >= 0.8
    assert compiled[min(formula, key=lambda name: formula[name])] <= 1.05 * min(compiled.values())
