"""Remat solver against every assignment, on models whose programs are sums, and on ones whose programs are not."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxllm.data import DataConfig
from jaxllm.models.remat import RematError, policies_by_layer, save_policy, saved_values
from jaxllm.plan.remat_solver import (
    ALONE,
    LOOPS,
    NAMED,
    TRIES,
    LayerCost,
    StepBytes,
    format_policies,
    solve,
    solve_policies,
)
from jaxllm.train import RunConfig
from jaxllm.train.model_flops import recomputed_flops, train_flops_per_token
from tests import tiny

KEPT = {"full": 0, "attention": 70, "elementwise": 90, "none": 200}
BASE = 1000
NUMBERS = {"q": 32, "k": 16, "v": 16, "residual": 16, "gate": 32, "up": 32}
"""Per token, of what "attention" keeps: heads are 4 and 2 of 8, the stream has 16 numbers, the inner layer 32."""
SINGLE = {name: 70 * n / 144 for name, n in NUMBERS.items()} | {"attention": 20.0}


def config(layers: int, **fields) -> RunConfig:
    return RunConfig(model=tiny.decoder(layers=layers, **fields), data=DataConfig(seq_len=64))


def bytes_of_layer(policy: str) -> float:
    kept = saved_values(policy)
    return KEPT[policy] if kept is None else sum(SINGLE[name] for name in kept)


def bytes_of(run: RunConfig, remat: str, bend: float = 1.0, mixed: int = 0) -> int:
    """A program's bytes: a sum over layers, which a program may bend, and something for loops of several kinds."""
    layers = policies_by_layer(remat, run.model.segments)
    total = sum(bytes_of_layer(name) for name in layers)
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


def candidates(run: RunConfig) -> dict[str, tuple[float, float]]:
    """Bytes and FLOPs again of every policy of a layer but those than which another one has less of both."""
    sets = [save_policy(kept) for n in range(1, 8) for kept in itertools.combinations(SINGLE, n)]
    costs = {
        name: (bytes_of_layer(name), recomputed_flops(name, run.model, run.model.pattern, 64))
        for name in (*KEPT, *sets)
    }
    return {
        name: own
        for name, own in costs.items()
        if not any(other != own and other[0] <= own[0] and other[1] <= own[1] for other in costs.values())
    }


def least(run: RunConfig, budget: int, bend: float, mixed: int) -> float:
    """FLOPs of the cheapest of all assignments of at most three policies that fit."""
    layers, found = run.model.layers, float("inf")
    ways = np.array([way for way in itertools.product(range(layers + 1), repeat=LOOPS) if sum(way) == layers])
    for some in itertools.combinations(candidates(run).values(), LOOPS):
        sizes, again = (ways @ np.array(some)).T
        fits = np.round(BASE + sizes**bend + mixed * (ways.max(axis=1) < layers)) <= budget
        found = min(found, again[fits].min(initial=np.inf))
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
    assert len(asked) == len(set(asked)) <= len(NAMED) + ALONE + TRIES


@pytest.mark.parametrize("budget", [1300, 1450, 1700, 1900])
def test_a_third_loop_that_takes_much_is_left_out(budget):
    """Programs of three policies take 500 more than their parts, those of two nothing."""
    run = config(12)

    def measure(remat: str) -> StepBytes:
        policies = set(policies_by_layer(remat, run.model.segments))
        return StepBytes(bytes_of(run, remat) + 500 * (len(policies) > 2))

    solved = solve(run, budget, measure)
    found = float("inf")
    for (size, again), (other, rest) in itertools.combinations(candidates(run).values(), 2):
        counts = np.arange(13)
        fits = BASE + counts * size + (12 - counts) * other <= budget
        found = min(found, (counts * again + (12 - counts) * rest)[fits].min(initial=np.inf))
    assert solved.flops <= 1.002 * (train_flops_per_token(run.model, 64) + found)


def test_a_budget_below_the_least_is_refused():
    run = config(4)
    with pytest.raises(RematError, match="with every block computed again a step takes"):
        solve(run, BASE - 1, lambda remat: StepBytes(bytes_of(run, remat)))


def test_a_set_for_all_layers_is_there_where_mixtures_take_much_more():
    """Each further loop of a program takes more than all that the layers keep."""
    run, budget = config(12), BASE + 12 * 60
    measure = lambda remat: StepBytes(bytes_of(run, remat, mixed=2000))  # noqa: E731
    solved = solve(run, budget, measure)
    again = [cost for size, cost in candidates(run).values() if 12 * size <= budget - BASE]
    assert solved.remat.startswith("save:")
    assert solved.flops == pytest.approx(train_flops_per_token(run.model, 64) + 12 * min(again))


def test_what_a_set_for_all_layers_takes_less_is_learnt():
    """Programs with sets of values take 90 less than the named policies say, and each further loop more than all."""
    run, budget, less = config(12), BASE + 12 * 60, 90

    def measure(remat: str) -> StepBytes:
        return StepBytes(bytes_of(run, remat, mixed=2000) - less * remat.startswith("save:"))

    def least(room: int) -> float:
        return 12 * min(again for size, again in candidates(run).values() if 12 * size <= room)

    solved = solve(run, budget, measure)
    assert least(budget - BASE + less) < least(budget - BASE), "a set that seems too large fits"
    assert solved.flops == pytest.approx(train_flops_per_token(run.model, 64) + least(budget - BASE + less))
