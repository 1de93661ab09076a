"""Simulation of pipelined speculation: speculative runs flow through the stages of one model (PipeInfer).

PipeInfer (arXiv:2407.11798) serves one request with a model that is split into pipeline stages on several devices, and
a draft model on another. Synchronous speculation drafts, sends one run through all stages, and waits for it: one stage
works at a time. PipeInfer drafts all the time and sends each few tokens as a run of their own behind those in flight.
Where a token turns out wrong, the runs behind it are invalid; they are cancelled in flight: a stage that computes one
stops at once, and no further stage begins it.

This is a simulation of the runs, of their tokens and of time: what a stage computes is a function that gives the next
token. Tokens are verified as they come out of the last stage, so that what is simulated is greedy decoding, token by
token. Nothing here runs a model: the engine does (``jaxllm.infer.stages``), whose stages complete what they began.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

NextToken = Callable[[Many[int]], int]
"""Next token after these, greedily."""


@dataclass(frozen=True)
class PipelineCosts:
    """Costs of a pipeline and its draft model.

    Attributes:
        stages: number of stages.
        stage: seconds of a stage for a run of one token.
        row: seconds of a stage for each further token of a run.
        draft: seconds of the draft model for a token.
    """

    stages: int = 4
    stage: float = 1.0
    row: float = 0.0
    draft: float = 0.25

    def __post_init__(self) -> None:
        if self.stages < 1 or self.stage <= 0 or min(self.row, self.draft) < 0:
            raise ValueError(f"{self}: give 1 stage or more, a positive stage time, and row and draft of 0 or more.")

    def seconds(self, tokens: int) -> float:
        """Seconds of a stage for a run."""
        return self.stage + self.row * (tokens - 1)


@dataclass
class SpeculationOutcome:
    """Outcome of a simulated request.

    Attributes:
        tokens: generated tokens.
        seconds: until the last was known.
        stage_steps: runs that stages have begun to compute, each counted once for each stage.
        runs: runs that were sent.
        cancelled: those of them that became invalid in flight.
    """

    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    stage_steps: int = 0
    runs: int = 0
    cancelled: int = 0

    @property
    def latency(self) -> float:
        """Seconds a token."""
        return self.seconds / len(self.tokens)


def synchronous_speculation(
    target: NextToken, draft: NextToken, prompt: Many[int], tokens: int, costs: PipelineCosts, length: int
) -> SpeculationOutcome:
    """Simulates speculation that drafts, and then waits for the verification.

    Args:
        target, draft: the two models.
        prompt: known tokens, of which the last is yet to be read.
        tokens: number of tokens to generate.
        length: draft tokens of a verification; 0: plain decoding.
    """
    known, out = list(prompt), SpeculationOutcome()
    while len(known) < len(prompt) + tokens:
        drafted = list[int]()
        for _ in range(length):
            drafted.append(draft([*known, *drafted]))
        out.seconds += length * costs.draft + costs.stages * costs.seconds(1 + length)
        out.stage_steps += costs.stages
        out.runs += 1
        for token in [*drafted, None]:
            known.append(target(known))
            if known[-1] != token:
                break
    out.tokens = known[len(prompt) :][:tokens]
    return out


def pipelined_speculation(
    target: NextToken,
    draft: NextToken,
    prompt: Many[int],
    tokens: int,
    costs: PipelineCosts,
    *,
    batch: int = 4,
    ahead: int | None = None,
    cancel: bool = True,
) -> SpeculationOutcome:
    """Simulates asynchronous speculation through a pipeline.

    Args:
        target, draft, prompt, tokens: see ``synchronous_speculation``.
        batch: most tokens of a run.
        ahead: most drafted tokens that are not verified yet; None: those of one run more than there are stages.
        cancel: runs that become invalid are cancelled in flight; otherwise they flow through all stages.
    """
    if batch < 1 or (ahead is not None and ahead < 0):
        raise ValueError(f"batch = {batch}, ahead = {ahead}: give a run 1 token or more, and 0 or more ahead.")
    return _Pipeline(target, draft, prompt, tokens, costs, batch, ahead, cancel).simulate()


@dataclass(eq=False)
class _Run:
    """Run: the tokens from ``start`` on that it reads; ``valid`` until a token before its end is found wrong."""

    start: int
    count: int
    valid: bool = True


class _Pipeline:
    """Pipeline with a run in each stage at most, and queues between them."""

    def __init__(
        self,
        target: NextToken,
        draft: NextToken,
        prompt: Many[int],
        tokens: int,
        costs: PipelineCosts,
        batch: int,
        ahead: int | None,
        cancel: bool,
    ):
        self.target, self.draft, self.costs, self.batch, self.cancel = target, draft, costs, batch, cancel
        self.known, self.drafted, self.first = list(prompt), list[int](), len(prompt)
        self.goal, self.ahead = len(prompt) + tokens, batch * (costs.stages + 1) if ahead is None else ahead
        self.sent = len(prompt) - 1  # tokens before this have been sent in valid runs
        self.queues = [deque[_Run]() for _ in range(costs.stages)]
        self.working: list[_Run | None] = [None] * costs.stages
        self.events: list[tuple[float, int, int, Callable[[], None]]] = []
        self.numbers, self.now, self.out = itertools.count(), 0.0, SpeculationOutcome()
        self.drafting: object | None = None

    def simulate(self) -> SpeculationOutcome:
        """Runs until all tokens are known."""
        self._start_idle()
        while len(self.known) < self.goal:
            self.now, _, _, happen = heapq.heappop(self.events)
            happen()
            if len(self.known) < self.goal:
                self._start_idle()
        self.out.tokens, self.out.seconds = self.known[self.first : self.goal], self.now
        return self.out

    def _after(self, seconds: float, order: int, happen: Callable[[], None]) -> None:
        """Something happens later; of what happens at one time, that of the smallest ``order`` first."""
        heapq.heappush(self.events, (self.now + seconds, order, next(self.numbers), happen))

    def _start_idle(self) -> None:
        """Starts whatever is idle and has something to do: the draft model, a run, the stages."""
        if self.drafting is None and len(self.drafted) < self.ahead:
            context, self.drafting = [*self.known, *self.drafted], object()
            own = self.drafting
            self._after(self.costs.draft, 1, lambda: self._drafted(own, context))
        there = len(self.known) + len(self.drafted) - self.sent
        if there and self.working[0] is None and not self.queues[0]:
            run = _Run(self.sent, min(there, self.batch))
            self.sent += run.count
            self.out.runs += 1
            self.queues[0].append(run)
        for stage, queue in enumerate(self.queues):
            while self.working[stage] is None and queue:
                run = queue.popleft()
                if self.cancel and not run.valid:
                    continue
                self.working[stage] = run
                self.out.stage_steps += 1
                happen = functools.partial(self._computed, stage, run)
                self._after(self.costs.seconds(run.count), -stage, happen)

    def _drafted(self, own: object, context: list[int]) -> None:
        if own is self.drafting:  # or the draft was of tokens that were wrong
            self.drafting = None
            self.drafted.append(self.draft(context))

    def _computed(self, stage: int, run: _Run) -> None:
        if self.working[stage] is not run:
            return  # cancelled
        self.working[stage] = None
        if stage + 1 < len(self.queues):
            self.queues[stage + 1].append(run)
        elif run.valid:
            self._verify(run)

    def _verify(self, run: _Run) -> None:
        """Takes the tokens after those of a run, up to the first that was drafted wrong."""
        for place in range(run.start + 1, run.start + run.count + 1):
            assert place == len(self.known)
            token = self.target(self.known)
            self.known.append(token)
            if self.drafted and self.drafted[0] == token:
                self.drafted.pop(0)
            elif self.drafted or self.drafting is not None:
                self._restart()
                return
            elif place < run.start + run.count:
                raise AssertionError("a run has a token that was not drafted")

    def _restart(self) -> None:
        """Forgets what was drafted after a wrong token, and makes the runs behind it invalid."""
        self.drafted.clear()
        self.drafting = None
        self.sent = len(self.known) - 1
        for run in [*(run for queue in self.queues for run in queue), *self.working]:
            if run is not None and run.valid:
                run.valid = False
                self.out.cancelled += 1
        if self.cancel:
            self.working = [run if run is None or run.valid else None for run in self.working]
