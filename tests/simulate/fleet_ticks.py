"""Brute-force simulation of a small fleet, tick by tick: replicas of one slot whose steps take a constant time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from jaxllm.simulate.fleet.replica_failures import ReplicaFailures

TICK = 1 / 1024
"""Seconds of a tick: a power of two, so that sums of ticks are exact in floating point."""


@dataclass(frozen=True)
class ListedFailures(ReplicaFailures):
    """Failures at given times: (ticks of work, ticks of repair) of each replica by number; the others never fail."""

    listed: Mapping[int, list[tuple[int, int]]] = field(default_factory=dict)

    def lives(self, replica: int) -> Iterator[tuple[float, float]]:
        """See ``ReplicaFailures``."""
        return iter([(works * TICK, repair * TICK) for works, repair in self.listed.get(replica, [])])


@dataclass
class TickRequest:
    """Request: arrival, tokens that it asks for, ticks of its tokens, its end, whether it failed, and how often it was
    sent again; (tick, tokens delivered before) of each prefill.
    """

    at: int
    tokens: int
    delivered: list[int] = field(default_factory=list)
    end: int = -1
    failed: bool = False
    tries: int = 0
    prefills: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class TickReplica:
    """Replica: state, requests in their order (the first one is served), tick of the next token, later changes."""

    lives: list[tuple[int, int]]
    state: str = "starting"
    queue: list[int] = field(default_factory=list)
    token_at: int = -1
    ready_at: int = -1
    fails_at: int = -1
    repair: int = 0
    served: int = -1


@dataclass
class TickScaler:
    """Autoscaler as the HPA documents it, in exact numbers; times in ticks."""

    least: int
    most: int
    target: Fraction
    period: int
    up: int
    down: int
    tolerance: Fraction
    start: int
    history: list[tuple[int, int]] = field(default_factory=list)

    def decide(self, now: int, readings: list[int], starting: int, failed: int) -> int:
        """Number of replicas that there shall be."""
        current = len(readings) + starting + failed
        wanted = current
        if readings:
            values = [Fraction(one) for one in readings]
            mean = sum(values) / len(values)
            if mean > self.target:
                values += [Fraction(0)] * (starting + failed)
            elif mean < self.target:
                values += [self.target] * failed
            ratio = sum(values) / len(values) / self.target
            turned = mean > self.target > sum(values) / len(values)
            if abs(ratio - 1) > self.tolerance and not turned:
                wanted = math.ceil(ratio * len(values))
                if (ratio > 1 and wanted < current) or (ratio < 1 and wanted > current):
                    wanted = current
        self.history.append((now, wanted))
        low = min(n for at, n in self.history if now - at <= self.up)
        high = max(n for at, n in self.history if now - at <= self.down)
        found = low if current < low else high if current > high else current
        return min(max(min(found, max(2 * current, current + 4)), self.least), self.most)


def run_ticks(
    requests: list[TickRequest],
    replicas: int,
    step: int,
    failures: ListedFailures,
    scaler: TickScaler | None,
    in_turn: bool = False,
) -> list[TickReplica]:
    """Serves requests, tick by tick; fills them in and returns all replicas that there were.

    Args:
        requests: in the order of their arrival.
        replicas: number at the start.
        step: ticks of a token.
        failures: failures, and what becomes of requests.
        scaler: autoscaler; None: the number stays.
        in_turn: replicas in turn instead of the one with the fewest requests.
    """
    begin, turn = requests[0].at, 0
    fleet = [TickReplica(list(failures.listed.get(n, []))) for n in range(replicas)]
    lobby: list[int] = []
    counts: set[int] = set()

    def work(one: TickReplica, now: int) -> None:
        one.state = "ready"
        if one.lives:
            works, one.repair = one.lives.pop(0)
            one.fails_at = now + works

    def send(index: int, now: int) -> None:
        nonlocal turn
        ready = [one for one in fleet if one.state == "ready"]
        if not ready and failures.requests == "fail":
            requests[index].end, requests[index].failed = now, True
        elif not ready:
            lobby.append(index)
        elif in_turn and len(ready) > 1:
            ready[turn % len(ready)].queue.append(index)
            turn += 1
        else:
            min(ready, key=lambda one: len(one.queue)).queue.append(index)

    def fail(one: TickReplica, now: int) -> None:
        lost, one.queue, one.token_at, one.fails_at = sorted(one.queue), [], -1, -1
        one.served = -1
        if one.state == "draining":
            one.state = "removed"
        else:
            one.state, one.ready_at = "failed", now + one.repair
        for index in lost:
            request = requests[index]
            if (
                failures.requests == "fail"
                or (failures.requests == "retry" and request.delivered)
                or request.tries == failures.retries
            ):
                request.end, request.failed = now, True
            else:
                request.tries += 1
                send(index, now)

    def look(now: int) -> None:
        assert scaler is not None
        live = [one for one in fleet if one.state in ("starting", "ready", "failed")]
        readings = [len(one.queue) for one in live if one.state == "ready"]
        wanted = scaler.decide(
            now, readings, sum(one.state == "starting" for one in live), sum(one.state == "failed" for one in live)
        )
        for _ in range(wanted - len(live)):
            fleet.append(TickReplica(list(failures.listed.get(len(fleet), [])), ready_at=now + scaler.start))
        for state in ("starting", "failed", "ready"):
            for one in reversed([one for one in live if one.state == state]):
                if sum(other.state in ("starting", "ready", "failed") for other in fleet) > wanted:
                    one.ready_at = -1
                    one.state = "draining" if one.queue else "removed"
                    one.fails_at = one.fails_at if one.queue else -1

    for one in fleet:
        work(one, begin)
    if scaler is not None:
        scaler.history.append((begin, replicas))
    now = begin
    while any(one.end < 0 for one in requests):
        for one in fleet:
            if one.token_at == now:
                request = requests[one.queue[0]]
                request.delivered.append(now)
                if len(request.delivered) == request.tokens:
                    request.end = now
                    one.queue.pop(0)
        for one in fleet:
            if one.ready_at == now and one.state in ("starting", "failed"):
                one.ready_at = -1
                work(one, now)
                waiting, lobby[:] = list(lobby), []
                for index in waiting:
                    send(index, now)
        for one in fleet:
            if one.state == "draining" and not one.queue:
                one.state, one.fails_at = "removed", -1
        for one in fleet:
            if one.fails_at == now:
                fail(one, now)
        if scaler is not None and now > begin and (now - begin) % scaler.period == 0:
            look(now)
        for index, request in enumerate(requests):
            if request.at == now:
                send(index, now)
        for one in fleet:
            if one.queue and one.token_at <= now:
                one.token_at = now + step
                if one.served != one.queue[0]:
                    one.served, request = one.queue[0], requests[one.queue[0]]
                    request.prefills.append((now, len(request.delivered)))
        counts.add(sum(one.state in ("starting", "ready", "failed") for one in fleet))
        now += 1
    if scaler is not None:
        assert all(scaler.least <= count <= scaler.most for count in counts)
    return fleet
