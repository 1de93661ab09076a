"""Fleet simulator: engines behind a router that fail, are repaired, start and are removed, as discrete events.

    found = simulate_fleet(deployment, trace, failures=ReplicaFailures(3600, 120))
    found.figures(ServiceObjective())["fleet"]["availability"]

Events are those of ``jaxllm.simulate.simulate``, and a replica's failure, its being ready, the end of its drain, and a
look of the autoscaler. At one time a step's result comes first, then replicas that are ready or drained, failures, the
autoscaler, arrivals, and the next step. A failure is noticed at once: the connections break. Without failures and with
as many replicas at least as at most, the result is that of ``simulate``, to the bit.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from jaxllm.infer.scheduling.policies import Policy
from jaxllm.serve.load_benchmark import RequestResult
from jaxllm.simulate.deployment import Deployment, DeploymentError
from jaxllm.simulate.fleet.autoscaler import AutoscalePolicy, Autoscaler
from jaxllm.simulate.fleet.replica_failures import ReplicaFailures
from jaxllm.simulate.fleet.simulated_replica import ReplicaState, SimulatedReplica
from jaxllm.simulate.paper_runner import StepClock
from jaxllm.simulate.power import PowerModel
from jaxllm.simulate.request_trace import RequestTrace, TraceRequest, token_ids
from jaxllm.simulate.routing import RoutedRequest, Router, RouterState, ShortestQueue
from jaxllm.simulate.simulator import ServiceObjective, SimulatedEngine, SimulatedRequest, Simulation
from jaxllm.simulate.staged.staged_paper_runner import StageClock

READY, DRAINED, FAILURE, LOOK = range(4)
"""Kinds of events of replicas, in the order in which those of one time happen."""

PAID: tuple[ReplicaState, ...] = ("starting", "ready", "failed", "draining")
"""States in which a replica's devices are paid for."""

NO_REPLICA = "no replica was ready"
REPLICA_FAILED = "its replica failed"
STREAM_BROKE = "its replica failed after the first token"
OFTEN_FAILED = "its replicas failed more often than it may be sent again"


@dataclass
class FleetSimulation(Simulation):
    """Simulated service of a fleet; ``engines`` has the steps of each replica.

    Attributes:
        timeline: (seconds, replicas in each state of ``PAID``) from each change on.
        failures: failures of replicas.
        resent: times that a request was sent to a replica again.
    """

    timeline: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    failures: int = 0
    resent: int = 0

    @property
    def begin(self) -> float:
        """Time of the first arrival."""
        return min(one.sent for one in self.results)

    @property
    def end(self) -> float:
        """Time of the last end of a request."""
        return max(one.end for one in self.results)

    @property
    def shown(self) -> dict[str, int]:
        """See ``Simulation``: the replica with the most steps."""
        most = max(range(len(self.engines)), key=lambda n: len(self.engines[n]))
        return {f"Batches of replica {most}": most}

    def intervals(self) -> list[tuple[float, dict[str, int]]]:
        """(length in seconds, replicas in each state) of the times between two changes, up to the end."""
        end = self.end
        cut = [*(min(at, end) for at, _ in self.timeline[1:]), end]
        return [(after - min(at, end), counts) for (at, counts), after in zip(self.timeline, cut, strict=True)]

    def replica_seconds(self, *states: ReplicaState) -> float:
        """Seconds that replicas were in some states, added up."""
        return math.fsum(length * sum(counts[one] for one in states) for length, counts in self.intervals())

    @property
    def availability(self) -> float:
        """Share of their time that replicas were ready, of the time that they were ready or failed."""
        ready = self.replica_seconds("ready", "draining")
        return ready / ((ready + self.replica_seconds("failed")) or 1.0)

    def figures(self, slo: ServiceObjective, power: PowerModel | None = None) -> dict[str, Any]:
        """Figures of the service, see ``Simulation``, and ``fleet``: availability, replicas, lost requests, hours.

        Shares and costs are of the seconds that replicas were paid for, and of the tokens of served requests.
        """
        assert isinstance(self.deployment, Deployment)
        found = super().figures(slo, power)
        seconds, paid = found["seconds"], self.replica_seconds(*PAID)
        counts = [sum(counts[one] for one in PAID) for length, counts in self.intervals() if length > 0]
        served = sum(one.tokens for one in self.results if not one.error)
        per_hour, hours = self.deployment.dollars_per_hour, paid / 3600
        dollars = None if per_hour is None else per_hour / self.deployment.engines * hours
        joules = None if found["kilowatt_hours"] is None else found["kilowatt_hours"] * 3.6e6
        mean = paid / seconds
        devices = mean * self.deployment.engine_devices
        nobody = math.fsum(length for length, one in self.intervals() if not one["ready"])
        return found | {
            "devices": devices,
            "goodput_per_device": found["goodput"] / devices,
            "busy": found["busy"] * len(self.engines) / mean,
            "dollars_per_million_tokens": None if dollars is None else dollars / served * 1e6,
            "joules_per_token": None if joules is None else joules / served,
            "fleet": {
                "availability": self.availability,
                "without_replica": nobody / seconds,
                "failures": self.failures,
                "lost": found["failed"],
                "resent": self.resent,
                "replicas": mean,
                "fewest": min(counts),
                "most": max(counts),
                "replica_hours": hours,
                "dollars": dollars,
            },
        }

    def joules(self, seconds: float, power: PowerModel) -> float | None:
        """See ``Simulation``: replicas idle while they are paid for and take no step."""
        assert isinstance(self.deployment, Deployment)
        costs = [step.cost for own in self.engines for step in own]
        return self.deployment.joules(costs, self.replica_seconds(*PAID), power)


