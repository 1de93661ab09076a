"""Attention pools in the simulator: composition of steps beside the real engine's, and placements by brute force."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxllm.plan.hardware import Cluster
from jaxllm.simulate import ServiceObjective, make_trace
from jaxllm.simulate.attention_split import OffloadedDeployment, attention_splits, mixed_attention_splits
from jaxllm.simulate.search.deployment_search import fit
from jaxllm.simulate.search.pool_search import colocated, mixed_splits, parts_of, place, provision, share_met, spent
from recipes.llama3 import llama3_8b
from tests.proofs.harness import proof
from tests.simulate.served import deployment


@proof("simulation", count=10, sample=1, counts=("splits", "none"))
def attention_provisions_are_brute_forces(seed: int) -> dict[str, float]:
    """Price of the cheapest engines, with an attention pool or without, of two kinds of devices that meet an objective,
    and of the cheapest with one; what is recommended meets the objective when it is replayed.

    One kind is fast and has room for the weights of 8B and a few sequences, the other is cheap, has much memory and
    few FLOPs.

    How often the cheapest has an attention pool, and how often nothing meets the objective, is counted.
    """
    rng = np.random.default_rng(seed)
    fast, roomy = (Cluster.parse(f"{name}:1x1").hardware for name in ("h100", "a100"))
    fast = dataclasses.replace(
        fast, dollars_per_hour=float(rng.uniform(1, 4)), hbm_bytes=int(rng.integers(17, 20)) << 30
    )
    slow = roomy.flops * float(rng.uniform(0.03, 0.2))
    kinds = [fast, dataclasses.replace(roomy, dollars_per_hour=float(rng.uniform(0.2, 1)), flops=slow)]
    trace = make_trace(f"bursty:{rng.uniform(10, 30)}", lengths="1000/60", count=14, seed=seed)
    slo = ServiceObjective(float(rng.uniform(0.1, 0.5)), float(rng.uniform(0.01, 0.03)), 0.8)
    base = deployment(
        model=llama3_8b().model, max_sequences=64, max_batched_tokens=2048, max_len=1088, pages=None, page_size=64,
    )  # fmt: skip
    overlap = str(rng.choice(["none", "nano"]))
    splits = [one.sized(overlap=overlap) for one in mixed_attention_splits(base, kinds, 3)]
    ways, counts = [*splits, *mixed_splits(base, kinds, 2)], {"splits": 0.0, "none": 0.0}
    met = {id(one): 0.0 if any(map(fit, parts_of(one))) else share_met(one, trace, slo) for one in ways}
    for some in (ways, splits):
        found = provision(some, trace, slo, "cost")
        enough = [spent(one, "cost") for one in some if met[id(one)] >= slo.share]
        assert (found and found[1]) == min(enough, default=None)
        assert found is None or share_met(found[0], trace, slo) >= slo.share
        counts["none"] += found is None
    best = provision(ways, trace, slo, "cost")
    counts["splits"] = float(best is not None and isinstance(best[0], OffloadedDeployment))
    return counts


@proof("simulation", count=6, sample=1, counts=("attention",))
def attention_placements_are_brute_forces(seed: int) -> dict[str, float]:
    """Goodput per device of the best split of four devices into engines with an attention pool, or without: those that
    the search simulates are all that there are, and the best is the best of each by itself.
    """
    rng = np.random.default_rng(seed)
    trace = make_trace(f"bursty:{rng.uniform(4000, 8000)}", lengths="90/5", count=8, seed=seed)
    slo = ServiceObjective(float(rng.uniform(0.0006, 0.0012)), float(rng.uniform(3e-4, 6e-4)), 0.8)
    base = deployment("h100:1x4")
    ways = [*attention_splits(base), *colocated(base)]
    found = place(ways, trace, slo, tolerance=0.5)
    alone = [place([one], trace, slo, tolerance=0.5)[0] for one in ways]
    assert len(found) == len(ways)
    assert found[0].goodput_per_device == max(one.goodput_per_device for one in found)
    assert {one.placement.name for one in found} == {one.placement.name for one in alone}
    return {"attention": float(isinstance(found[0].placement, OffloadedDeployment))}
