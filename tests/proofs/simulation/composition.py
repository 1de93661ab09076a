"""Simulated steps are the engine's: a real engine of a tiny model, whose clock is the simulator's, on equal traces."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxllm.infer import Engine, SamplingParams
from jaxllm.infer.runner.runner_protocol import Runner
from jaxllm.infer.scheduling.policies import Fair, FirstCome, Priority, Shortest
from jaxllm.plan.formulas.serving_step import BatchWork, StepCost
from jaxllm.plan.hardware import Cluster
from jaxllm.simulate import Deployment, RequestTrace, TraceRequest, simulate
from jaxllm.simulate.request_trace import token_ids
from sharding import MeshSpec
from tests.infer import engines, meshes
from tests.proofs.harness import proof

WAYS = ("roomy", "tight, recompute", "tight, swap", "contiguous")
POLICIES = (None, FirstCome, Shortest, Priority, Fair)
REQUESTS = 18
"""As many as have different first tokens in the tiny vocabulary."""


@functools.lru_cache(2 * len(WAYS))
def real_runner(way: str, pools: str | None = None, stages: int = 1) -> Any:
    if stages > 1:
        return meshes.over(f"stage={stages}", "deep llama", engines.ENGINES[way]).runner
    return engines.build(dataclasses.replace(engines.ENGINES[way], pools=pools)).runner


@dataclass
class Clocked:
    """Real runner whose steps take the time of a step clock, on each stage; everything else is its own."""

    runner: Any
    clock: Any
    now: float = 0.0
    free: dict[int, float] = field(default_factory=dict)
    chunks: list = field(default_factory=list)

    def run(self, shape: Any, packed: np.ndarray, *masks: Any) -> Any:
        x = shape.inputs.views(packed[0])
        counts = np.diff(x["starts"])
        used = (x["slots"] < shape.slots) & (counts > 0)
        counts, lengths = counts[used].astype(int), x["kv_lens"][used].astype(int)
        self.chunks.append(list(zip((lengths - counts).tolist(), counts.tolist(), strict=True)))
        passes = max(1, int(x["steps"])) if shape.decode else 1
        costs, ready = self.clock([BatchWork(lengths - counts, counts)], shape, passes), self.now
        for stage, cost in enumerate(costs if isinstance(costs, list) else [costs]):
            ready = max(ready, self.free.get(stage, 0.0)) + cost.seconds
            self.free[stage] = ready
        return Ready(self, ready, self.runner.run(shape, packed, *masks))


for _name in vars(Runner):
    # Since Python 3.12 `isinstance` of a protocol looks at the class alone, where `__getattr__` is not asked.
    if not _name.startswith("_") and _name not in vars(Clocked):
        setattr(Clocked, _name, property(lambda self, name=_name: getattr(self.runner, name)))


@dataclass
class Ready:
    """Result of a step, there at a time of the clock."""

    runner: Clocked
    at: float
    made: Any

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self.runner.now = max(self.runner.now, self.at)
        return np.asarray(self.made)


@proof("simulation", count=30, sample=1)
def steps_are_the_engines(seed: int) -> None:
    """Sequences, positions and tokens of every step, pages held after it, and the times of every token.

    Ways to serve, policies, prefixes, lengths and arrivals are drawn; steps take a time that depends on their rows and
    on the context.
    """
    compare_steps(seed)


@proof("simulation", count=12, sample=1)
def attention_pool_steps_are_the_engines(seed: int) -> None:
    """The same of an engine with an attention pool, which decodes one token a step."""
    compare_steps(seed, "model=tensor:1, attention=tensor:2")


@proof("simulation", count=12, sample=1)
def staged_steps_are_the_engines(seed: int) -> None:
    """The same of an engine with two or four pipeline stages, each of which takes another share of a step's time."""
    compare_steps(seed, stages=(2, 4)[seed // len(WAYS) % 2])


def compare_steps(seed: int, pools: str | None = None, stages: int = 1) -> None:
    """Simulates drawn requests, and serves them with a real engine."""
    rng = np.random.default_rng(seed)
    way, policy = WAYS[seed % len(WAYS)], POLICIES[int(rng.integers(len(POLICIES)))]
    config = dataclasses.replace(engines.ENGINES[way], pools=pools, stages=stages)
    prefix = int(rng.integers(0, 2)) * 8
    requests = [
        TraceRequest(float(at), prefix + int(p), int(n), "p" if prefix else "", prefix)
        for at, p, n in zip(np.sort(rng.uniform(0, 0.4, REQUESTS)), rng.integers(1, 25, REQUESTS),
                            rng.integers(1, 20, REQUESTS), strict=True)
    ]  # fmt: skip
    if policy is not Shortest and rng.random() < 0.5:
        requests = [dataclasses.replace(one, at=0.0) for one in requests]

    shares = rng.uniform(0.2, 1.0, stages)

    def clock(batches: list[BatchWork], shape: Any, passes: int) -> Any:
        context = sum(int((one.starts + one.counts).sum()) for one in batches)
        cost = StepCost(compute=passes * (2e-3 + 1e-4 * shape.tokens + 1e-6 * context))
        return cost if stages == 1 else [cost * float(share) for share in shares]

    runner = Clocked(real_runner(way, pools, stages), clock)
    engine = Engine(runner, config, engines.VOCAB, policy=policy() if policy else None, clock=lambda: runner.now)  # type: ignore[arg-type]
    times, pages, names, going = [[] for _ in requests], [], dict[str, int](), {}
    coming = list(range(REQUESTS))
    while coming or engine.busy:
        if not engine.busy:
            runner.now = max(runner.now, requests[coming[0]].at)
        while coming and requests[coming[0]].at <= runner.now:
            index = coming.pop(0)
            params = SamplingParams(max_tokens=requests[index].tokens, temperature=0.0, seed=0)
            going[engine.submit(token_ids(requests, index, names), params).id] = index
        before = len(runner.chunks)
        deltas = engine.step()
        if len(runner.chunks) > before:
            pages.append(
                1 - sum(p.available for p in engine.scheduler.pages) / sum(p.count for p in engine.scheduler.pages)
            )
        for delta in deltas:
            times[going[delta.request.id]].append(runner.now)

    hardware = dataclasses.replace(Cluster.parse("h100:1x1").hardware, host=1e30)
    mesh = "tensor=1" if stages == 1 else f"stage={stages}"
    cluster = dataclasses.replace(Cluster.parse(f"h100:1x{stages}"), hardware=hardware)
    model = engines.model_of("llama" if stages == 1 else "deep llama", "float32")
    deployment = Deployment(model, cluster, MeshSpec.parse(mesh), config)
    found = simulate(deployment, RequestTrace(way, tuple(requests)), policy=policy, clock=clock)
    (steps,) = found.engines
    assert [step.chunks[0] for step in steps] == runner.chunks
    assert [step.cache_use for step in steps] == pages
    assert [one.chunks for one in found.results] == times
    assert found.preemptions == engine.scheduler.preemptions
    assert found.hit_tokens == engine.scheduler.hit_tokens
