"""Searches, mixes and routers beside brute force; recommendations replayed; and published serving figures."""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np

from jaxllm.infer import EngineConfig
from jaxllm.models import DecoderConfig
from jaxllm.plan.formulas.serving_step import BatchWork, ServingStepModel
from jaxllm.plan.hardware import Cluster
from jaxllm.simulate import Deployment, RequestTrace, ServiceObjective, TraceRequest, make_trace, simulate
from jaxllm.simulate.routing import ROUTERS
from jaxllm.simulate.search.accelerator_mix import buckets, capacities, cheapest_mix, replayed_mix
from jaxllm.simulate.search.deployment_search import DeploymentSearchResult, candidates, platforms, search, smallest
from jaxllm.simulate.steady_state import mixing_penalty
from recipes.llama3 import llama3_8b, llama3_70b
from sharding import MeshSpec
from tests.proofs.harness import proof
from tests.simulate.served import MODEL, deployment
from tests.simulate.test_deployment_search import brute_force


@proof("simulation", count=100, sample=2, bound=1e-9)
def mixes_are_brute_forces(seed: int) -> float:
    """Price of the integer program's mix and of all assignments of slices: two or three buckets, two or three kinds."""
    rng = np.random.default_rng(seed)
    many, kinds, slices = (int(n) for n in rng.integers(2, 4, 3))
    capacity = rng.uniform(0.1, 4, (many, kinds)) * (rng.random((many, kinds)) > 0.25)
    capacity[:, 0] = np.maximum(capacity[:, 0], 0.1)
    rates, prices = rng.uniform(0.1, 6, many), rng.integers(1, 12, kinds)
    found = cheapest_mix(rates, capacity, prices, slices=slices)
    best = brute_force(rates, capacity, prices, slices)
    return abs(found.dollars_per_hour / best - 1)


@proof("simulation", count=10, sample=1)
def searches_are_brute_force(seed: int) -> None:
    """The deployment found with bounds is the best of simulating all, in latency and in energy, and meets the SLO for
    the trace that it was found by and for a second one.
    """
    rng = np.random.default_rng(seed)
    rate = rng.uniform(50, 500)
    trace, other = (make_trace(f"poisson:{rate}", lengths="alpaca", count=10, seed=seed + n) for n in (0, 1000))
    slo = ServiceObjective(float(rng.uniform(0.002, 0.05)), float(rng.uniform(3e-4, 2e-3)), 0.8)
    ways = list(
        candidates(
            MODEL, Cluster.parse("h100:1x4"), trace, weights=("bfloat16", "int8"), budgets=(64, 256), max_sequences=8,
            pages=400, max_len=max(trace.longest, other.longest),
        )
    )  # fmt: skip
    for goal in ("latency", "energy"):
        pruned, whole = (search(ways, trace, slo, goal, replay=other, prune=prune) for prune in (True, False))
        assert (pruned.best is None) == (whole.best is None)
        if pruned.best is not None and whole.best is not None:
            assert pruned.best.value == whole.best.value
            served = [simulate(pruned.best.deployment, one).within(slo) for one in (trace, other)]
            assert min(served) >= slo.share


@proof("simulation", count=10, sample=1)
def smallest_platforms_are_brute_forces(seed: int) -> None:
    """The first platform in the order of price that meets the objective is the cheapest of all that do."""
    rng = np.random.default_rng(seed)
    trace = make_trace(f"poisson:{rng.uniform(2, 40)}", lengths="alpaca", count=10, seed=seed)
    slo = ServiceObjective(0.1, float(rng.uniform(3e-3, 1e-2)), 0.8)
    table = {
        name: dataclasses.replace(Cluster.parse(f"{name}:1x1").hardware, dollars_per_hour=float(rng.uniform(1, 9)))
        for name in ("a100", "h100", "h200")
    }
    clusters = [one for kind in table.values() for one in itertools.islice(platforms(kind), 3)]

    def find(cluster: Cluster, prune: bool = True) -> DeploymentSearchResult:
        ways = candidates(llama3_8b().model, cluster, trace, budgets=(128,), max_sequences=8, pages=400)
        return search(ways, trace, slo, prune=prune)

    chosen, _ = smallest(clusters, find)
    enough = [one for one in clusters if find(one, prune=False).best is not None]
    assert chosen == min(enough, key=lambda one: one.devices * (one.hardware.dollars_per_hour or 0.0), default=None)


