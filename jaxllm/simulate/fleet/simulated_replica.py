"""Simulated replica: an engine that may start, fail, be repaired, drain and be removed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from jaxllm.simulate.fleet.autoscaler import ScalingMetric
from jaxllm.simulate.paper_runner import SimulatedStep
from jaxllm.simulate.simulator import SimulatedEngine, SimulatedRequest

ReplicaState = Literal["starting", "ready", "failed", "draining", "removed"]
"""State of a replica; one that drains ends its requests and gets no new ones."""


@dataclass
class SimulatedReplica:
    """Replica of a fleet.

    Attributes:
        number: its number, in the order of creation.
        lives: (seconds that it works, seconds of repair) until it never fails again.
        state: state.
        engine: its engine; None while it starts or is repaired.
        past: steps of its engines before this one, without what a failure cut off.
        version: number of failures and removals, so that events from before are known as past.
        repair: seconds of its next repair.
        hit_tokens, preemptions: of its engines before this one.
    """

    number: int
    lives: Iterator[tuple[float, float]]
    state: ReplicaState = "starting"
    engine: SimulatedEngine | None = None
    past: list[SimulatedStep] = field(default_factory=list)
    version: int = 0
    repair: float = 0.0
    hit_tokens: int = 0
    preemptions: int = 0

    @property
    def steps(self) -> list[SimulatedStep]:
        """Steps of all its engines."""
        return self.past if self.engine is None else self.past + self.engine.runner.steps

    @property
    def busy(self) -> bool:
        """Whether its engine has a step to take."""
        return self.engine is not None and self.engine.engine.busy

    @property
    def now(self) -> float:
        """Seconds at which its engine knows the last result."""
        return float("-inf") if self.engine is None else self.engine.runner.now

    def active(self, now: float) -> list[SimulatedRequest]:
        """Requests that it has at a time, those included whose end the simulation already knows."""
        held = [] if self.engine is None else self.engine.held
        return [one for one in held if not one.result.end or one.result.end > now]

    def take_engine(self, now: float) -> list[SimulatedRequest]:
        """Takes the engine away at a time; returns the requests that it had then, in the order of the trace.

        Tokens that it would have delivered later are taken back, and a step in progress counts as far as it came.
        """
        if self.engine is None:
            return []
        lost = self.active(now)
        for one in lost:
            there = one.result.chunks
            kept = sum(at <= now for at in there)
            del there[kept:], one.delivered[kept:]
            one.result.tokens, one.result.end = 0, 0.0
        for step in self.engine.runner.steps:
            if step.start < now:
                share = (now - step.start) / step.cost.seconds if step.cost.seconds else 1.0
                self.past.append(step if share >= 1 else replace(step, cost=step.cost * share))
        self.hit_tokens += self.engine.engine.scheduler.hit_tokens
        self.preemptions += self.engine.engine.scheduler.preemptions
        self.engine = None
        return sorted(lost, key=lambda one: one.index)

    def reading(self, metric: ScalingMetric, now: float, period: float) -> float:
        """Metric of a ready replica, see ``AutoscalePolicy``; ``busy`` over the last period."""
        assert self.engine is not None
        if metric == "requests":
            return float(len(self.active(now)))
        if metric == "queue":
            return float(len(self.engine.engine.scheduler.waiting))
        steps = (one for one in reversed(self.engine.runner.steps) if one.start < now)  # one after the other in time
        if metric == "cache":
            last = next(steps, None)
            return last.cache_use if last is not None and self.active(now) else 0.0
        recent = itertools.takewhile(lambda one: one.start + one.cost.seconds > now - period, steps)
        return sum(min(one.start + one.cost.seconds, now) - max(one.start, now - period) for one in recent) / period
