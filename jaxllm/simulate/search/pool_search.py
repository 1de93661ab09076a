"""Search of prefill and decode pools: most goodput of a device, or least price or power that meets an objective.

    place([*pool_splits(base), *colocated(base)], trace, slo)[0]       # DistServe, arXiv:2401.09670
    provision(mixed_splits(base, kinds, most=8), trace, slo, "cost")   # Splitwise, arXiv:2311.18677

Prefill does not depend on the decode pool, so a prefill pool alone bounds what any pools with it can do. Pools are
simulated in the order of that bound, or of their price, and the search ends where no other can be better; so the result
is that of simulating all.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from jaxllm.plan.hardware import Cluster, Hardware
from jaxllm.simulate.deployment import Deployment, DeploymentError
from jaxllm.simulate.pools import DisaggregatedPools, PoolSimulation, simulate_pools
from jaxllm.simulate.request_trace import RequestTrace
from jaxllm.simulate.search.deployment_search import fit
from jaxllm.simulate.simulator import LATENCIES, ServiceObjective, Simulation, best_rate, simulate
from sharding import MeshSpec
from sharding.mesh import divisors

Placement = DisaggregatedPools | Deployment
"""Prefill and decode pools, or colocated engines that do both phases."""
Spending = Literal["cost", "power"]


@dataclass(frozen=True)
class RatedPlacement:
    """Placement with its goodput.

    Attributes:
        placement: pools, or colocated engines.
        rate: largest rate at which the objective's share of the requests is met.
    """

    placement: Placement
    rate: float

    @property
    def goodput_per_device(self) -> float:
        """Requests per second and device."""
        return self.rate / self.placement.devices


def engines_of(base: Deployment, tensor: int, count: int, hardware: Hardware | None = None) -> Deployment | None:
    """So many engines of a tensor degree; None if there is no slice of so many devices.

    Args:
        base: its model, formats and sizes are taken.
        hardware: kind of the devices; None: that of ``base``.
    """
    cluster = Cluster.sized(hardware or base.cluster.hardware, tensor)
    if cluster is None:
        return None
    return replace(base, cluster=cluster, mesh=MeshSpec.parse(f"tensor={tensor}"), copies=count)


def pool_splits(base: Deployment) -> Iterator[DisaggregatedPools]:
    """Pools that use all devices of a deployment: all tensor degrees of both pools, and all numbers of their engines.

    Args:
        base: its devices, model, formats and sizes are taken; its mesh is not.
    """
    for prefill, decode in itertools.product(divisors(base.devices), repeat=2):
        for many in range(1, base.devices // prefill + 1):
            more, rest = divmod(base.devices - many * prefill, decode)
            if more < 1 or rest:
                continue
            if (one := engines_of(base, prefill, many)) and (other := engines_of(base, decode, more)):
                yield DisaggregatedPools(one, other)


def colocated(base: Deployment) -> Iterator[Deployment]:
    """Engines that do both phases, on all devices of a deployment: all tensor degrees."""
    for tensor in divisors(base.devices):
        if (one := engines_of(base, tensor, base.devices // tensor)) is not None:
            yield one


def mixed_splits(base: Deployment, kinds: Sequence[Hardware], most: int) -> Iterator[Placement]:
    """Pools of up to so many devices, each pool of one of several kinds of devices, and colocated engines of one kind.

    Tensor degrees are powers of two.

    Args:
        base: its model, formats and sizes are taken.
        kinds: device kinds.
        most: devices of both pools together, at most.
    """
    degrees = [2**n for n in range(most.bit_length()) if 2**n <= most]
    engines = [
        found
        for hardware in kinds
        for tensor in degrees
        for count in range(1, most // tensor + 1)
        if (found := engines_of(base, tensor, count, hardware)) is not None
    ]
    yield from engines
    for one, other in itertools.product(engines, repeat=2):
        if one.devices + other.devices <= most:
            yield DisaggregatedPools(one, other)


def place(
    ways: Iterable[Placement],
    trace: RequestTrace,
    slo: ServiceObjective,
    *,
    tolerance: float = 0.1,
    prune: bool = True,
) -> list[RatedPlacement]:
    """Placements by goodput per device, best first; those that cannot serve the model are left out.

    Args:
        ways: placements to choose from, see ``pool_splits`` and ``colocated``.
        trace: requests, whose arrival times are stretched; they are repeated until a queue has time to build up.
        slo: objective.
        tolerance: relative width of the interval in which a placement's rate is found.
        prune: leave out pools whose prefill alone is not better than the best found.
    """

    able = [one for one in ways if not any(map(fit, parts_of(one)))]
    if not able:
        return []
    slow = served_by(able[0], trace.at_rate(trace.rate / 16))
    seconds = LATENCIES * float(np.median([one.result.end - one.result.due for one in slow.requests]))

    def largest(share: Callable[[RequestTrace], float]) -> float:
        low, high = trace.rate / 16, trace.rate
        return best_rate(lambda rate: share(trace.at_rate(rate, seconds)), slo.share, low, high, tolerance)

    bounds: dict[str, float] = {}

    def bound(one: Placement) -> float:
        if not prune or isinstance(one, Deployment):
            return math.inf
        name = described(one.prefill)
        if name not in bounds:
            bounds[name] = largest(lambda asked: first_tokens_met(one.prefill, asked, slo))
        return bounds[name] / one.devices

    found, best = [], -1.0
    for most, one in sorted(((bound(one), one) for one in able), key=lambda pair: -pair[0]):
        if most <= best:
            break
        found.append(RatedPlacement(one, largest(functools.partial(share_met, one, slo=slo))))
        best = max(best, found[-1].goodput_per_device)
    return sorted(found, key=lambda one: -one.goodput_per_device)


def provision(
    ways: Iterable[Placement], trace: RequestTrace, slo: ServiceObjective, spending: Spending, *, prune: bool = True
) -> tuple[Placement, float] | None:
    """Placement of the least price or power that meets an objective at the trace's rate, and that; None if none does.

    Args:
        ways: placements to choose from, see ``mixed_splits``.
        trace: requests.
        slo: objective.
        spending: ``cost``, dollars an hour, or ``power``, rated watts, of all devices.
        prune: do not simulate pools whose prefill alone misses the objective.

    Raises:
        DeploymentError: a price or the watts of some devices are not known.
    """
    able: dict[str, bool] = {}

    def hopeless(one: Placement) -> bool:
        if not prune or isinstance(one, Deployment):
            return False
        name = described(one.prefill)
        if name not in able:
            able[name] = first_tokens_met(one.prefill, trace, slo) >= slo.share
        return not able[name]

    ordered = sorted(((spent(one, spending), one) for one in ways), key=lambda pair: pair[0])
    for price, one in ordered:
        if any(map(fit, parts_of(one))) or hopeless(one):
            continue
        if share_met(one, trace, slo) >= slo.share:
            return one, price
    return None


def parts_of(one: Placement) -> tuple[Deployment, ...]:
    """Deployments of a placement."""
    return (one,) if isinstance(one, Deployment) else (one.prefill, one.decode)


def spent(one: Placement, spending: Spending) -> float:
    """Dollars an hour or rated watts of a placement.

    Raises:
        DeploymentError: they are not known for its devices.
    """
    total = 0.0
    for part in parts_of(one):
        for hardware, count in part.kinds:
            each = hardware.dollars_per_hour if spending == "cost" else hardware.watts
            if each is None:
                wanted = "price: give --price" if spending == "cost" else "watts: give them in --hardware"
                raise DeploymentError(f"{hardware.name} has no {wanted}.")
            total += each * count
    return total


def share_met(one: Placement, trace: RequestTrace, slo: ServiceObjective) -> float:
    """Share of the requests that a placement serves within an objective."""
    return served_by(one, trace).within(slo)


def served_by(one: Placement, trace: RequestTrace) -> Simulation | PoolSimulation:
    """Simulation of a placement."""
    return simulate(one, trace) if isinstance(one, Deployment) else simulate_pools(one, trace)


def first_tokens_met(prefill: Deployment, trace: RequestTrace, slo: ServiceObjective) -> float:
    """Share of the requests whose first token a prefill pool gives in time: a bound of what any pools with it meet."""
    prompts = replace(trace, requests=tuple(replace(one, tokens=1) for one in trace.requests))
    return simulate(prefill, prompts).within(slo)


def described(one: Placement) -> str:
    """Description of a placement: engines, mesh and formats of each part, and its kind of device."""
    if isinstance(one, DisaggregatedPools):
        return f"prefill {described(one.prefill)}; decode {described(one.decode)}"
    return f"{one.name} on {one.cluster.hardware.name}"
