"""Remat solver against every assignment, on models whose programs are sums, and on ones whose programs are not."""

from __future__ import annotations

import itertools

import pytest

from jaxllm.data import DataConfig
from jaxllm.models.remat import RematError, policies_by_layer
from jaxllm.plan.remat_solver import LOOPS, NAMED, LayerCost, StepBytes, format_policies, solve, solve_policies
from jaxllm.train import RunConfig
from jaxllm.train.model_flops import recomputed_flops, train_flops_per_token
from tests import tiny

KEPT = {"full": 0, "attention": 70, "elementwise": 90, "none": 200}
BASE = 1000
VALUE = {"qkv": 70 * 64 / 144, "attention": 20.0, "residual": 70 * 16 / 144, "inner": 70 * 64 / 144}
"""Bytes of a layer's values: those that "attention" keeps have 8 (4 + 2 2), 16 and 2 32 numbers per token."""
SETS = {"save:" + "+".join(kept): sum(map(VALUE.__getitem__, kept)) for n in (1, 2, 3)
        for kept in itertools.combinations(VALUE, n) if kept != ("qkv", "residual", "inner")}  # fmt: skip
ALL = KEPT | SETS


def config(layers: int, **fields) -> RunConfig:
    return RunConfig(model=tiny.decoder(layers=layers, **fields), data=DataConfig(seq_len=64))


def bytes_of(run: RunConfig, remat: str, bend: float = 1.0, mixed: int = 0) -> int:
    """A program's bytes: a sum over layers, which a program may bend, and something for loops of several kinds."""
    layers = policies_by_layer(remat, run.model.segments)
    total = sum(ALL[name] for name in layers)
    return round(BASE + total**bend + (mixed if len(set(layers)) > 1 else 0))


@pytest.mark.parametrize("room", [0, 69, 70, 333, 500, 779, 780, 1000, 1999, 2000])
def test_nothing_is_cheaper_in_the_room(room):
    run = config(6)
    costs = {name: [recomputed_flops(name, run.model, run.model.pattern, 64)] for name in NAMED}
    counts = solve_policies(run.model, {name: LayerCost(KEPT[name], 0, costs[name]) for name in NAMED}, room)
    assert counts is not None
    found = sum(n * costs[name][0] for name, n in counts[0])
    legal = [
        sum(costs[name][0] for name in names)
        for names in itertools.combinations_with_replacement(NAMED, 6)
        if sum(KEPT[name] for name in names) <= room and len(set(names)) <= LOOPS
    ]
    assert found == pytest.approx(min(legal))
    assert sum(n * KEPT[name] for name, n in counts[0]) <= room
    assert len(policies_by_layer(format_policies(run.model, counts), run.model.segments)) == 6


def test_nothing_fits_into_less_than_nothing():
    run = config(4)
    assert solve_policies(run.model, {name: LayerCost(KEPT[name], 0, [0.0]) for name in NAMED}, -1) is None


def least(run: RunConfig, budget: int, bend: float, mixed: int) -> float:
    """FLOPs of the cheapest of all assignments of at most three policies that fit."""
    layers, found = run.model.layers, float("inf")
    again = {name: recomputed_flops(name, run.model, run.model.pattern, 64) for name in ALL}
    ways = [counts for counts in itertools.product(range(layers + 1), repeat=LOOPS) if sum(counts) == layers]
    for names in itertools.combinations(ALL, LOOPS):
        for counts in ways:
            total = sum(ALL[name] * n for name, n in zip(names, counts, strict=True))
            if round(BASE + total**bend + (mixed if max(counts) < layers else 0)) <= budget:
                found = min(found, sum(again[name] * n for name, n in zip(names, counts, strict=True)))
    return train_flops_per_token(run.model, 64) + found


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("budget", [1100, 1300, 1450, 1700, 2200])
@pytest.mark.parametrize(("bend", "mixed"), [(1.0, 0), (1.0, 60), (0.98, -40)])
def test_what_programs_add_is_learnt(budget, bend, mixed):
    run = config(12)
    asked: list[str] = []

    def measure(remat: str) -> StepBytes:
        asked.append(remat)
        return StepBytes(bytes_of(run, remat, bend, mixed))

    solved = solve(run, budget, measure)
    assert solved.bytes == bytes_of(run, solved.remat, bend, mixed) <= budget
    fits = [one.flops for one in solved.named.values() if one.bytes <= budget]
    assert solved.flops <= min(fits)
    assert solved.flops <= 1.02 * least(run, budget, bend, mixed)
    assert len(asked) == len(set(asked)) <= len(NAMED) + 5


def test_a_budget_below_the_least_is_refused():
    run = config(4)
    with pytest.raises(RematError, match="with every block computed again a step takes"):
        solve(run, BASE - 1, lambda remat: StepBytes(bytes_of(run, remat)))
