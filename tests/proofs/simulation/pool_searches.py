"""Searches of prefill and decode pools beside brute force, and pools beside colocated engines on bursts."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxllm.plan.hardware import Cluster
from jaxllm.simulate import ServiceObjective, make_trace
from jaxllm.simulate.pools import DisaggregatedPools
from jaxllm.simulate.search.pool_search import colocated, mixed_splits, place, pool_splits, provision, share_met, spent
from recipes.llama3 import llama3_8b
from tests.proofs.harness import proof
from tests.simulate.served import deployment


@proof("simulation", count=6, sample=1, counts=("left_out",))
def placements_are_brute_forces(seed: int) -> dict[str, float]:
    """Goodput per device of the best pools, or colocated engines, found with bounds and by simulating all."""
    rng = np.random.default_rng(seed)
    trace = make_trace(f"bursty:{rng.uniform(4000, 8000)}", lengths="90/5", count=8, seed=seed)
    slo = ServiceObjective(float(rng.uniform(0.001, 0.004)), float(rng.uniform(1.6e-4, 3e-4)), 0.8)
    base = deployment("h100:1x4")
    ways = [*pool_splits(base), *colocated(base)]
    pruned, whole = (place(ways, trace, slo, tolerance=0.5, prune=prune) for prune in (True, False))
    assert pruned[0].goodput_per_device == whole[0].goodput_per_device
    return {"left_out": float(len(whole) - len(pruned))}


@proof("simulation", count=10, sample=1, counts=("pools", "none"))
def provisions_are_brute_forces(seed: int) -> dict[str, float]:
    """Price, or rated power, of the cheapest pools or engines of two kinds of devices that meet an objective.

    How often these are pools, and how often nothing meets it, is counted.
    """
    rng = np.random.default_rng(seed)
    prices = {"h100": float(rng.uniform(1, 4)), "a100": float(rng.uniform(0.5, 2))}
    kinds = [dataclasses.replace(Cluster.parse(f"{n}:1x1").hardware, dollars_per_hour=p) for n, p in prices.items()]
    trace = make_trace(f"bursty:{rng.uniform(5, 20)}", lengths="2000/60", count=14, seed=seed)
    slo = ServiceObjective(float(rng.uniform(0.1, 0.5)), float(rng.uniform(0.007, 0.013)), 0.8)
    base = deployment(
        model=llama3_8b().model, max_sequences=64, max_batched_tokens=2048, max_len=2112, pages=None, page_size=64
    )
    ways, counts = list(mixed_splits(base, kinds, 3)), {"pools": 0.0, "none": 0.0}
    shares = [share_met(one, trace, slo) for one in ways]
    for spending in ("cost", "power"):
        found = provision(ways, trace, slo, spending)
        enough = [spent(one, spending) for one, share in zip(ways, shares, strict=True) if share >= slo.share]
        assert (found and found[1]) == min(enough, default=None)
        counts["none"] += found is None
        counts["pools"] += found is not None and isinstance(found[0], DisaggregatedPools)
    return counts


@proof("simulation", count=2, sample=1, counts=("chunked_wins",))
def pools_beside_colocated_on_bursts(seed: int) -> dict[str, float]:
    """Prompts of 2,000 tokens in bursts on four H100, 12 ms a token: pools have more goodput per device than colocated
    engines that compute a prompt in one step. Whether those win that compute 512 tokens a step is counted and printed.
    """
    trace = make_trace("bursty:8", lengths="2000/40", count=16, seed=seed)
    slo = ServiceObjective(1.0, 0.012)

    def best(budget: int, apart: bool) -> float:
        base = deployment(
            "h100:1x4", model=llama3_8b().model, max_sequences=128, max_batched_tokens=budget, max_len=2112,
            pages=None, page_size=64,
        )  # fmt: skip
        ways = [one for one in pool_splits(base) if one.prefill.devices == 2] if apart else list(colocated(base))[:2]
        return place(ways, trace, slo, tolerance=0.25)[0].goodput_per_device

    pools, whole, chunked = best(2048, apart=True), best(2048, apart=False), best(512, apart=False)
    print(f"seed {seed}: pools {pools:.1f}, colocated {whole:.1f}, in chunks of 512 {chunked:.1f} requests/s a device")
    assert pools > whole
    return {"chunked_wins": float(chunked > pools)}
