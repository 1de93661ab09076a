"""Disaggregated pools: prefill and decode on engines of their own, with the KV cache sent from one to the other.

    found = simulate_pools(DisaggregatedPools(prefill, decode), trace)

A request's prompt is computed by an engine of the prefill pool, which also gives the first token; its KV cache travels
over the prefill engine's network, one request at a time; then an engine of the decode pool admits it, as it would admit
a sequence that was swapped out to the host, and decodes the rest (DistServe, arXiv:2401.09670; Splitwise,
arXiv:2311.18677). So neither phase delays the other. ``jaxllm.simulate.search.pool_search`` chooses the pools.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from jaxllm.infer import SamplingParams
from jaxllm.infer.scheduling.policies import Policy
from jaxllm.infer.scheduling.sequence import Sequence
from jaxllm.serve.load_benchmark import RequestResult
from jaxllm.simulate.deployment import Deployment, DeploymentError
from jaxllm.simulate.paper_runner import SimulatedStep
from jaxllm.simulate.power import PowerModel
from jaxllm.simulate.request_trace import RequestTrace, token_ids
from jaxllm.simulate.simulator import ServiceObjective, SimulatedEngine, SimulatedRequest, Simulation


@dataclass(frozen=True)
class DisaggregatedPools:
    """Pools of a disaggregated service.

    Attributes:
        prefill, decode: engines of each pool; they serve the same model with the same KV cache format.
        link: bytes per second from a prefill engine to a decode engine; None: the network of the smaller engine's
            devices.

    Raises:
        DeploymentError: the pools' models or KV caches differ.
    """

    prefill: Deployment
    decode: Deployment
    link: float | None = None

    def __post_init__(self) -> None:
        if self.prefill.model != self.decode.model or self.prefill.engine.kv_dtype != self.decode.engine.kv_dtype:
            raise DeploymentError("pools: prefill and decode must serve one model with one format of the KV cache.")

    @property
    def devices(self) -> int:
        """Devices of both pools."""
        return self.prefill.devices + self.decode.devices

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a transfer."""
        if self.link is not None:
            return self.link
        return min(one.engine_devices * one.cluster.hardware.network for one in (self.prefill, self.decode))

    @property
    def name(self) -> str:
        """Short description."""
        return f"prefill {self.prefill.name}; decode {self.decode.name}"

    @property
    def where(self) -> str:
        """All devices, of both pools."""
        counts = Counter[str]()
        for kind, count in (*self.prefill.kinds, *self.decode.kinds):
            counts[kind.name] += count
        return " and ".join(f"{count} x {name}" for name, count in counts.items())

    @property
    def dollars_per_hour(self) -> float | None:
        """Price of all devices; None where the hardware table has none."""
        prices = self.prefill.dollars_per_hour, self.decode.dollars_per_hour
        return None if prices[0] is None or prices[1] is None else prices[0] + prices[1]

    def transfer_bytes(self, prompt: int) -> float:
        """Bytes of KV cache of a prompt, as the prefill engine's devices hold it, whole pages of it."""
        model, spec = self.prefill.step_model, self.prefill.spec
        devices = self.prefill.engine_devices // model.replicas
        return devices * sum(
            model.group_token_bytes(n) * spec.page_size * len(_columns(prompt, spec.page_size, group.window))
            for n, group in enumerate(spec.groups)
        )


