"""Cheapest mix of accelerators for a histogram of requests (Mélange, arXiv:2404.14527).

Each accelerator (an engine on its devices) has, for each bucket of request sizes, a largest rate at which it meets the
objective. A bucket's requests are cut into slices; a slice loads an accelerator by its rate over that largest rate. The
integer linear program chooses the accelerator of each slice and the number of accelerators of each kind, so that no
kind is loaded beyond its number, at the least price. The largest rates are those of a steady state, so the mix is
simulated, and planned again for more load while that misses the objective (``replayed_mix``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxllm.simulate.deployment import Deployment, DeploymentError
from jaxllm.simulate.request_trace import RequestTrace
from jaxllm.simulate.simulator import ServiceObjective, Simulation, simulate
from jaxllm.simulate.steady_state import largest_rate

SLICES = 8
"""Slices that a bucket's requests are cut into."""
MORE_LOAD = 1.25
"""Factor of the load that a mix is planned for again, where its simulation misses the objective."""
PLANS = 6
"""Times that a mix is planned at most."""


@dataclass(frozen=True)
class RequestBucket:
    """Requests of similar sizes.

    Attributes:
        prompt, tokens: longest prompt and completion in it.
        rate: requests per second.
        members: indices of its requests in the trace.
    """

    prompt: int
    tokens: int
    rate: float
    members: tuple[int, ...] = ()


@dataclass(frozen=True)
class AcceleratorMix:
    """Mix of accelerators.

    Attributes:
        counts: number of each kind.
        slices: int[buckets, kinds], slices of each bucket on each kind.
        dollars_per_hour: price.
    """

    counts: tuple[int, ...]
    slices: np.ndarray
    dollars_per_hour: float


def buckets(trace: RequestTrace, factor: float = 4.0) -> list[RequestBucket]:
    """Histogram of a trace: buckets whose sizes grow by a factor, those with requests, with their rates."""
    span = max(trace.requests[-1].at - trace.requests[0].at, 1e-9)
    found: dict[tuple[int, int], list[int]] = {}
    for index, one in enumerate(trace.requests):
        prompt, tokens = (int(np.ceil(np.log(size) / np.log(factor))) for size in (one.prompt, one.tokens))
        found.setdefault((prompt, tokens), []).append(index)
    return [
        RequestBucket(
            max(trace.requests[n].prompt for n in members), max(trace.requests[n].tokens for n in members),
            len(members) / span, tuple(members),
        )
        for _, members in sorted(found.items())
    ]  # fmt: skip


def capacities(
    histogram: Sequence[RequestBucket], accelerators: Sequence[Deployment], slo: ServiceObjective
) -> np.ndarray:
    """Largest rate [buckets, accelerators] at which an accelerator meets the objective; 0 where it cannot."""
    return np.asarray(
        [[largest_rate(one, bucket.prompt, bucket.tokens, slo) for one in accelerators] for bucket in histogram]
    )


