"""Serving simulator: discrete events over engines whose steps the real scheduler plans and a step-time model times.

    simulation = simulate(deployment, make_trace("poisson:4"))
    simulation.figures(ServiceObjective(ttft=1.0, tpot=0.05))["goodput"]

Each engine is ``jaxllm.infer.Engine`` itself over a ``PaperRunner``, so admission, chunked prefill, preemption, the
prefix cache and the step that runs ahead are those of the real engine. An event is an arrival, or the moment when the
host of an engine has a step's result and starts the next; the earliest comes first.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxllm.infer import Engine, SamplingParams
from jaxllm.infer.scheduling.policies import Policy
from jaxllm.infer.scheduling.scheduler import Scheduler
from jaxllm.plan.formulas.staged_step import StagedStepModel
from jaxllm.serve.load_benchmark import RequestResult, summary
from jaxllm.simulate.deployment import LARGEST_TOKEN, Deployment, DeploymentError
from jaxllm.simulate.paper_runner import PaperRunner, SimulatedStep, StepClock, StepTimer
from jaxllm.simulate.power import PowerModel
from jaxllm.simulate.power_cap import PowerGovernor
from jaxllm.simulate.request_trace import RequestTrace, TraceRequest, token_ids
from jaxllm.simulate.routing import EngineView, RoutedRequest, Router, RouterState, ShortestQueue
from jaxllm.simulate.staged.staged_paper_runner import StageClock, StagedPaperRunner, StageTimer

MOST_DOUBLINGS = 12
"""Doublings of a rate after which a trace counts as one that no rate overloads."""


LATENCIES = 4
"""Median latencies that a trace spans at least when its rate is judged: a queue needs time to build up."""


@dataclass(frozen=True)
class ServiceObjective:
    """Service-level objective.

    Attributes:
        ttft: seconds to the first token.
        tpot: seconds per output token after the first.
        share: share of the requests that must meet both.
    """

    ttft: float = 1.0
    tpot: float = 0.05
    share: float = 0.9

    def __post_init__(self) -> None:
        if not (self.ttft > 0 and self.tpot > 0 and 0 < self.share <= 1):
            raise ValueError(f"slo: {self}; give seconds above 0, and a share above 0 and at most 1.")

    @classmethod
    def parse(cls, text: str) -> ServiceObjective:
        """Objective of a text such as ``ttft=1,tpot=0.05,share=0.9``.

        Raises:
            ValueError: a name or a number is not legal.
        """
        found = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.strip().partition("=")
            try:
                assert name in ("ttft", "tpot", "share")
                found[name] = float(value)
            except (AssertionError, ValueError):
                raise ValueError(
                    f"slo: {part!r}; legal: ttft=SECONDS, tpot=SECONDS and share=FRACTION, separated by commas."
                ) from None
        return cls(**found)

    def met(self, result: RequestResult) -> bool:
        """Whether a request met both targets."""
        return not result.error and result.ttft <= self.ttft and result.tpot <= self.tpot


@dataclass
class SimulatedRequest:
    """Request with its timing.

    Attributes:
        request: request of the trace.
        result: timing, as a load test of a server records it.
        index: its place in the trace.
        engine: index of the engine that served it.
        delivered: tokens delivered up to each chunk.
        predicted: tokens that the router predicted.
    """

    request: TraceRequest
    result: RequestResult
    index: int = 0
    engine: int = 0
    delivered: list[int] = field(default_factory=list)
    predicted: float = 0.0

    def generated(self, now: float) -> int:
        """Tokens that had been delivered by then."""
        chunks = bisect.bisect_right(self.result.chunks, now)
        return self.delivered[chunks - 1] if chunks else 0


class SimulatedEngine:
    """Engine with a paper runner and the requests that it has.

    Args:
        deployment: deployment whose engine it is.
        clock: gives the cost of a step, of an engine with stages on each; None: the deployment's step-time model.
        policy: scheduling policy; None: first come, first served.
        host: seconds until the device of an engine that has nothing to do begins with a request.
    """

    def __init__(
        self,
        deployment: Deployment,
        clock: StepClock | StageClock | None = None,
        policy: Policy | None = None,
        host: float = 0.0,
    ):
        model, config = deployment.step_model, deployment.engine
        page_bytes = [model.group_token_bytes(group) * deployment.spec.page_size for group in range(len(model.groups))]
        pages = tuple(size / model.hardware.host for size in page_bytes)
        self._host, times = host, (config.max_sequences, deployment.host_seconds)
        if isinstance(model, StagedStepModel):
            stage_clock = StageTimer(model, *times) if clock is None else clock
            self.runner: PaperRunner = StagedPaperRunner(deployment.spec, config, stage_clock, pages)  # type: ignore[arg-type]
        else:
            self.runner = PaperRunner(deployment.spec, config, clock or StepTimer(model, *times), pages)  # type: ignore[arg-type]
        self.engine = Engine(self.runner, config, LARGEST_TOKEN, policy=policy, clock=lambda: self.runner.now)
        self.active: dict[int, SimulatedRequest] = {}
        self.held: list[SimulatedRequest] = []  # active ones, and those that ended after the last look
        self.prefixes: set[str] = set()

    @property
    def schedulers(self) -> list[Scheduler]:
        """Schedulers of the engine's replicas."""
        found = self.engine.scheduler
        return [found] if isinstance(found, Scheduler) else found.schedulers  # type: ignore[attr-defined]

    def submit(self, one: SimulatedRequest, prompt: list[int], now: float) -> None:
        """Hands a request to the engine."""
        if not self.engine.busy:
            self.runner.now = max(self.runner.now, now) + self._host
        params = SamplingParams(max_tokens=one.request.tokens, temperature=0.0, seed=0)
        request = self.engine.submit(prompt, params)
        self.active[request.id] = one
        self.held.append(one)
        if one.request.prefix:
            self.prefixes.add(one.request.prefix)

    def advance(self) -> list[SimulatedRequest]:
        """Starts the next step and takes the result of the one before; returns the requests that have ended."""
        ended, steps = [], len(self.runner.steps)
        waiting = len(self.engine.scheduler.waiting)
        deltas = self.engine.step()
        if len(self.runner.steps) > steps:
            pages = self.engine.scheduler.pages
            used = 1 - sum(p.available for p in pages) / max(1, sum(p.count for p in pages))
            self.runner.steps[-1].waiting, self.runner.steps[-1].cache_use = waiting, used
        for delta in deltas:
            one = self.active[delta.request.id]
            one.result.chunks.append(self.runner.now)
            one.delivered.append(len(delta.tokens) + (one.delivered[-1] if one.delivered else 0))
            if delta.finish is not None:
                one.result.tokens, one.result.end = one.delivered[-1], self.runner.now
                ended.append(self.active.pop(delta.request.id))
        return ended

    def view(self, now: float) -> EngineView:
        """Engine as a router sees it at a time that its clock may already have passed."""
        self.held = [one for one in self.held if not one.result.end or one.result.end > now]
        seen = [
            RoutedRequest(
                one.request.prompt,
                one.predicted,
                one.request.prefix,
                one.request.prefix_tokens,
                one.generated(now),
                one.request.key,
            )
            for one in self.held
        ]
        return EngineView(seen, frozenset(self.prefixes))