@proof("simulation", count=10, sample=1, counts=("retried",))
def mixes_meet_their_objective(seed: int) -> dict[str, float]:
    """A mix of two kinds of GPUs for short and long requests, replayed in the simulator, meets the objective, and is
    not more expensive than either kind alone. Plans that were made again for more load are counted.
    """
    rng = np.random.default_rng(seed)
    prices = {"h100": float(rng.uniform(1, 3)), "h200": float(rng.uniform(1, 4))}
    table = {n: dataclasses.replace(Cluster.parse(f"{n}:1x1").hardware, dollars_per_hour=p) for n, p in prices.items()}
    requests, at = [], 0.0
    for _ in range(80):
        at += float(rng.exponential(1 / 40))
        requests.append(TraceRequest(at, int(rng.choice([32, 1500])), int(rng.choice([8, 24]))))
    trace, slo = RequestTrace("two sizes", tuple(requests)), ServiceObjective(1.0, 0.05)
    config = EngineConfig(max_sequences=32, max_batched_tokens=512, max_len=2048, samplers=("plain",))
    kinds = [
        Deployment(llama3_8b().model, Cluster.parse(f"{n}:1x1", table), MeshSpec.parse("tensor=1"), config)
        for n in prices
    ]
    histogram = buckets(trace)
    capacity = capacities(histogram, kinds, slo)
    found = replayed_mix(histogram, capacity, kinds, trace, slo)
    assert found.within >= slo.share, f"the mix {found.mix.counts} serves {found.within:.0%} within the objective"
    rates = found.load * np.asarray([one.rate for one in histogram])
    for number, one in enumerate(kinds):
        if (capacity[:, number] > 0).all():
            alone = cheapest_mix(rates, capacity[:, [number]], [one.dollars_per_hour or 0.0])
            assert found.mix.dollars_per_hour <= alone.dollars_per_hour + 1e-9
    return {"retried": float(found.load > 1)}


def router_trace(kind: str, seed: int) -> RequestTrace:
    """Long prompts with short answers among short prompts with long answers; or prompts with one of twelve prefixes."""
    rng, at, requests = np.random.default_rng(seed), 0.0, []
    for _ in range(160):
        at += float(rng.exponential(1 / 24))
        if kind == "prefixes":
            number = int(rng.integers(12))
            sizes = 2000 + int(rng.integers(20, 200)), int(rng.integers(20, 100)), f"p{number}", 2000
        elif rng.random() < 0.5:
            sizes = int(rng.integers(1500, 4000)), int(rng.integers(4, 20)), "", 0
        else:
            sizes = int(rng.integers(20, 100)), int(rng.integers(200, 400)), "", 0
        requests.append(TraceRequest(at, *sizes))
    return RequestTrace(kind, tuple(requests))


@proof("simulation", cases=("mixed", "prefixes"), sample=1, counts=("wins", "losses"))
def routers_pay(kind: str) -> dict[str, float]:
    """Mean latency over five traces: the mixing penalty on mixed sizes, and prefix-aware routing on shared prefixes,
    are below round robin and shortest queue. Single traces where they are not are counted as losses, and printed.
    Lengths are predicted from the completions that have ended.
    """
    one = deployment(
        "h100:1x4", model=llama3_8b().model, max_sequences=64, max_batched_tokens=1024, max_len=4500, pages=4000,
        decode_steps=4, page_size=32,
    )  # fmt: skip
    judged, means, losses = {"mixed": "mixing-penalty", "prefixes": "prefix-aware"}[kind], [], 0
    for seed in range(5):
        trace = router_trace(kind, seed)
        found = {}
        for name in ("round-robin", "shortest-queue", judged):
            router = mixing_penalty(one) if name == "mixing-penalty" else ROUTERS[name]()
            served = simulate(one, trace, router=router)
            found[name] = float(np.mean([r.end - r.due for r in served.results]))
        means.append(found)
        for name in ("round-robin", "shortest-queue"):
            if found[judged] >= found[name]:
                losses += 1
                print(f"{kind}, seed {seed}: {judged} {found[judged]:.4f} s, {name} {found[name]:.4f} s")
    for name in ("round-robin", "shortest-queue"):
        assert np.mean([m[judged] for m in means]) < np.mean([m[name] for m in means]), name
    return {"wins": 10.0 - losses, "losses": float(losses)}


class Published(NamedTuple):
    """Published serving figure: median TPOT in milliseconds of a closed loop of clients.

    ``host`` is the engine's ``Deployment.host_seconds``.
    """

    name: str
    model: DecoderConfig
    on: str
    mesh: str
    lengths: str
    clients: int
    weights: str
    tpot: float
    host: float = 0.0

    def __str__(self) -> str:
        return self.name


def _qwen3_8b() -> DecoderConfig:
    block = llama3_8b().model.pattern[0]
    mlp = dataclasses.replace(block.mlp, hidden=12_288)
    return dataclasses.replace(
        llama3_8b().model, vocab_size=151_936, layers=36, pattern=(dataclasses.replace(block, mlp=mlp),)
    )


