"""Fleets of replicas that fail and whose number follows the load: brute force, conservation, availability, limits."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from jaxllm.simulate import Deployment, RequestTrace, ServiceObjective, TraceRequest, make_trace, simulate
from jaxllm.simulate.fleet.autoscaler import AutoscalePolicy
from jaxllm.simulate.fleet.fleet_simulator import PAID, simulate_fleet
from jaxllm.simulate.fleet.replica_failures import ReplicaFailures
from jaxllm.simulate.routing import ROUTERS, RoundRobin, ShortestQueue
from tests.proofs.harness import proof
from tests.simulate.fleet_ticks import TICK, ListedFailures, TickRequest, TickScaler, run_ticks
from tests.simulate.served import deployment, seconds

STEP = 8
"""Ticks of a step of the brute force."""


def engines(number: int, **sizes: Any) -> Deployment:
    """So many engines of the tiny model, each on one device."""
    return replace(deployment(**sizes), copies=number)


def drawn_fleet(seed: int) -> tuple[ReplicaFailures, AutoscalePolicy, RequestTrace]:
    """Failures, an autoscaler and a trace of the tiny model, whose requests take a few milliseconds."""
    rng = np.random.default_rng(seed)
    failures = ReplicaFailures(
        float(rng.uniform(0.005, 0.05)), float(rng.uniform(0.002, 0.02)), ("fail", "retry", "migrate")[seed % 3],
        int(rng.integers(0, 4)), seed,
    )  # fmt: skip
    least = int(rng.integers(1, 3))
    autoscale = AutoscalePolicy(
        least, int(rng.integers(2, 7)), float(rng.uniform(1, 8)), ("requests", "queue")[int(rng.integers(2))],
        period=float(rng.uniform(0.001, 0.005)), down=float(rng.uniform(0, 0.01)), start=float(rng.uniform(0, 0.01)),
    )  # fmt: skip
    kind = (f"poisson:{rng.uniform(300, 3000)}", f"closed:{rng.integers(2, 20)}")[int(rng.integers(2))]
    trace = make_trace(
        kind, lengths=f"{rng.integers(1, 200)}/{rng.integers(1, 30)}", count=40, seed=seed, prefixes=2,
        prefix_tokens=24 * int(rng.integers(2)),
    )  # fmt: skip
    return failures, autoscale, trace


@proof("simulation", count=200, sample=2)
def fleets_are_brute_forces(seed: int) -> None:
    """Replicas of one slot with steps of a constant time, beside a simulation tick by tick: all drawn.

    Equal are the time of every token and of every end, which requests failed, how often they were sent again, and the
    time and tokens of every prefill, those of tokens that were delivered before included.
    """
    rng = np.random.default_rng(seed)
    count = int(rng.integers(5, 30))
    at = np.sort(rng.integers(0, int(rng.integers(100, 1500)), count)).tolist()
    tokens = rng.integers(1, 6, count).tolist()
    replicas, scaled = int(rng.integers(1, 5)), bool(rng.integers(3))
    listed = {n: [(int(a), int(b)) for a, b in rng.integers(1, 200, (int(rng.integers(0, 5)), 2))] for n in range(12)}
    failures = ListedFailures(1.0, 1.0, ("fail", "retry", "migrate")[seed % 3], int(rng.integers(0, 4)), listed=listed)
    limits = (int(rng.integers(1, replicas + 1)), int(rng.integers(replicas, 7)))
    period, up, down, start = (int(n) for n in rng.integers((8, 0, 0, 0), (64, 100, 200, 80)))
    target, down = int(rng.integers(1, 16)), down * int(rng.integers(2))
    scaler = autoscale = None
    if scaled:
        scaler = TickScaler(*limits, Fraction(target, 4), period, up, down, Fraction(1, 8), start)
        autoscale = AutoscalePolicy(
            *limits, target / 4, period=period * TICK, up=up * TICK, down=down * TICK, tolerance=1 / 8,
            start=start * TICK, load=math.inf,
        )  # fmt: skip
    expected = [TickRequest(*one) for one in zip(at, tokens, strict=True)]
    in_turn = bool(rng.integers(2))
    fleet = run_ticks(expected, replicas, STEP, failures, scaler, in_turn)
    trace = RequestTrace("drawn", tuple(TraceRequest(a * TICK, 4, n) for a, n in zip(at, tokens, strict=True)))
    found = simulate_fleet(
        engines(replicas, max_sequences=1, prefix_cache=False), trace, failures=failures,
        autoscale=autoscale, router=RoundRobin() if in_turn else ShortestQueue(), clock=seconds(STEP * TICK),
    )  # fmt: skip
    for one, wanted in zip(found.results, expected, strict=True):
        assert one.chunks == [n * TICK for n in wanted.delivered]
        assert (one.end, bool(one.error)) == (wanted.end * TICK, wanted.failed)
    prefills = [
        (s.start, c) for own in found.engines for s in own for p, c in s.chunks[0] if p == 0 and s.start < found.end
    ]
    assert sorted(prefills) == sorted((at * TICK, 4 + n) for one in expected for at, n in one.prefills)
    assert found.resent == sum(one.tries for one in expected)
    assert len(found.engines) >= len(fleet)
    ends = max(one.end for one in found.results)
    if scaled:
        for time, counts in found.timeline:
            if time <= ends:
                assert limits[0] <= counts["starting"] + counts["ready"] + counts["failed"] <= limits[1]


@proof("simulation", count=60, sample=2)
def requests_end_exactly_once(seed: int) -> None:
    """Drawn failures, autoscalers, routers and traces: each request is served with all of its tokens, or fails.

    No token is delivered twice or after the end; a served request has no error; a replica computes nothing while it is
    not ready; live replicas are within the limits at all times; the hours paid are those of the replicas' lives.
    """
    failures, autoscale, trace = drawn_fleet(seed)
    router = ROUTERS[sorted(ROUTERS)[seed % len(ROUTERS)]]()
    served = engines(autoscale.min, max_sequences=int(1 + seed % 12))
    scaled = autoscale if autoscale.max >= autoscale.min and seed % 4 else None
    found = simulate_fleet(served, trace, failures=failures, autoscale=scaled, router=router)
    for one, asked in zip(found.requests, trace.requests, strict=True):
        result = one.result
        assert result.end >= result.sent >= 0
        assert result.chunks == sorted(result.chunks)
        assert all(result.sent <= at <= result.end for at in result.chunks)
        assert len(one.delivered) == len(result.chunks)
        assert result.tokens == (one.delivered[-1] if one.delivered else 0)
        assert one.delivered == sorted(set(one.delivered))
        assert bool(result.error) == (result.tokens < asked.tokens)
        assert result.tokens <= asked.tokens
        if failures.requests == "migrate" and result.error:
            assert "more often" in result.error
    assert len(found.requests) == len(trace.requests)
    if scaled is not None:
        for _, counts in found.timeline:
            live = counts["starting"] + counts["ready"] + counts["failed"]
            assert scaled.min <= live <= scaled.max
    assert found.replica_seconds(*PAID) <= found.seconds * max(sum(counts.values()) for _, counts in found.timeline)
    busy = sum(step.cost.seconds for own in found.engines for step in own if step.start < found.end)
    slack = sum(own[-1].cost.seconds for own in found.engines if own)
    assert busy <= found.replica_seconds("ready", "draining") * (1 + 1e-9) + slack


@proof("simulation", count=30, sample=1)
def quiet_fleets_are_the_simulator(seed: int) -> None:
    """Without failures, and with as many replicas at least as at most: all of ``simulate``, to the bit."""
    _, drawn, trace = drawn_fleet(seed)
    replicas = 1 + seed % 4
    served = engines(replicas, max_sequences=1 + seed % 9)
    names = sorted(ROUTERS)
    plain = simulate(served, trace, router=ROUTERS[names[seed % len(names)]]())
    fixed = AutoscalePolicy(replicas, replicas, drawn.target, drawn.metric, drawn.period)
    never = ReplicaFailures(math.inf, 1.0)
    for failures, autoscale in ((None, None), (None, fixed), (never, None), (never, fixed)):
        router = ROUTERS[names[seed % len(names)]]()
        found = simulate_fleet(served, trace, failures=failures, autoscale=autoscale, router=router)
        assert found.requests == plain.requests
        assert found.engines == plain.engines
        assert (found.hit_tokens, found.preemptions) == (plain.hit_tokens, plain.preemptions)
        assert found.availability == 1.0
        figures, expected = found.figures(ServiceObjective()), plain.figures(ServiceObjective())
        for name, value in expected.items():
            assert figures[name] == value or abs(figures[name] / value - 1) < 1e-12


@proof("simulation", count=20, sample=1, bound=4.0)
def availability_is_the_formula(seed: int) -> float:
    """Availability less ``mtbf / (mtbf + repair)`` in standard errors, over some thousand failures of a few replicas.

    A replica's share of a time T, with exponential times of work U and of repair D in the mean, has the variance
    2 U^2 D^2 / ((U + D)^3 T) (alternating renewal process).
    """
    rng = np.random.default_rng(seed)
    replicas, up, down = int(rng.integers(1, 5)), float(rng.uniform(50, 500)), float(rng.uniform(5, 200))
    until = (up + down) * float(rng.uniform(500, 1500))
    trace = RequestTrace("ends", (TraceRequest(0.0, 4, 1), TraceRequest(until, 4, 1)))
    failures = ReplicaFailures(up, down, "migrate", seed=seed)
    found = simulate_fleet(engines(replicas), trace, failures=failures)
    error = math.sqrt(2 * up**2 * down**2 / ((up + down) ** 3 * until * replicas))
    assert found.failures > 300
    return abs(found.availability - failures.availability) / error
