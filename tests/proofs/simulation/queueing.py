"""Queueing theory in the simulator: waiting times, conservation of tokens and pages, rates."""

from __future__ import annotations

import itertools

import numpy as np

from jaxllm.simulate import RequestTrace, ServiceObjective, TraceRequest, make_trace, simulate
from jaxllm.simulate.pools import DisaggregatedPools, simulate_pools
from jaxllm.simulate.simulator import SimulatedEngine
from tests.proofs.harness import proof
from tests.simulate.served import deployment, seconds

SERVICE = 0.01


@proof("simulation", count=10, sample=1, bound={"lindley": 1e-9, "pollaczek_khinchine": 0.15})
def waiting_is_that_of_one_server(seed: int) -> dict[str, float]:
    """Requests of one step on an engine of one slot: a queue of one server with a constant service time (M/D/1).

    Every request waits as Lindley's recursion says, and the mean wait is rho D / (2 (1 - rho)) (Pollaczek-Khinchine),
    over 10,000 requests within what such a sample varies by.
    """
    load = 0.3 + 0.04 * (seed % 10)
    trace = make_trace(f"poisson:{load / SERVICE}", lengths="4/1", count=10_000, seed=seed)
    one = deployment(max_sequences=1, max_batched_tokens=16, prefix_cache=False)
    found = simulate(one, trace, clock=seconds(SERVICE))
    waits = np.asarray([r.end - r.due - SERVICE for r in found.results])
    at, wait, expected = 0.0, 0.0, []
    for request in trace.requests:
        wait = max(0.0, wait + SERVICE - (request.at - at)) if expected else 0.0
        at = request.at
        expected.append(wait)
    theory = load * SERVICE / (2 * (1 - load))
    return {
        "lindley": float(np.abs(waits - expected).max()),
        "pollaczek_khinchine": abs(float(waits.mean()) / theory - 1),
    }


@proof("simulation", count=30, sample=1)
def tokens_and_pages_are_conserved(seed: int) -> None:
    """Random sizes, traces and preemption: every request gets its tokens, nothing is computed for nothing, and in the
    end no slot and no page is in use. Mean sequences in the engine are rate x time in it (Little's law).
    """
    rng = np.random.default_rng(seed)
    sizes = {
        "max_sequences": int(rng.integers(1, 12)), "pages": int(rng.integers(34, 80)),
        "decode_steps": int(rng.integers(1, 6)), "max_batched_tokens": int(rng.integers(16, 100)),
        "preemption": ("recompute", "swap")[seed % 2],
    }  # fmt: skip
    trace = make_trace(
        ("poisson:300", "closed:9")[int(rng.integers(2))], lengths=f"{rng.integers(1, 200)}/{rng.integers(1, 60)}",
        count=30, seed=seed, prefixes=2, prefix_tokens=int(rng.integers(0, 3)) * 24,
    )  # fmt: skip
    engines: list[SimulatedEngine] = []
    made = SimulatedEngine.__init__

    def kept(self: SimulatedEngine, *arguments, **fields) -> None:
        made(self, *arguments, **fields)
        engines.append(self)

    SimulatedEngine.__init__ = kept
    try:
        found = simulate(deployment(**sizes), trace)
    finally:
        SimulatedEngine.__init__ = made
    assert [one.result.tokens for one in found.requests] == [one.tokens for one in trace.requests]
    computed = sum(
        n * s.passes if s.decode else n for own in found.engines for s in own for c in s.chunks for _, n in c
    )
    needed = sum(one.prompt + one.tokens - 1 for one in trace.requests) - found.hit_tokens
    assert computed >= needed
    if found.preemptions == 0 and sizes["decode_steps"] == 1:
        assert computed == needed
    for engine in engines:
        assert not engine.engine.scheduler.sequences()
        assert all(not any(pages.ref_counts) for pages in engine.engine.scheduler.pages)
    inside = sum(r.end - r.due for r in found.results) / found.seconds
    events = sorted([(r.due, 1) for r in found.results] + [(r.end, -1) for r in found.results])
    area = count = 0.0
    for (at, change), (after, _) in itertools.pairwise(events):
        count += change
        area += count * (after - at)
    assert abs(area / found.seconds / inside - 1) < 1e-9


@proof("simulation", count=20, sample=1)
def latency_rises_with_the_rate(seed: int) -> None:
    """The same requests at one, two, four and eight times the rate: mean latency never falls by more than a step.

    And the share of requests within an objective never rises by more than one request.
    """
    trace = make_trace("poisson:20", lengths="alpaca", count=60, seed=seed)
    slo = ServiceObjective(0.05, 0.02)
    served = deployment(max_len=max(512, -(-trace.longest // 16) * 16))
    runs = [simulate(served, trace.at_rate(rate), clock=seconds(0.005, 1e-5)) for rate in (20, 40, 80, 160)]
    means = [float(np.mean([r.end - r.due for r in run.results])) for run in runs]
    shares = [run.within(slo) for run in runs]
    assert all(after > before - 0.005 for before, after in itertools.pairwise(means))
    assert means[-1] > means[0]
    assert all(after <= before + 1 / 60 for before, after in itertools.pairwise(shares))


@proof("simulation", count=30, sample=1)
def pools_send_the_kv_formula(seed: int) -> None:
    """Disaggregated pools: tokens of each phase, bytes of each transfer, and no transfer before its prompt is there."""
    rng = np.random.default_rng(seed)
    link = float(10 ** rng.uniform(7, 10))
    requests = tuple(
        TraceRequest(float(at), int(p), int(n))
        for at, p, n in zip(
            np.sort(rng.uniform(0, 0.1, 25)), rng.integers(1, 300, 25), rng.integers(1, 40, 25), strict=True
        )
    )
    sides = [deployment(f"h100:1x{n}", max_batched_tokens=int(rng.integers(32, 200))) for n in rng.integers(1, 3, 2)]
    found = simulate_pools(DisaggregatedPools(sides[0], sides[1], link), RequestTrace("drawn", requests))
    assert [one.result.tokens for one in found.requests] == [one.tokens for one in requests]
    prefilled = sum(n for own in found.prefill for s in own for c in s.chunks for _, n in c)
    decoded = sum(n for own in found.decode for s in own for c in s.chunks for _, n in c)
    assert prefilled == sum(one.prompt for one in requests)
    assert decoded == sum(one.tokens - 1 for one in requests)
    sent = [one for one in requests if one.tokens > 1]
    layers, width = 4, 2 * 4 * 32 * 2
    expected = sorted(-(-one.prompt // 16) * 16 * layers * width for one in sent)
    assert sorted(round(size) for *_, size in found.transfers) == expected
    assert np.allclose([end - start for start, end, _ in found.transfers],
                       [size / link for *_, size in found.transfers], rtol=1e-9)  # fmt: skip
    first = sorted(one.result.chunks[0] for one in found.requests if one.request.tokens > 1)
    assert all(start >= at - 1e-12 for (start, *_), at in zip(sorted(found.transfers), first, strict=True))
