"""Deployment search, long contexts and mixes of accelerators, beside brute force and the simulator."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from jaxllm import cli
from jaxllm.cli.serving_arguments import platforms_of
from jaxllm.plan.hardware import TABLE, Cluster
from jaxllm.simulate import DeploymentError, RequestTrace, ServiceObjective, TraceRequest, make_trace, simulate
from jaxllm.simulate.long_context import long_context
from jaxllm.simulate.search.accelerator_mix import buckets, capacities, cheapest_mix, replay, replayed_mix
from jaxllm.simulate.search.deployment_search import DeploymentSearchResult, alone, candidates, meshes, search, smallest
from jaxllm.simulate.steady_state import largest_rate, most_sequences, steady_state
from recipes.mixtral import mixtral_8x22b
from tests.simulate.served import MODEL, deployment

SLO = ServiceObjective(0.05, 0.002)


def made(trace, on="h100:1x4", **fields):
    return list(candidates(MODEL, Cluster.parse(on), trace, budgets=(64, 256), max_sequences=8, pages=400, **fields))


@pytest.mark.parametrize("goal", ["latency", "energy"])
def test_the_search_is_brute_force(goal):
    trace = make_trace("poisson:300", lengths="120/12", count=8)
    pruned, whole = (search(made(trace), trace, SLO, goal, prune=prune) for prune in (True, False))
    assert pruned.best is not None
    assert whole.best is not None
    assert pruned.best.value == whole.best.value == min(one.value for one in whole.simulated if one.meets)
    assert len(whole.simulated) == 12 > len(pruned.simulated) - (goal == "energy")


@pytest.mark.drawn(3)
def test_goodput_and_cost_are_judged_at_the_knee():
    """On one platform the deployment of the largest rate is that of the cheapest token; prices scale with the rate."""
    trace = make_trace("poisson:900", lengths="60/4", count=6)
    table = {"h100": dataclasses.replace(Cluster.parse("h100:1x1").hardware, dollars_per_hour=2.0)}
    ways = list(candidates(MODEL, Cluster.parse("h100:1x2", table), trace, budgets=(64,), max_sequences=8, pages=400))
    rated, priced = (search(ways, trace, SLO, goal) for goal in ("goodput", "cost"))
    assert rated.best is not None
    assert priced.best is not None
    assert rated.best.deployment == priced.best.deployment
    assert rated.best.value == -(rated.best.knee or 0) / 2 == min(one.value for one in rated.simulated)
    assert priced.best.value == pytest.approx(2 * 2.0 / 3600 / ((priced.best.knee or 0) * 4) * 1e6)
    assert (rated.best.knee or 0) >= trace.rate
    with pytest.raises(DeploymentError, match="h100 has no price"):
        search(made(trace)[:1], trace, SLO, "cost")


@pytest.mark.parametrize("prune", [True, False])
def test_what_fails_for_other_requests_is_not_recommended(prune):
    """Requests of the replay are longer than any deployment but the widest can serve in time."""
    trace = make_trace("poisson:300", lengths="60/12", count=8)
    longer = make_trace("poisson:300", lengths="400/12", count=8)
    ways = [one.sized(max_len=512) for one in made(trace) if one.engine.stages == 1]
    times = [float(np.percentile([r.ttft for r in simulate(one, longer).results], 90)) for one in ways]
    slo = ServiceObjective(min(times) * 1.001, 1.0, 0.8)
    found = search(ways, trace, slo, replay=longer, prune=prune)
    assert found.best is not None
    assert (found.best.replayed or 0) >= 0.8
    assert simulate(found.best.deployment, longer).within(slo) >= 0.8
    tight = ServiceObjective(min(times) / 2, 1.0, 0.8)
    assert search(ways, trace, tight, prune=prune).best is not None, "the trace itself meets it"
    failed = search(ways, trace, tight, replay=longer, prune=prune)
    assert failed.best is None
    assert any(one.replayed is not None and one.replayed < 0.8 for one in failed.simulated)


def test_platforms_of_a_kind_are_its_slices():
    table = {name: Cluster.parse(f"{name}:2x2x2" if name == "v4" else f"{name}:1x1").hardware for name in ("v4", "v5e")}
    assert [c.name for c in platforms_of("", table)][:3] == ["v4:2x2x2", "v4:2x2x4", "v5e:1x1"]
    assert [c.devices for c in platforms_of("h100,v5e:2x2", TABLE)] == [1, 2, 4, 8, 16, 4]


def test_nothing_is_faster_than_alone():
    trace = make_trace("poisson:300", lengths="alpaca", count=12)
    for one in made(trace)[:3]:
        found = simulate(one, trace)
        bounds = alone(one, trace)
        assert all(r.ttft >= b * (1 - 1e-9) for r, b in zip(found.results, bounds[:, 0], strict=True))
        assert all(r.tpot >= b * (1 - 1e-6) for r, b in zip(found.results, bounds[:, 1], strict=True) if r.tokens > 1)


def test_meshes_use_all_devices_in_legal_ways():
    stages = {"stage=2", "stage=4", "stage=2,tensor=2"}
    assert {str(mesh) for mesh in meshes(MODEL, 4)} == {"tensor=1", "tensor=2", "tensor=4", *stages}
    experts = {str(mesh) for mesh in meshes(mixtral_8x22b().model, 16)}
    assert "expert=8,tensor=2" in experts
    assert not any("expert=16" in mesh for mesh in experts), "there are eight experts"
    assert any("context" in str(mesh) for mesh in meshes(MODEL, 4, long=True))


def test_what_cannot_meet_the_objective_is_not_simulated():
    trace = make_trace("poisson:300", lengths="120/12", count=4)
    found = search(made(trace), trace, ServiceObjective(1e-6, 1e-6))
    assert found.best is None
    assert not found.simulated
    assert all("even alone, 0%" in reason for _, reason in found.refused)
    with pytest.raises(DeploymentError, match="no watts are known for v6e"):
        search(made(trace, "v6e:1x1"), trace, SLO, "energy")


def test_the_smallest_platform_is_the_cheapest_that_suffices():
    table = {name: dataclasses.replace(Cluster.parse(f"{name}:1x1").hardware, dollars_per_hour=price)
             for name, price in (("h100", 2.0), ("h200", 3.0))}  # fmt: skip
    clusters = [Cluster.parse(name, table) for name in ("h200:1x4", "h100:1x8", "h100:1x1")]
    best = search(made(trace := make_trace("poisson:9", lengths="20/4", count=2)), trace, SLO)
    enough = {"h200:1x4", "h100:1x8"}
    chosen, tried = smallest(clusters, lambda c: best if c.name in enough else DeploymentSearchResult())
    assert chosen is not None
    assert (chosen.name, [c.name for c, _ in tried]) == ("h200:1x4", ["h100:1x1", "h200:1x4"])


def test_users_are_those_that_the_page_allocator_admits():
    """Sixty pages of 16 tokens hold seven sequences of 128: seven run at a time, however many come."""
    one = deployment(pages=60, max_len=128, prefix_cache=False)
    found = long_context(one, 128)
    served = simulate(one, make_trace("closed:12", lengths="100/28", count=24))
    assert found.users == 7
    assert served.preemptions == 0 or max(len(s.chunks[0]) for s in served.engines[0]) > 7
    one_user = long_context(deployment(pages=None), 512)
    assert one_user.cache_bytes == 512 * one.step_model.token_bytes
    assert one_user.switch == pytest.approx(2 * one_user.cache_bytes / 64e9)
    twice = [long_context(deployment(pages=None), n) for n in (256, 512)]
    assert twice[0].users == pytest.approx(2 * twice[1].users, rel=0.01)
    assert twice[1].prefill > twice[0].prefill


def test_the_steady_state_is_that_of_a_long_simulation():
    """Batch by Little's law, TPOT and TTFT of equal requests that arrive at equal intervals."""
    one = deployment(max_sequences=16, decode_steps=1)
    rate = 0.6 * largest_rate(one, 100, 40, ServiceObjective(1.0, 1.0))
    expected = steady_state(one, 100, 40, rate)
    found = simulate(one, make_trace(f"uniform:{rate}", lengths="100/40", count=60))
    assert expected is not None
    assert expected.tpot == pytest.approx(float(np.median([r.tpot for r in found.results])), rel=0.25)
    assert steady_state(one, 100, 40, 1e6) is None
    assert most_sequences(one, 140) == 16