def simulate_fleet(
    deployment: Deployment,
    trace: RequestTrace,
    *,
    failures: ReplicaFailures | None = None,
    autoscale: AutoscalePolicy | None = None,
    router: Router | None = None,
    policy: Callable[[], Policy] | None = None,
    clock: StepClock | StageClock | None = None,
    predict: Callable[[TraceRequest], float] | None = None,
    host: float = 0.0,
) -> FleetSimulation:
    """Simulates the service of a trace by replicas that fail, and whose number follows the load.

    Args:
        deployment: replicas that are ready at the start: its engines; a further one is another engine of the kind.
        trace: requests.
        failures: failures of replicas; None: none fails.
        autoscale: policy of the autoscaler; None: the number of replicas stays.
        router, policy, clock, predict, host: see ``jaxllm.simulate.simulate``; the router sees the ready replicas.

    Raises:
        DeploymentError: the model does not fit, a request is longer than the engines' sequences, or the autoscaler's
            limits leave out the number of replicas at the start.
    """
    if trace.longest > deployment.spec.max_len:
        raise DeploymentError(
            f"the longest request of {trace.name} has {trace.longest:,} tokens; the engines' sequences have "
            f"{deployment.spec.max_len:,}: give max_len = {trace.longest} or more."
        )
    if autoscale is not None and not autoscale.min <= deployment.engines <= autoscale.max:
        raise DeploymentError(
            f"autoscale: {deployment.engines} replicas at the start are not between min={autoscale.min} and "
            f"max={autoscale.max}: give as many devices or --replicas as lie between them."
        )
    made = _Fleet(deployment, trace, failures, autoscale, RouterState(router or ShortestQueue()), predict)
    made.engine = lambda: SimulatedEngine(deployment, clock, policy() if policy else None, host)
    return made.run()


