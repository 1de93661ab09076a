"""Majority voting: self-consistency over the answers of several candidates (arXiv:2203.11171)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from jaxllm.effort.effort_policy import EffortPolicy, EffortSolution, draw
from jaxllm.effort.sample_rounds import Candidate, EffortProblem, EffortTools, Rounds
from jaxllm.effort.verifiers import NUMBER, AnyVerifier, verify


@dataclass(frozen=True)
class Majority(EffortPolicy):
    """Majority: the answer that most candidates give; with a verifier, the answer of the largest sum of scores.

    The chosen candidate is, of those with this answer, the one of the largest score, or the first.

    Attributes:
        n: number of candidates.
        answer: regular expression of an answer: the last match in the text, its first group where it has one.
        verifier: weights of the votes (weighted majority); None: each counts 1.
    """

    n: int = 8
    answer: str = NUMBER
    verifier: AnyVerifier | None = None
    policy: Literal["majority"] = field(default="majority", kw_only=True)

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"majority: n = {self.n}; give 1 or more.")
        try:
            re.compile(self.answer)
        except re.error as error:
            raise ValueError(f"answer = {self.answer!r} is not a regular expression: {error}.") from None

    @property
    def width(self) -> int:
        """Sequences at a time: all candidates."""
        return self.n

    def solve(self, problem: EffortProblem, tools: EffortTools) -> Rounds[EffortSolution]:
        """Draws candidates and lets their answers vote; one without an answer has no vote."""
        candidates, weights = list[Candidate](), list[float]()
        while len(candidates) < self.n:
            missing = self.n - len(candidates)
            found = yield from draw(self, problem, tools, missing, len(candidates), self.verifier)
            if not found:
                break
            candidates += found
            if self.verifier is None:
                weights += [1.0] * len(found)
            else:
                weights += yield from verify(self.verifier, problem, found, tools)
        votes: dict[str, float] = {}
        answers = [self.answer_of(one.text) for one in candidates]
        for answer, weight in zip(answers, weights, strict=True):
            if answer is not None:
                votes[answer] = votes.get(answer, 0.0) + weight
        if not votes:
            return EffortSolution(candidates[0], 0.0, tuple(candidates), tools.budget.spent)
        winner = max(votes, key=votes.__getitem__)
        best = max((i for i, answer in enumerate(answers) if answer == winner), key=weights.__getitem__)
        return EffortSolution(candidates[best], votes[winner], tuple(candidates), tools.budget.spent)

    def answer_of(self, text: str) -> str | None:
        """Answer that a text gives; None if it gives none."""
        found = list(re.finditer(self.answer, text))
        if not found:
            return None
        return (found[-1].group(1) if found[-1].re.groups else found[-1].group()).strip()
