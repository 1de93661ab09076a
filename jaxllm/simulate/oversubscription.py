"""Oversubscription of power: a service on more servers than its power budget feeds, under a power cap and without.

POLCA (arXiv:2308.12908) puts 30% more servers behind the power of a cluster. ``oversubscribe`` simulates that: more
engines serve as many more requests within the rated power of the engines that a deployment has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxllm.simulate.deployment import Deployment, DeploymentError
from jaxllm.simulate.power_cap import CapPolicy, PowerGovernor
from jaxllm.simulate.request_trace import RequestTrace
from jaxllm.simulate.routing import LOW_PRIORITY, ByPriority
from jaxllm.simulate.simulator import Simulation, simulate


@dataclass(frozen=True)
class Oversubscription:
    """Service with more servers than the power budget has room for.

    Attributes:
        engines: engines.
        budget: watts of all devices together.
        peak, mean: share of the budget that was drawn, at most in a period of the meter, and on average.
        uncapped_peak: the same without a cap.
        breaches: periods (start, end, mean watts) in which the power was above the budget.
        uncapped_breaches: number of them without a cap.
        periods: number of periods.
        capped: share of the time of steps of low and of high priority that ran at a lower clock.
        latency: mean latency of low and of high priority, relative to no cap.
    """

    engines: int
    budget: float
    peak: float
    mean: float
    uncapped_peak: float
    breaches: tuple[tuple[float, float, float], ...]
    uncapped_breaches: int
    periods: int
    capped: Mapping[str, float]
    latency: Mapping[str, float]


def oversubscribe(
    deployment: Deployment, trace: RequestTrace, extra: float = 0.3, policy: CapPolicy | None = None
) -> Oversubscription:
    """Simulates a deployment with a share of engines more, which get as much more of the trace.

    Every other request has low priority, and the first half of the engines serves those.

    Args:
        deployment: engines whose rated power is the budget.
        trace: requests, which arrive faster by the same share.
        extra: share of engines more; it must make at least one.
        policy: power cap; None: the default thresholds.

    Raises:
        DeploymentError: the devices' watts are not known, there are fewer than two engines, or the trace has no rate.
    """
    watts, engines = deployment.cluster.hardware.watts, deployment.engines
    if watts is None:
        raise DeploymentError(
            f"no watts are known for {deployment.cluster.hardware.name}: give them in --hardware to cap its power."
        )
    more = math.floor(engines * (1 + extra) + 1e-9)
    if more == engines or engines < 2 or not math.isfinite(trace.rate):
        raise DeploymentError(
            f"{engines} engines and {extra:.0%} more are {more}, with the trace {trace.name}: give two engines or more "
            "(a smaller mesh), a share that makes one more, and an open-loop trace."
        )
    one = replace(deployment, cluster=deployment.engine_cluster, copies=more)
    faster = trace.at_rate(trace.rate * more / engines)
    requests = tuple(
        replace(request, key=LOW_PRIORITY if n % 2 == 0 else "high") for n, request in enumerate(faster.requests)
    )
    faster, low = replace(faster, requests=requests), more // 2
    budget = engines * deployment.engine_devices * watts

    def served(caps: bool) -> tuple[PowerGovernor, Simulation]:
        governor = PowerGovernor(budget, watts, deployment.engine_devices, low, policy or CapPolicy(), caps)
        return governor, simulate(one, faster, router=ByPriority(low), governor=governor)

    governor, capped = served(caps=True)
    watched, free = served(caps=False)
    shares = [watts / budget for *_, watts in governor.readings()]
    return Oversubscription(
        more, budget, max(shares), sum(shares) / len(shares), max(drawn for *_, drawn in watched.readings()) / budget,
        tuple(governor.breaches()), len(watched.breaches()), len(shares),
        {name: governor.capped[name] / _busy(capped, low, name) for name in ("low", "high")},
        {name: _latency(capped, name) / _latency(free, name) for name in ("low", "high")},
    )  # fmt: skip


def _busy(simulation: Simulation, low: int, name: str) -> float:
    engines = simulation.engines[:low] if name == "low" else simulation.engines[low:]
    return sum(step.cost.seconds for steps in engines for step in steps) or 1.0


def _latency(simulation: Simulation, name: str) -> float:
    times = [one.result.end - one.result.due for one in simulation.requests if one.request.key == name]
    return sum(times) / len(times)


def oversubscription_text(found: Oversubscription) -> str:
    """Lines of an oversubscribed service for the terminal; every breach is listed."""
    lines = [
        f"{found.engines} engines within {found.budget / 1e3:,.1f} kW: {found.mean:.0%} of it on average, "
        f"{found.peak:.0%} at most ({found.uncapped_peak:.0%} without a cap)",
        *(
            f"  {name} priority: {found.capped[name]:.0%} of the time at a lower clock, latency x "
            f"{found.latency[name]:.3f}"
            for name in ("low", "high")
        ),
        f"  above the budget in {len(found.breaches)} of {found.periods} periods, {found.uncapped_breaches} without a "
        "cap",
    ]
    lines += [f"    {start:.1f} to {end:.1f} s: {watts / 1e3:,.2f} kW" for start, end, watts in found.breaches]
    return "\n".join(lines)