class _Fleet:
    """State of a simulated fleet."""

    engine: Callable[[], SimulatedEngine]

    def __init__(
        self,
        deployment: Deployment,
        trace: RequestTrace,
        failures: ReplicaFailures | None,
        autoscale: AutoscalePolicy | None,
        router: RouterState,
        predict: Callable[[TraceRequest], float] | None,
    ):
        self.deployment, self.trace, self.router, self.predict = deployment, trace, router, predict
        self.failures, self.autoscale = failures, autoscale
        self.begin = trace.requests[0].at if trace.clients is None else 0.0
        self.requests = [
            SimulatedRequest(one, RequestResult(one.at, one.at), n) for n, one in enumerate(trace.requests)
        ]
        self.coming = [(one.at, n) for n, one in enumerate(trace.requests)]
        self.unsent: list[int] = []  # requests of a closed loop that wait for a client, last one first
        self.followed: dict[int, int] = {}  # request of a closed loop -> the one that its client sends next
        if trace.clients is not None:
            first = min(trace.clients, len(trace.requests))
            self.coming = [(0.0, n) for n in range(first)]
            self.unsent = list(range(len(trace.requests) - 1, first - 1, -1))
        self.ended: list[tuple[float, int]] = []  # completions that the router does not know of yet
        self.waiting: list[int] = []  # requests that wait for a replica to be ready
        self.tries = [0] * len(trace.requests)
        self.names: dict[str, int] = {}
        self.replicas: list[SimulatedReplica] = []
        self.events: list[tuple[float, int, int, int]] = []  # (seconds, kind, replica, its version)
        self.scaler = None if autoscale is None else Autoscaler(autoscale, self.begin, deployment.engines)
        self.found = FleetSimulation(deployment, trace, self.requests, [])

    def run(self) -> FleetSimulation:
        """Simulates all events until no request is left."""
        for _ in range(self.deployment.engines):
            self._become_ready(self._new_replica(), self.begin)
        self._record(self.begin)
        if self.autoscale is not None:
            heapq.heappush(self.events, (self.begin + self.autoscale.period, LOOK, -1, 0))
        while True:
            busy = min((one for one in self.replicas if one.busy), key=lambda one: one.now, default=None)
            step = math.inf if busy is None else busy.now
            arrival = self.coming[0][0] if self.coming else math.inf
            if busy is None and not self.coming and not self.waiting and self._all_is_past():
                break
            if self.events and self.events[0][0] <= min(step, arrival):
                self._handle(*heapq.heappop(self.events))
            elif busy is not None and step < arrival:
                self._advance(busy)
            else:
                now, index = heapq.heappop(self.coming)
                self._arrive(self.requests[index], now)
        found = self.found
        found.engines = [one.steps for one in self.replicas]
        for one in self.replicas:
            engine = one.engine
            found.hit_tokens += one.hit_tokens + (0 if engine is None else engine.engine.scheduler.hit_tokens)
            found.preemptions += one.preemptions + (0 if engine is None else engine.engine.scheduler.preemptions)
        return found

    def _all_is_past(self) -> bool:
        """Whether no event comes before the last result that an engine gives."""
        return not self.events or self.events[0][0] >= max(one.now for one in self.replicas)

    def _record(self, now: float) -> None:
        counts = {state: sum(one.state == state for one in self.replicas) for state in PAID}
        if not self.found.timeline or self.found.timeline[-1][1] != counts:
            self.found.timeline.append((now, counts))

    def _new_replica(self) -> SimulatedReplica:
        number = len(self.replicas)
        lives = iter(()) if self.failures is None else self.failures.lives(number)
        self.replicas.append(SimulatedReplica(number, lives))
        return self.replicas[-1]

    def _become_ready(self, replica: SimulatedReplica, now: float) -> None:
        replica.state, replica.engine = "ready", self.engine()
        works, replica.repair = next(replica.lives, (math.inf, 0.0))
        if works < math.inf:
            heapq.heappush(self.events, (now + works, FAILURE, replica.number, replica.version))

    def _handle(self, now: float, kind: int, number: int, version: int) -> None:
        """Handles an event of a replica, or a look of the autoscaler."""
        if kind == LOOK:
            self._look(now)
        elif self.replicas[number].version == version:
            replica = self.replicas[number]
            if kind == READY:
                self._become_ready(replica, now)
                waiting, self.waiting = self.waiting, []
                for index in waiting:
                    self._send(self.requests[index], now)
            elif kind == DRAINED:
                self._remove(replica, now)
            else:
                self._fail(replica, now)
        self._record(now)

    def _fail(self, replica: SimulatedReplica, now: float) -> None:
        """Fails a replica: it is repaired, unless it drained; its requests are sent again or end."""
        assert self.failures is not None
        self.found.failures += 1
        lost = replica.take_engine(now)
        self._take_back(lost)
        replica.version += 1
        if replica.state == "draining":
            replica.state = "removed"
        else:
            replica.state = "failed"
            heapq.heappush(self.events, (now + replica.repair, READY, replica.number, replica.version))
        for held in lost:
            one, what = self.requests[held.index], self.failures.requests
            if what == "fail":
                self._lose(one, now, REPLICA_FAILED)
            elif what == "retry" and one.result.chunks:
                self._lose(one, now, STREAM_BROKE)
            elif self.tries[one.index] == self.failures.retries:
                self._lose(one, now, OFTEN_FAILED)
            else:
                self.tries[one.index] += 1
                self.found.resent += 1
                self._send(one, now)

    def _take_back(self, lost: list[SimulatedRequest]) -> None:
        """Takes ends back that were known before their time: the router's knowledge, and what clients sent after."""
        again = {one.index for one in lost}
        self.ended = [one for one in self.ended if one[1] not in again]
        heapq.heapify(self.ended)
        unsent = {self.followed.pop(index) for index in again if index in self.followed}
        self.coming = [one for one in self.coming if one[1] not in unsent]
        heapq.heapify(self.coming)
        self.unsent = sorted([*self.unsent, *unsent], reverse=True)

    def _lose(self, one: SimulatedRequest, now: float, error: str) -> None:
        one.result.error, one.result.end = error, now
        one.result.tokens = one.delivered[-1] if one.delivered else 0
        self._follow(one, now)

    def _follow(self, one: SimulatedRequest, now: float) -> None:
        """Lets the client of an ended request send the next one of a closed loop, if one is left."""
        if self.unsent:
            self.followed[one.index] = self.unsent.pop()
            heapq.heappush(self.coming, (now, self.followed[one.index]))

    def _advance(self, replica: SimulatedReplica) -> None:
        """Lets a replica's engine take its next step."""
        assert replica.engine is not None
        for held in replica.engine.advance():
            heapq.heappush(self.ended, (held.result.end, held.index))
            self._follow(held, held.result.end)
        if replica.state == "draining" and not replica.busy:
            heapq.heappush(self.events, (replica.now, DRAINED, replica.number, replica.version))

    def _arrive(self, one: SimulatedRequest, now: float) -> None:
        """Handles the arrival of a request at the router."""
        while self.ended and self.ended[0][0] <= now:
            past = self.requests[heapq.heappop(self.ended)[1]]
            self.router.ended(past.request.prompt, past.result.tokens)
        one.result.due = one.result.sent = now
        one.predicted = (
            self.predict(one.request)
            if self.predict
            else self.router.predict(one.request.prompt, self.deployment.spec.max_len)
        )
        self._send(one, now)

    def _send(self, one: SimulatedRequest, now: float) -> None:
        """Sends a request to a ready replica; without one it waits or ends."""
        ready = [replica for replica in self.replicas if replica.state == "ready"]
        if not ready:
            if self.failures is not None and self.failures.requests == "fail":
                self._lose(one, now, NO_REPLICA)
            else:
                self.waiting.append(one.index)
            return
        there = one.delivered[-1] if one.delivered else 0
        asked = replace(one.request, prompt=one.request.prompt + there, tokens=one.request.tokens - there)
        chosen = ready[0]
        if len(ready) > 1:
            left = max(1.0, one.predicted - there) if there else one.predicted
            seen = RoutedRequest(asked.prompt, left, asked.prefix, asked.prefix_tokens, 0, asked.key)
            views = [replica.engine.view(now) for replica in ready if replica.engine is not None]
            chosen = ready[self.router.policy.choose(seen, views)]
        one.engine = chosen.number
        assert chosen.engine is not None
        # A request that is sent again has the tokens that were delivered in its prompt; its timing goes on.
        sent = replace(one, request=asked) if there else one
        chosen.engine.submit(sent, token_ids(self.trace.requests, one.index, self.names) + [0] * there, now)

    def _look(self, now: float) -> None:
        """Lets the autoscaler look at the ready replicas, and follows it."""
        assert self.scaler is not None
        policy = self.scaler.policy
        heapq.heappush(self.events, (now + policy.period, LOOK, -1, 0))
        live = [one for one in self.replicas if one.state in ("starting", "ready", "failed")]
        readings = [one.reading(policy.metric, now, policy.period) for one in live if one.state == "ready"]
        starting, failed = (sum(one.state == state for one in live) for state in ("starting", "failed"))
        wanted = self.scaler.decide(now, readings, starting, failed)
        for _ in range(wanted - len(live)):
            model = self.deployment.step_model
            seconds = policy.start_seconds(model.device_weight_bytes, model.hardware.disk)
            replica = self._new_replica()
            heapq.heappush(self.events, (now + seconds, READY, replica.number, replica.version))
        order: list[ReplicaState] = ["starting", "failed", "ready"]
        live.sort(key=lambda one: (order.index(one.state), -one.number))
        for replica in live[: max(0, len(live) - wanted)]:
            if replica.state == "ready" and replica.active(now):
                replica.state = "draining"
                if not replica.busy:
                    heapq.heappush(self.events, (replica.now, DRAINED, replica.number, replica.version))
            else:
                self._remove(replica, now)

    def _remove(self, replica: SimulatedReplica, now: float) -> None:
        """Removes a replica without requests."""
        assert not replica.active(now)
        replica.take_engine(now)
        replica.state, replica.version = "removed", replica.version + 1
