"""Formulas against stored compiler figures: memory, order of layouts, published MFU."""

from __future__ import annotations

import json
import statistics

import pytest

from benchmarks.memory.recipe_plans import RESULTS, UNITS, problems
from jaxllm.cli.memory_budget import with_remat
from jaxllm.plan.formulas.memory_estimate import predict
from jaxllm.train.run import fitting_mesh
from jaxllm.train.run_model import run_model
from sharding.topology import Topology
from tests.proofs.plan import mfu, mixed_ranking, points, ranking, unseen
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
    stale = "docs/train/plan.md is stale: python -m tests.proofs.plan.mixed_ranking table"
    assert page == mixed_ranking.with_table(page), stale


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


@pytest.mark.parametrize("on", mixed_ranking.PROGRAMS)
def test_the_memory_of_layouts_by_layer_is_predicted(on):
    assert set(mixed_ranking.stored(on)) == set(mixed_ranking.PROGRAMS[on])
    found = mixed_ranking.order(on)
    assert found["median memory"] <= 0.10
    assert found["worst memory"] <= 0.20


def test_the_order_of_layouts_is_held_to_its_bounds():
    """The bounds themselves: what a wrong order would do to them."""
    right = [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]
    assert ranking.kendall(right) == 1
    assert ranking.kendall([(a, -b) for a, b in right]) == -1
    assert ranking.kendall([(1.0, 1.0), (2.0, 3.0), (3.0, 2.0)]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("unit", UNITS, ids=[one.name for one in UNITS])
def test_recipes_under_memory_limits_take_what_was_compiled(unit):
    """Compiled bytes of docs/train/recipe_plans.json. No number was fitted to them; that one device has one micro-batch
    at once was found with them.
    """
    run, topology = unit.run(), Topology.parse(unit.on)
    mesh = fitting_mesh(run, run_model(run), topology.num_devices, topology.platform)
    compiled = json.loads(RESULTS.read_text())[unit.name]["compiled"]
    for remat in ("full", "elementwise"):
        found = predict(with_remat(run, remat), mesh, topology)
        # A v5e has half of a v6e's memory: of this program, which exceeds it, its compiler keeps 6 GiB less.
        less = (unit.name, remat) == ("qwen3_30b_a3b v5e:8x8 fit", "elementwise")
        assert found.total == pytest.approx(compiled[remat], rel=0.30 if less else 0.17), remat


def test_what_a_plan_may_leave_of_its_limit():
    """5% where something is computed again, or less than what faster mixtures took beyond the sum of their parts."""
    again = {"full": 3.0, "a": 2.0, "none": 0.0, "full=1,a=1": 2.5, "a=1,none=1": 1.0}
    plan = {"budget": 100, "predicted": {}, "recomputed": again}
    sizes = {"full": 50, "a": 90, "none": 150}
    few, more = {"full=1,a=1": 85, "a=1,none=1": 122}, {"full=1,a=1": 70, "a=1,none=1": 126}
    assert problems(plan | {"chosen": "a", "compiled": sizes | few}) == ["a uses 0.900 of the limit"]
    assert problems(plan | {"chosen": "a", "compiled": sizes | more}) == []
    assert problems(plan | {"chosen": "a", "compiled": sizes | {"a": 96}}) == []
    assert problems(plan | {"chosen": "a", "compiled": sizes | {"a": 101}}) == ["a takes 101 bytes of 100"]
    assert problems(plan | {"chosen": "full", "compiled": sizes | {"a": 96}}) == [
        "full uses 0.500 of the limit",
        "a fits and recomputes no more than full",
    ]
    assert problems(plan | {"chosen": "none", "compiled": sizes | {"none": 60}}) == []
    nothing = problems(plan | {"chosen": "", "compiled": dict.fromkeys(("full", "attention", "elementwise"), 200)})
    assert nothing == ["none fits or was not compiled, and nothing was chosen"]