def cheapest_mix(
    rates: Sequence[float] | np.ndarray,
    capacity: np.ndarray,
    prices: Sequence[float] | np.ndarray,
    *,
    slices: int = SLICES,
    available: Sequence[int] | None = None,
) -> AcceleratorMix:
    """Cheapest mix by integer linear programming (HiGHS).

    Args:
        rates: requests per second of each bucket.
        capacity: see ``capacities``.
        prices: dollars an hour of each kind.
        slices: slices of a bucket.
        available: how many there are of each kind; None: any number.

    Raises:
        DeploymentError: a bucket fits no kind, or there are too few.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    many, kinds = capacity.shape
    if hopeless := [n for n in range(many) if not (capacity[n] > 0).any()]:
        raise DeploymentError(
            f"no accelerator meets the objective for the buckets {hopeless}: give larger accelerators, or a looser slo."
        )
    load = np.where(capacity > 0, np.asarray(rates)[:, None] / slices / np.maximum(capacity, 1e-300), 0.0)
    # Variables: slices of each bucket on each kind, row by row, then the number of each kind.
    size = many * kinds
    cost = np.concatenate([np.zeros(size), np.asarray(prices, float)])
    all_assigned = np.zeros((many, size + kinds))
    not_overloaded = np.zeros((kinds, size + kinds))
    for bucket in range(many):
        all_assigned[bucket, bucket * kinds : (bucket + 1) * kinds] = 1
        for kind in range(kinds):
            not_overloaded[kind, bucket * kinds + kind] = load[bucket, kind]
    not_overloaded[:, size:] = -np.eye(kinds)
    most = np.concatenate(
        [np.where(capacity > 0, slices, 0).ravel(), np.full(kinds, np.inf) if available is None else available]
    )
    found = milp(
        cost,
        constraints=[
            LinearConstraint(all_assigned, slices, slices),
            LinearConstraint(not_overloaded, -np.inf, 0.0),
        ],
        bounds=Bounds(np.zeros(size + kinds), most),  # type: ignore[arg-type]
        integrality=np.ones(size + kinds),
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        raise DeploymentError("the available accelerators cannot serve these requests within the objective.")
    chosen = np.rint(found.x).astype(int)
    counts = chosen[size:]
    return AcceleratorMix(
        tuple(counts.tolist()), chosen[:size].reshape(many, kinds), float(np.dot(counts, np.asarray(prices)))
    )


def replay(
    mix: AcceleratorMix, histogram: Sequence[RequestBucket], accelerators: Sequence[Deployment], trace: RequestTrace
) -> list[Simulation | None]:
    """Simulates the requests of each kind of accelerator; None for a kind that gets none."""
    assigned: list[list[int]] = [[] for _ in accelerators]
    for bucket, row in zip(histogram, mix.slices, strict=True):
        kinds = np.repeat(np.arange(len(row)), row)
        for turn, index in enumerate(bucket.members):
            # Every slice of the bucket gets each so many-th request.
            assigned[kinds[(turn * 5) % len(kinds)]].append(index)
    out: list[Simulation | None] = []
    for count, own, one in zip(mix.counts, assigned, accelerators, strict=True):
        if not own:
            out.append(None)
            continue
        requests = tuple(trace.requests[n] for n in sorted(own))
        out.append(simulate(replace(one, copies=count), RequestTrace(trace.name, requests)))
    return out


@dataclass(frozen=True)
class ReplayedMix:
    """Mix with its simulation.

    Attributes:
        mix: the mix.
        load: load that it was planned for, relative to the trace's.
        served: simulation of each kind; None for a kind that gets no requests.
        within: share of all requests that met the objective.
    """

    mix: AcceleratorMix
    load: float
    served: tuple[Simulation | None, ...]
    within: float


def replayed_mix(
    histogram: Sequence[RequestBucket],
    capacity: np.ndarray,
    accelerators: Sequence[Deployment],
    trace: RequestTrace,
    slo: ServiceObjective,
) -> ReplayedMix:
    """Cheapest mix whose simulation meets the objective: the least load of 1, 1.25, 1.25^2, ... that gives one.

    Args:
        capacity: see ``capacities``.
        accelerators: kinds, all with a price.

    Returns:
        the mix of the first load that meets the objective; that of the largest load where none does.

    Raises:
        DeploymentError: a bucket fits no kind.
    """
    rates = np.asarray([one.rate for one in histogram])
    prices = [one.dollars_per_hour or 0.0 for one in accelerators]
    for attempt in range(PLANS):
        load = MORE_LOAD**attempt
        mix = cheapest_mix(load * rates, capacity, prices)
        served = replay(mix, histogram, accelerators, trace)
        met = sum(one.within(slo) * len(one.requests) for one in served if one is not None)
        found = ReplayedMix(mix, load, tuple(served), met / len(trace.requests))
        if found.within >= slo.share:
            break
    return found
