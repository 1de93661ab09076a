"""Power oversubscription: 30% more servers under a power cap, on traces of several kinds."""

from __future__ import annotations

from jaxllm.infer import EngineConfig
from jaxllm.plan.hardware import Cluster
from jaxllm.simulate import Deployment, make_trace, oversubscription, simulate
from jaxllm.simulate.oversubscription import oversubscribe
from jaxllm.simulate.power_cap import CapPolicy, PowerGovernor
from recipes.llama3 import llama3_8b
from sharding import MeshSpec
from tests.proofs.harness import proof

TRACES = ("poisson:100 conversation", "bursty:80 conversation", "bursty:60 code", "uniform:100 conversation",
          "bursty:60 sharegpt")  # fmt: skip
POLICY = CapPolicy(period=0.5)


@proof("simulation", cases=TRACES, sample=1, bound={"energy": 1e-9, "high": 0.05}, counts=("breaches", "uncapped"))
def more_servers_within_a_power_budget(case: str) -> dict[str, float]:
    """Ten engines and three more: energy of the meter and of the steps, mean power, breaches, latencies of the classes.

    Breaches with and without the cap are counted, and those with it printed.
    """
    arrivals, lengths = case.split()
    trace = make_trace(arrivals, lengths=lengths, count=300)
    config = EngineConfig(max_sequences=128, max_len=trace.longest, samplers=("plain",))
    one = Deployment(llama3_8b().model, Cluster.parse("h100:1x1"), MeshSpec.parse("tensor=1"), config, copies=10)
    governors: list[PowerGovernor] = []
    spent: list[float] = []

    def metered(*arguments, governor: PowerGovernor, **fields):
        found = simulate(*arguments, governor=governor, **fields)
        seconds = governor.readings()[-1][1]
        governors.append(governor)
        spent.append(sum(_joules(governor, [s.cost for s in own], seconds) for own in found.engines))
        return found

    oversubscription.simulate = metered
    try:
        found = oversubscribe(one, trace, 0.3, POLICY)
    finally:
        oversubscription.simulate = simulate
    assert found.engines == 13
    for start, end, watts in found.breaches:
        print(f"{case}: {watts / found.budget:.1%} of the budget from {start:.1f} to {end:.1f} s")
    free = governors[1]
    assert not free.caps
    assert found.mean <= 1
    assert found.peak <= max(found.uncapped_peak, 1.0) + 1e-9
    assert len(found.breaches) <= found.uncapped_breaches
    assert found.latency["high"] <= found.latency["low"] + 1e-9
    metered_energy = sum(watts * (end - start) for start, end, watts in free.readings())
    return {
        "energy": abs(metered_energy / spent[1] - 1),
        "high": found.latency["high"] - 1,
        "breaches": float(len(found.breaches)),
        "uncapped": float(found.uncapped_breaches),
    }


def _joules(governor: PowerGovernor, costs: list, seconds: float) -> float:
    return governor.model.energy(costs, seconds, governor.watts) * governor.devices