@runtime_checkable
class ServedBy(Protocol):
    """Engines and their devices, of which a report tells."""

    @property
    def name(self) -> str:
        """Short description."""
        ...

    @property
    def where(self) -> str:
        """All devices."""
        ...

    @property
    def devices(self) -> int:
        """Number of devices."""
        ...

    @property
    def dollars_per_hour(self) -> float | None:
        """Price of all devices; None where it is not known."""
        ...


@dataclass
class Simulation:
    """Simulated service of a trace.

    Attributes:
        deployment, trace: what was simulated.
        requests: requests in the order of the trace.
        engines: steps of each engine.
        hit_tokens, preemptions: prompt tokens found in the prefix cache, and preemptions, of all engines.
    """

    deployment: ServedBy
    trace: RequestTrace
    requests: list[SimulatedRequest]
    engines: list[list[SimulatedStep]]
    hit_tokens: int = 0
    preemptions: int = 0

    @property
    def shown(self) -> dict[str, int]:
        """Engines whose batches a report shows, by title."""
        return {"Batches": 0}

    @property
    def results(self) -> list[RequestResult]:
        """Timing of each request."""
        return [one.result for one in self.requests]

    @property
    def seconds(self) -> float:
        """Seconds from the first arrival to the last token."""
        return max(one.end for one in self.results) - min(one.sent for one in self.results)

    def within(self, slo: ServiceObjective) -> float:
        """Share of the requests that met the objective."""
        return sum(map(slo.met, self.results)) / len(self.requests)

    def figures(self, slo: ServiceObjective, power: PowerModel | None = None) -> dict[str, Any]:
        """Figures of the service: those of ``jaxllm bench serve``, and use of the devices, cost and energy.

        ``dollars_per_million_tokens`` and the energies are None where price or watts of the devices are not known; the
        energies, and the parts of ``time``, are not known of steps whose times were measured as a whole.
        """
        found = summary(self.results, slo.ttft, slo.tpot)
        steps = [step for own in self.engines for step in own]
        seconds, devices = found["seconds"], self.deployment.devices
        tokens = sum(one.tokens for one in self.results)
        prompts = sum(one.request.prompt for one in self.requests)
        busy = sum(step.cost.seconds for step in steps)
        per_hour = self.deployment.dollars_per_hour
        costs = [step.cost for step in steps]
        parts = ("compute", "memory", "network", "launch") if any(cost.flops for cost in costs) else ()
        joules = self.joules(seconds, power or PowerModel()) if parts else None
        found |= {
            "slo": {"ttft": slo.ttft, "tpot": slo.tpot, "share": slo.share},
            "devices": devices,
            "goodput_per_device": found["goodput"] / devices,
            "prompt_tokens_per_second": prompts / seconds,
            "prefix_hit_share": self.hit_tokens / prompts,
            "preemptions": self.preemptions,
            "steps": len(steps),
            "busy": busy / (len(self.engines) * seconds),
            "cache_use": _weighted([s.cache_use for s in steps], [s.cost.seconds for s in steps]),
            "cache_peak": max((s.cache_use for s in steps), default=0.0),
            "batch": _weighted([sum(map(len, s.chunks)) for s in steps], [s.cost.seconds for s in steps]),
            "time": {part: sum(getattr(cost, part) for cost in costs) / busy for part in parts},
            "dollars_per_million_tokens": None if per_hour is None else per_hour * seconds / 3600 / tokens * 1e6,
            "kilowatt_hours": None if joules is None else joules / 3.6e6,
            "joules_per_token": None if joules is None else joules / tokens,
        }
        return found

    def joules(self, seconds: float, power: PowerModel) -> float | None:
        """Energy of all steps, and of idling in so many seconds; None where it is not known."""
        assert isinstance(self.deployment, Deployment)
        costs = [step.cost for own in self.engines for step in own]
        return self.deployment.joules(costs, len(self.engines) * seconds, power)