def _columns(prompt: int, page_size: int, window: int | None) -> range:
    """Columns of a page table that a sequence with a computed prompt needs in order to decode."""
    first = 0 if window is None else max(0, prompt - window + 1) // page_size
    return range(first, -(-prompt // page_size))


@dataclass
class PoolSimulation(Simulation):
    """Simulated service of disaggregated pools; ``engines`` has the steps of the prefill engines, then the others'.

    Attributes:
        deployment: the pools.
        transfers: (start, end, bytes) of each transfer of a KV cache.
    """

    transfers: list[tuple[float, float, float]] = field(default_factory=list)

    @property
    def pools(self) -> DisaggregatedPools:
        """The pools."""
        assert isinstance(self.deployment, DisaggregatedPools)
        return self.deployment

    @property
    def prefill(self) -> list[list[SimulatedStep]]:
        """Steps of each engine of the prefill pool."""
        return self.engines[: self.pools.prefill.engines]

    @property
    def decode(self) -> list[list[SimulatedStep]]:
        """Steps of each engine of the decode pool."""
        return self.engines[self.pools.prefill.engines :]

    @property
    def shown(self) -> dict[str, int]:
        """See ``Simulation``: an engine of each pool."""
        return {"Batches of a prefill engine": 0, "Batches of a decode engine": self.pools.prefill.engines}

    def figures(self, slo: ServiceObjective, power: PowerModel | None = None) -> dict[str, Any]:
        """Figures of the service, see ``Simulation``, and of transfers: bytes of all, mean seconds of one."""
        return super().figures(slo, power) | {
            "transferred_bytes": sum(size for *_, size in self.transfers),
            "transfer_seconds": sum(end - start for start, end, _ in self.transfers) / max(1, len(self.transfers)),
        }

    def joules(self, seconds: float, power: PowerModel) -> float | None:
        """See ``Simulation``: each pool has devices of its own."""
        pools = (self.pools.prefill, self.prefill), (self.pools.decode, self.decode)
        both = [
            pool.joules([step.cost for own in engines for step in own], len(engines) * seconds, power)
            for pool, engines in pools
        ]
        return None if both[0] is None or both[1] is None else both[0] + both[1]


def simulate_pools(
    pools: DisaggregatedPools, trace: RequestTrace, *, policy: Callable[[], Policy] | None = None
) -> PoolSimulation:
    """Simulates the service of an open-loop trace by disaggregated pools; each pool's least loaded engine is next.

    Args:
        pools: engines of both pools.
        trace: requests.
        policy: makes the scheduling policy of an engine; None: first come, first served.

    Raises:
        DeploymentError: a pool cannot serve the model or the longest request, or the trace is a closed loop.
    """
    for one in (pools.prefill, pools.decode):
        if trace.longest > one.spec.max_len or trace.clients is not None:
            raise DeploymentError(
                f"pools: {trace.name} has requests of {trace.longest:,} tokens and the engines' sequences "
                f"{one.spec.max_len:,}; give max_len = {trace.longest}, and an open-loop trace."
            )
    first, second = (
        [SimulatedEngine(one, None, policy() if policy else None) for _ in range(one.engines)]
        for one in (pools.prefill, pools.decode)
    )
    requests = [SimulatedRequest(one, RequestResult(one.at, one.at), n) for n, one in enumerate(trace.requests)]
    # The prefill engines serve a copy of each request that ends with its first token.
    prompts = [
        SimulatedRequest(replace(one, tokens=1), RequestResult(one.at, one.at), n)
        for n, one in enumerate(trace.requests)
    ]
    found = PoolSimulation(pools, trace, requests, [e.runner.steps for e in (*first, *second)])
    coming = [(one.at, n, False) for n, one in enumerate(trace.requests)]  # (time, request, its KV cache is there)
    heapq.heapify(coming)
    links, names, engines = [0.0] * len(first), dict[str, int](), [*first, *second]
    while coming or any(one.engine.busy for one in engines):
        busy = [n for n, one in enumerate(engines) if one.engine.busy]
        number = min(busy, key=lambda n: engines[n].runner.now, default=None)
        if number is not None and (not coming or engines[number].runner.now < coming[0][0]):
            ended = engines[number].advance()
            for one in ended if number < len(first) else ():
                there = _hand_over(found, one, requests[one.index], number, links)
                if there is not None:
                    heapq.heappush(coming, (there, one.index, True))
            continue
        now, index, decodes = heapq.heappop(coming)
        pool = second if decodes else first
        chosen = min(range(len(pool)), key=lambda n: (len(pool[n].view(now).active), n))
        prompt = token_ids(trace.requests, index, names)
        if decodes:
            _admit(pool[chosen], requests[index], prompt, now)
        else:
            prompts[index].engine = chosen
            pool[chosen].submit(prompts[index], prompt, now)
    found.hit_tokens = sum(one.engine.scheduler.hit_tokens for one in first)
    found.preemptions = sum(one.engine.scheduler.preemptions for one in engines)
    return found


def _hand_over(
    found: PoolSimulation, prefilled: SimulatedRequest, one: SimulatedRequest, engine: int, links: list[float]
) -> float | None:
    """Records the first token of a request and sends its KV cache; returns when that is there, None if it has ended."""
    first = prefilled.result.end
    one.result.chunks.append(first)
    one.delivered.append(1)
    if one.request.tokens == 1:
        one.result.tokens, one.result.end = 1, first
        return None
    size = found.pools.transfer_bytes(one.request.prompt)
    start = max(first, links[engine])
    links[engine] = start + size / found.pools.bandwidth
    found.transfers.append((start, links[engine], size))
    return links[engine]


def _admit(engine: SimulatedEngine, one: SimulatedRequest, prompt: list[int], now: float) -> None:
    """Hands a request to a decode engine whose KV cache has arrived, as a sequence that was swapped out."""
    if not engine.engine.busy:
        engine.runner.now = max(engine.runner.now, now)
    params = SamplingParams(max_tokens=one.request.tokens, temperature=0.0, seed=0)
    request = engine.engine.submit(prompt, params)
    (sequence,) = request.sequences
    _swapped_out(sequence, engine)
    engine.active[request.id] = one
    engine.held.append(one)


def _swapped_out(sequence: Sequence, engine: SimulatedEngine) -> None:
    """Makes a new sequence one whose prompt is computed, whose first token is known, and whose pages are elsewhere."""
    spec, prompt = engine.runner.spec, len(sequence.tokens)
    sequence.tokens.append(0)
    sequence.computed = prompt
    sequence.swapped = [(list(_columns(prompt, spec.page_size, group.window)), None) for group in spec.groups]
