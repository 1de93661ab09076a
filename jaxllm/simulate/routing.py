"""Router policies: pure functions that choose the engine of a request; the simulator runs them over its engines.

A policy sees what a router sees: the requests that it has sent to each engine and not yet got back, and how far their
streams are. ``ROUTERS`` has them by name. The default sends each request to the engine with the fewest requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from jaxllm.infer.scheduling.policies import LengthPredictor

LOW_PRIORITY = "low"
"""Key of requests of low priority, see ``ByPriority``."""


@dataclass(frozen=True)
class RoutedRequest:
    """Request as a router sees it.

    Attributes:
        prompt: prompt length in tokens.
        predicted: predicted number of generated tokens.
        prefix: name of the prefix that it shares; empty: none.
        prefix_tokens: length of that prefix.
        generated: tokens that its stream has delivered; 0 while it waits or its prompt is computed.
        key: client that sends it.
    """

    prompt: int
    predicted: float
    prefix: str = ""
    prefix_tokens: int = 0
    generated: int = 0
    key: str = ""

    @property
    def remaining(self) -> float:
        """Tokens that it is still expected to generate, at least one."""
        return max(1.0, self.predicted - self.generated)


@dataclass(frozen=True)
class EngineView:
    """Engine as a router sees it.

    Attributes:
        active: requests that it has and has not ended.
        prefixes: prefixes of the requests that it has got so far.
    """

    active: Sequence[RoutedRequest]
    prefixes: frozenset[str] = frozenset()

    @property
    def queued_prompt(self) -> int:
        """Prompt tokens of the requests without a first token yet, shared prefixes counted once."""
        waiting = [one for one in self.active if not one.generated]
        cached = self.prefixes
        return sum(one.prompt - (one.prefix_tokens if one.prefix in cached else 0) for one in waiting)


@runtime_checkable
class Router(Protocol):
    """Router policy; it may keep state between requests."""

    def choose(self, request: RoutedRequest, engines: Sequence[EngineView]) -> int:
        """Index of the engine that gets the request."""
        ...


@dataclass
class RoundRobin:
    """Engines in turn."""

    next: int = 0

    def choose(self, request: RoutedRequest, engines: Sequence[EngineView]) -> int:
        """Index of the next engine in turn."""
        chosen, self.next = self.next % len(engines), self.next + 1
        return chosen


@dataclass(frozen=True)
class ShortestQueue:
    """Engine with the fewest requests."""

    def choose(self, request: RoutedRequest, engines: Sequence[EngineView]) -> int:
        """Index of the engine with the fewest active requests; the first of several."""
        return min(range(len(engines)), key=lambda n: (len(engines[n].active), n))


@dataclass(frozen=True)
class PrefixAware:
    """Engine that has the request's prefix in its cache, unless it is clearly more loaded than another.

    Attributes:
        slack: requests that the engine with the prefix may have more than the least loaded one, and as a share of it.
    """

    slack: int = 4
    share: float = 0.25

    def choose(self, request: RoutedRequest, engines: Sequence[EngineView]) -> int:
        """Index of the least loaded engine among those with the prefix; of all, where none may take it."""
        loads = [len(one.active) for one in engines]
        most = min(loads) * (1 + self.share) + self.slack
        holders = [n for n, one in enumerate(engines) if request.prefix in one.prefixes and loads[n] <= most]
        return min(holders or range(len(engines)), key=lambda n: (loads[n], n))


@dataclass(frozen=True)
class MixingPenalty:
    """Length predictor and mixing penalty (Intelligent Router, arXiv:2408.13510): least expected delay.

    The expected cost of an engine is in seconds of its step times: the work that is queued before the request, and the
    penalty of mixing its prefill into the steps of those that decode there, and their decoding with its own.

    Attributes:
        prefill: seconds per prompt token.
        sequence: seconds that a sequence adds to a decode step.
    """

    prefill: float = 1e-4
    sequence: float = 2e-4

    def choose(self, request: RoutedRequest, engines: Sequence[EngineView]) -> int:
        """Index of the engine with the least expected delay."""
        return min(range(len(engines)), key=lambda n: (self.cost(request, engines[n]), n))

    def cost(self, request: RoutedRequest, engine: EngineView) -> float:
        """Seconds that the request waits there, and that it costs the requests that are there."""
        own = request.prompt - (request.prefix_tokens if request.prefix in engine.prefixes else 0)
        decoding = sum(one.generated > 0 for one in engine.active)
        # Its own decode steps are longer by a sequence's time for each one that decodes beside it, and theirs likewise.
        beside = sum(min(request.predicted, one.remaining) for one in engine.active)
        # Its prefill delays every sequence that decodes.
        return self.prefill * (engine.queued_prompt + own * (1 + decoding)) + 2 * self.sequence * beside


@dataclass(frozen=True)
class ByPriority:
    """Engines of two classes: requests of the key ``low`` go to the first of them, all others to the rest.

    Attributes:
        low: number of engines for requests of low priority.
    """

    low: int

    def choose(self, request: RoutedRequest, engines: Sequence[EngineView]) -> int:
        """Index of the engine of the request's class with the fewest requests."""
        own = range(self.low) if request.key == LOW_PRIORITY else range(self.low, len(engines))
        return min(own, key=lambda n: (len(engines[n].active), n))


ROUTERS = {
    "round-robin": RoundRobin,
    "shortest-queue": ShortestQueue,
    "prefix-aware": PrefixAware,
    "mixing-penalty": MixingPenalty,
}
"""Router policies by name."""


@dataclass
class RouterState:
    """Router with its length predictor.

    Attributes:
        policy: router policy.
        lengths: lengths of the completions that ended.
    """

    policy: Router
    lengths: LengthPredictor = field(default_factory=LengthPredictor)

    def predict(self, prompt: int, most: int) -> float:
        """Predicted number of tokens, from the completions that ended before."""
        return self.lengths.predict(prompt, most)

    def ended(self, prompt: int, generated: int) -> None:
        """Records the length of a completion."""
        self.lengths = self.lengths.with_completion(prompt, generated)