def _weighted(values: Sequence[float], weights: Sequence[float]) -> float:
    return float(np.average(values, weights=weights)) if sum(weights) else 0.0


def simulate(
    deployment: Deployment,
    trace: RequestTrace,
    *,
    router: Router | None = None,
    policy: Callable[[], Policy] | None = None,
    clock: StepClock | StageClock | None = None,
    predict: Callable[[TraceRequest], float] | None = None,
    governor: PowerGovernor | None = None,
    host: float = 0.0,
) -> Simulation:
    """Simulates the service of a trace.

    Args:
        deployment: engines and their devices.
        trace: requests.
        router: chooses the engine of a request; None: the one with the fewest.
        policy: makes the scheduling policy of an engine; None: first come, first served.
        clock: gives the cost of a step, of an engine with stages on each; None: the deployment's step-time model.
        predict: predicts the number of tokens of a request for the router; None: the mean of those that ended.
        governor: caps the power of all engines together; None: no cap.
        host: seconds until the device of an engine that has nothing to do begins with a request.

    Raises:
        DeploymentError: the model does not fit, or a request is longer than the engines' sequences.
    """
    if trace.longest > deployment.spec.max_len:
        raise DeploymentError(
            f"the longest request of {trace.name} has {trace.longest:,} tokens; the engines' sequences have "
            f"{deployment.spec.max_len:,}: give max_len = {trace.longest} or more."
        )
    engines = [
        SimulatedEngine(deployment, clock, policy() if policy else None, host) for _ in range(deployment.engines)
    ]
    if governor is not None:
        if deployment.engine.stages > 1:
            raise DeploymentError(
                f"{deployment.name}: a power cap is not simulated for pipeline stages; give a mesh without."
            )
        for number, one in enumerate(engines):
            one.runner.clock = governor.clock(number, one.runner)
    state, names = RouterState(router or ShortestQueue()), dict[str, int]()
    requests = [SimulatedRequest(one, RequestResult(one.at, one.at), n) for n, one in enumerate(trace.requests)]
    coming = _arrivals(trace)
    ended: list[tuple[float, int]] = []  # completions that the router does not know of yet
    while coming or any(one.engine.busy for one in engines):
        number = min((n for n, one in enumerate(engines) if one.engine.busy), key=lambda n: engines[n].runner.now,
                     default=None)  # fmt: skip
        if number is not None and (not coming or engines[number].runner.now < coming[0][0]):
            for one in engines[number].advance():
                heapq.heappush(ended, (one.result.end, one.index))
                if trace.clients is not None and len(coming) < len(trace.requests):
                    _next_client(coming, trace, one.result.end)
            continue
        now, index = heapq.heappop(coming)
        while ended and ended[0][0] <= now:
            past = requests[heapq.heappop(ended)[1]]
            state.ended(past.request.prompt, past.result.tokens)
        one = requests[index]
        one.result.due = one.result.sent = now
        one.predicted = predict(one.request) if predict else state.predict(one.request.prompt, deployment.spec.max_len)
        asked = one.request
        seen = RoutedRequest(asked.prompt, one.predicted, asked.prefix, asked.prefix_tokens, 0, asked.key)
        one.engine = 0
        if len(engines) > 1:
            one.engine = state.policy.choose(seen, [each.view(now) for each in engines])
        engines[one.engine].submit(one, token_ids(trace.requests, index, names), now)
    return Simulation(
        deployment,
        trace,
        requests,
        [one.runner.steps for one in engines],
        sum(one.engine.scheduler.hit_tokens for one in engines),
        sum(one.engine.scheduler.preemptions for one in engines),
    )