SGLANG_HOST = 6.0e-3
"""Seconds of a step in which sglang-jax's devices wait: fitted to CALIBRATED alone."""
CALIBRATED = Published(
    "8B, v6e-4, 16 clients", llama3_8b().model, "v6e:2x2", "tensor=4", "512/512", 16, "bfloat16", 9.9, SGLANG_HOST
)
PUBLISHED = (
    Published("70B fp8, 2 x H100, 1 client", llama3_70b().model, "h100:1x2", "tensor=2", "5000/500", 1, "fp8", 18.6),
    Published("70B fp8, 2 x H100, 25 clients", llama3_70b().model, "h100:1x2", "tensor=2", "5000/500", 25, "fp8", 38.8),
    Published("70B fp8, 2 x H100, 50 clients", llama3_70b().model, "h100:1x2", "tensor=2", "5000/500", 50, "fp8", 59.7),
    Published("70B, v6e-8, 64 clients", llama3_70b().model, "v6e:2x4", "tensor=8", "1024/1024", 64, "bfloat16", 25.4),
    Published("70B, v6e-8, 128 clients", llama3_70b().model, "v6e:2x4", "tensor=8", "1024/1024", 128, "bfloat16", 35.1),
    Published(
        "Qwen3 8B, v6e-4, 64 clients", _qwen3_8b(), "v6e:2x2", "tensor=4", "1024/1024", 64, "bfloat16", 11.1,
        SGLANG_HOST,
    ),
    Published(
        "Qwen3 8B, v7x-4, 128 clients", _qwen3_8b(), "tpu7x:2x2x1", "tensor=8", "1024/1024", 128, "bfloat16", 14.1,
        SGLANG_HOST,
    ),
    Published(
        "70B, v7x-4, 128 clients", llama3_70b().model, "tpu7x:2x2x1", "tensor=8", "1024/1024", 128, "bfloat16", 30.8,
        SGLANG_HOST,
    ),
)  # fmt: skip
"""Judged rows. Sources: docs.nvidia.com/nim/benchmarking/llm/1.0.0/performance (NIM 1.8.0);
AI-Hypercomputer/tpu-recipes (vLLM, v6e-8); sgl-project/sglang-jax, cookbook (v6e-4, v7x-4). No constant of the step
model was chosen by any of them; sglang-jax's host by CALIBRATED, which is not judged.
"""


@proof("simulation", cases=PUBLISHED, sample=1, bound={"error": 0.3})
def published_tpot(row: Published) -> dict[str, float]:
    """Relative error of the simulated median TPOT; one and a half rounds of the clients."""
    return {"error": abs(simulated_tpot(row) / row.tpot - 1)}


@proof("simulation", count=1, sample=1, bound={"median": 0.2, "calibrated": 0.05})
def published_tpot_median(seed: int) -> dict[str, float]:
    """Median relative error of the judged rows, and the error of the row that the host's seconds are from."""
    errors = [abs(simulated_tpot(row) / row.tpot - 1) for row in PUBLISHED]
    return {"median": float(np.median(errors)), "calibrated": abs(simulated_tpot(CALIBRATED) / CALIBRATED.tpot - 1)}


def simulated_tpot(row: Published) -> float:
    """Simulated median TPOT of a published row in milliseconds."""
    count = max(2, row.clients * 3 // 2)
    trace = make_trace(f"closed:{row.clients}", lengths=row.lengths, count=count)
    config = EngineConfig(
        max_sequences=max(16, row.clients), max_batched_tokens=2048, max_len=trace.longest, samplers=("plain",),
        decode_steps=1 if row.host else 8, kv_dtype="fp8" if row.weights == "fp8" else "auto",
    )  # fmt: skip
    one = Deployment(
        row.model, Cluster.parse(row.on), MeshSpec.parse(row.mesh), config, row.weights, host_seconds=row.host
    )
    found = simulate(one, trace)
    return 1e3 * float(np.median([r.tpot for r in found.results]))


COMPILED = (
    ("v6e:1x1", 1, 1.001),
    ("v6e:1x1", 16, 1.002),
    ("h100:1x1", 1, 1.004),
)
"""Bytes that the compiled decode step of llama3_8b moves, layers unstacked, by those of its weights and of a KV cache
of 1,024 tokens a sequence: docs/serve/serving.md, from the programs' text (``python -m benchmarks.engine_bytes``).
"""


@proof("simulation", cases=COMPILED, sample=1, bound={"bytes": 0.03})
def decode_bytes_are_the_compiled_programs(row: tuple[str, int, float]) -> dict[str, float]:
    """Bytes of a decode step by formula and of the compiled program, both by the bytes of weights and cache."""
    on, batch, compiled = row
    model = ServingStepModel(llama3_8b().model, Cluster.parse(on), MeshSpec.parse("tensor=1"))
    step = model.step([BatchWork.of([1023] * batch, [1] * batch)], batch, batch)
    table = model.config.vocab_size * model.config.embed_dim * 2
    read = model.device_weight_bytes - table + batch * 1024 * model.token_bytes
    return {"bytes": abs(step.bytes / read / compiled - 1)}