def brute_force(rates, capacity, prices, slices):
    """Least price over all assignments of slices."""
    kinds = range(len(prices))
    ways = [w for w in itertools.product(range(slices + 1), repeat=len(prices)) if sum(w) == slices]
    best = math.inf
    for rows in itertools.product(ways, repeat=len(rates)):
        if any(n and not capacity[b][k] for b, row in enumerate(rows) for k, n in enumerate(row)):
            continue
        load = [sum(row[k] * rates[b] / slices / capacity[b][k] for b, row in enumerate(rows) if row[k]) for k in kinds]
        best = min(best, sum(math.ceil(load[k] - 1e-9) * prices[k] for k in kinds))
    return best


def test_the_cheapest_mix_is_brute_forces(rng):
    for _ in range(5):
        capacity = rng.uniform(0.2, 4, (2, 3)) * (rng.random((2, 3)) > 0.2)
        capacity[:, 0] = np.maximum(capacity[:, 0], 0.1)
        rates, prices = rng.uniform(0.1, 5, 2), rng.integers(1, 9, 3)
        found = cheapest_mix(rates, capacity, prices, slices=3)
        assert found.dollars_per_hour == pytest.approx(brute_force(rates, capacity, prices, 3))
        one_kind = [math.ceil(sum(rates / capacity[:, k]) - 1e-9) * prices[k] for k in range(3) if capacity[:, k].all()]
        assert found.dollars_per_hour <= min(one_kind)