class _ClosedLoop(list):
    """Heap of arrivals whose further requests wait for a client."""

    left: list[int]


def _arrivals(trace: RequestTrace) -> list[tuple[float, int]]:
    """Heap of (time, index) of the arrivals that are known at the start."""
    if trace.clients is None:
        return [(one.at, index) for index, one in enumerate(trace.requests)]
    heap = _ClosedLoop((0.0, index) for index in range(min(trace.clients, len(trace.requests))))
    heap.left = list(range(len(trace.requests) - 1, len(heap) - 1, -1))
    return heap


def _next_client(coming: list[tuple[float, int]], trace: RequestTrace, now: float) -> None:
    """Sends the next request of a closed loop, if one is left."""
    if isinstance(coming, _ClosedLoop) and coming.left:
        heapq.heappush(coming, (now, coming.left.pop()))


def best_rate(serve: Callable[[float], float], share: float, low: float, high: float, tolerance: float = 0.05) -> float:
    """Largest rate at which at least ``share`` of the requests meet their objective, by bisection; 0 if ``low`` fails.

    Args:
        serve: share of the requests that meet it at a rate.
        share: share that is wanted.
        low, high: rates to search between; ``high`` is raised as long as it passes.
        tolerance: relative width of the last interval.
    """
    if serve(low) < share:
        return 0.0
    for _ in range(MOST_DOUBLINGS):
        if serve(high) < share:
            break
        low, high = high, 2 * high
    else:
        return low  # so many requests meet it at once
    while high > low * (1 + tolerance):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if serve(middle) >= share else (low, middle)
    return low


def rate_curve(
    serve: Callable[[RequestTrace], Simulation], trace: RequestTrace, slo: ServiceObjective, tolerance: float = 0.1
) -> tuple[float, list[tuple[float, dict[str, Any]]]]:
    """Knee of the goodput: the largest rate at which the objective's share of requests is met, and all rates tried.

    Args:
        serve: simulates a trace.
        trace: requests, whose arrival times are stretched.
        slo: objective.
        tolerance: relative width of the last interval.

    Returns:
        the knee in requests per second, 0 if there is none; (rate, figures) in the order of rates.
    """
    tried: dict[float, dict[str, Any]] = {}
    base = serve(trace.at_rate(trace.rate / 8))
    seconds = LATENCIES * float(np.median([one.end - one.due for one in base.results]))

    def share(rate: float) -> float:
        simulation = serve(trace.at_rate(rate, seconds))
        tried[rate] = simulation.figures(slo)
        return simulation.within(slo)

    knee = best_rate(share, slo.share, trace.rate / 8, trace.rate, tolerance)
    return knee, sorted(tried.items())
