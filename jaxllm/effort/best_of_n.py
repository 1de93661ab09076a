"""Best-of-N: draws N candidates and returns the one that a verifier scores highest (arXiv:2110.14168)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jaxllm.effort.effort_policy import EffortPolicy, EffortSolution, best_of, draw
from jaxllm.effort.sample_rounds import Candidate, EffortProblem, EffortTools, Rounds
from jaxllm.effort.verifiers import AnyVerifier, LogprobVerifier, verify


@dataclass(frozen=True)
class BestOfN(EffortPolicy):
    """Best-of-N under a verifier. The prompt is prefilled once for all candidates.

    Attributes:
        n: number of candidates.
        verifier: scores them.
        accept: with ``wave``: a candidate of at least this score ends the drawing; None: all are drawn.
        wave: number of candidates drawn at a time; 0: all at once.
    """

    n: int = 8
    verifier: AnyVerifier = field(default_factory=LogprobVerifier)
    accept: float | None = None
    wave: int = 0
    policy: Literal["best_of_n"] = field(default="best_of_n", kw_only=True)

    def __post_init__(self) -> None:
        if self.n < 1 or self.wave < 0:
            raise ValueError(
                f"best_of_n: n = {self.n}, wave = {self.wave}; give n of 1 or more, and wave of 0 or more."
            )
        if self.accept is not None and not self.wave:
            raise ValueError("best_of_n: accept needs wave, the number of candidates that are drawn at a time.")

    @property
    def width(self) -> int:
        """Sequences at a time: a wave."""
        return min(self.n, self.wave or self.n)

    def solve(self, problem: EffortProblem, tools: EffortTools) -> Rounds[EffortSolution]:
        """Draws candidates in waves and chooses the best."""
        candidates, scores = list[Candidate](), list[float]()
        while len(candidates) < self.n:
            count = min(self.wave or self.n, self.n - len(candidates))
            found = yield from draw(self, problem, tools, count, len(candidates), self.verifier)
            if not found:
                break
            candidates += found
            scores += yield from verify(self.verifier, problem, found, tools)
            if self.accept is not None and max(scores) >= self.accept:
                break
        return best_of(candidates, scores, tools)