@pytest.mark.drawn(1)
def test_a_mix_serves_what_it_was_made_for():
    """Short and long requests: replayed in the simulator, the mix meets the objective that it was made for."""
    requests = [TraceRequest(n / 40, 16 if n % 4 else 400, 8) for n in range(40)]
    trace, slo = RequestTrace("two sizes", tuple(requests)), ServiceObjective(0.2, 0.02)
    table = {"h100": dataclasses.replace(Cluster.parse("h100:1x1").hardware, dollars_per_hour=2.0)}
    kinds = [dataclasses.replace(deployment(), cluster=Cluster.parse("h100:1x1", table))]
    histogram = buckets(trace)
    assert sum(len(one.members) for one in histogram) == 40
    assert len(histogram) == 2
    mix = cheapest_mix([one.rate for one in histogram], capacities(histogram, kinds, slo), [2.0])
    (served,) = replay(mix, histogram, kinds, trace)
    assert served is not None
    assert served.within(slo) >= slo.share
    found = replayed_mix(histogram, capacities(histogram, kinds, slo), kinds, trace, slo)
    assert (found.load, found.mix.counts, found.within) == (1.0, mix.counts, served.within(slo))
    # Capacities that no engine has are found out by the simulation, and the mix is planned for more load.
    busy, tight = trace.at_rate(40_000.0), ServiceObjective(0.001, 0.001)
    histogram = buckets(busy)
    again = replayed_mix(histogram, 8 * capacities(histogram, kinds, tight), kinds, busy, tight)
    assert again.load > 1
    assert again.within >= tight.share
    with pytest.raises(DeploymentError, match="no accelerator meets"):
        cheapest_mix([1.0], np.zeros((1, 1)), [1.0])
    with pytest.raises(DeploymentError, match="available"):
        cheapest_mix([9.0], np.ones((1, 1)), [1.0], available=[3])


@pytest.mark.drawn(1)
def test_the_command_plans(capsys):
    argv = ["plan", "quickstart", "--serve", "--on", "h100:2,h100:1", "--trace", "poisson:20", "--lengths", "60/8"]
    argv += ["--requests", "6", "--budgets", "256", "--price", "h100=2", "--users-at", "256"]
    assert cli.main(argv) == 0
    said = capsys.readouterr().out
    assert "smallest platform: h100:1x1" in said
    assert "256 tokens on" in said
    assert cli.main([*argv, "--mix"]) == 0
    assert "cheapest mix for poisson:20" in capsys.readouterr().out
    assert cli.main([*argv, "--slo", "ttft=1e-9"]) == 1
    assert "even alone, 0%" in capsys.readouterr().out
    no_platform = ["plan", "quickstart", "--serve", "--trace", "poisson:20", "--lengths", "60/8", "--requests", "4"]
    assert cli.main([*no_platform, "--goal", "goodput", "--budgets", "256"]) == 0
    said = capsys.readouterr().out
    assert "smallest platform: v5e:1x1" in said, "the cheapest of the table's list prices"
    assert "100% within for other requests, recommended" in said
    assert cli.main([*no_platform[:4], "closed:4"]) == 2
    assert "needs arrivals of a rate" in capsys.readouterr().err
