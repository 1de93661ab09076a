"""Adaptive best-of-k: samples go to the prompts where the next one helps most (arXiv:2410.04707)."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from jaxllm.effort.effort_policy import EffortPolicy, EffortSolution, best_of, draw
from jaxllm.effort.sample_rounds import Candidate, EffortProblem, EffortTools, Rounds, lockstep
from jaxllm.effort.success_probe import SuccessProbe
from jaxllm.effort.verifiers import AnyVerifier, LogprobVerifier, verifier_reserve, verify


@dataclass(frozen=True)
class AdaptiveBestOfK(EffortPolicy):
    """Adaptive best-of-k: a probe predicts the probability p of a success; the k-th sample gains p(1-p)^(k-1).

    Prompts that are solved together share their budgets: samples are given greedily, each where its gain is largest,
    which is optimal because gains decrease. A prompt alone, or all of them without a budget, has the samples whose gain
    is at least ``price``.

    Attributes:
        probe: predicts success from the prompt's hidden state.
        price: smallest gain that is worth a sample.
        verifier: chooses among the samples.
        most, least: largest and smallest number of samples of a prompt.
    """

    probe: SuccessProbe
    price: float
    verifier: AnyVerifier = field(default_factory=LogprobVerifier)
    most: int = 16
    least: int = 1
    policy: Literal["adaptive_best_of_k"] = field(default="adaptive_best_of_k", kw_only=True)

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most or not 0 < self.price < 1:
            raise ValueError(
                f"adaptive_best_of_k: least = {self.least}, most = {self.most}, price = {self.price}; give 1 <= least "
                "<= most, and a price between 0 and 1."
            )

    @property
    def width(self) -> int:
        """Sequences at a time: the most samples of a prompt."""
        return self.most

    def success(self, problem: EffortProblem, tools: EffortTools) -> float:
        """Predicted probability that a sample succeeds."""
        return self.probe.predict(tools.embed(problem.prompt))

    def solve(self, problem: EffortProblem, tools: EffortTools) -> Rounds[EffortSolution]:
        """Draws the samples that are worth their price, and chooses the best."""
        count = samples_at_price(self.success(problem, tools), self.price, most=self.most, least=self.least)
        candidates, scores = list[Candidate](), list[float]()
        yield from self._draw(problem, tools, candidates, scores, count)
        return best_of(candidates, scores, tools)

    def solve_all(self, problems: Sequence[EffortProblem], tools: EffortTools) -> Rounds[list[EffortSolution]]:
        """Solves problems together: their budgets are one, whose samples go where they help most."""
        if self.budget is None or len(problems) == 1:
            return (yield from super().solve_all(problems, tools))
        ready = [self.prepared(problem) for problem in problems]
        shared = tools.with_budget(self.budget * len(ready))
        success = np.array([self.success(problem, tools) for problem in ready])
        reserve = verifier_reserve(self.verifier)
        longest = max(one.params.max_tokens for one in ready) + reserve
        candidates: list[list[Candidate]] = [[] for _ in ready]
        scores: list[list[float]] = [[] for _ in ready]
        while True:
            # Completions that were shorter than max_tokens leave room for more.
            taken = np.array([len(some) for some in candidates])
            room = shared.budget.fits(longest, self.most * len(ready))
            more = allocate_samples(success, room, most=self.most, least=self.least, taken=taken)
            if not more.any():
                break
            yield from lockstep(
                [self._draw(one, shared, candidates[i], scores[i], int(more[i])) for i, one in enumerate(ready)]
            )
        solutions = []
        for some, values in zip(candidates, scores, strict=True):
            best = int(np.argmax(values))
            tokens = sum(len(one.tokens) + reserve for one in some)
            solutions.append(EffortSolution(some[best], values[best], tuple(some), tokens))
        return solutions

    def _draw(
        self, problem: EffortProblem, tools: EffortTools, candidates: list[Candidate], scores: list[float], count: int
    ) -> Rounds[None]:
        """Adds samples of a problem and their scores."""
        if not count:
            return
        found = yield from draw(self, problem, tools, count, len(candidates), self.verifier)
        candidates += found
        scores += yield from verify(self.verifier, problem, found, tools)


def gain(success: float, samples: int) -> float:
    """Gain of one sample more after some: the probability that it is the first to succeed."""
    return success * (1 - success) ** samples


def samples_at_price(success: float, price: float, *, most: int, least: int) -> int:
    """Number of samples whose gain is at least a price."""
    count = least
    while count < most and gain(success, count) >= price:
        count += 1
    return count


def allocate_samples(
    success: Float[np.ndarray, " N"], total: int, *, most: int, least: int, taken: Int[np.ndarray, " N"] | None = None
) -> Int[np.ndarray, " N"]:
    """Samples for each prompt that maximise the expected number of prompts with a success.

    Gains decrease with the number of samples, so giving each to the largest gain is optimal; the first prompt of equals
    has it.

    Args:
        success: probability that a sample succeeds.
        total: number of samples to give.
        most, least: bounds of each prompt's number, those before included.
        taken: samples that prompts had before; None: none.

    Raises:
        ValueError: ``total`` is less than ``least`` for each.
    """
    before = np.zeros(len(success), int) if taken is None else taken
    given = np.maximum(least - before, 0)
    if given.sum() > total:
        raise ValueError(f"{total} samples are fewer than {least} for each of {len(success)} prompts.")
    heap = [
        (-gain(float(p), int(k)), i) for i, (p, k) in enumerate(zip(success, before + given, strict=True)) if k < most
    ]
    heapq.heapify(heap)
    for _ in range(total - int(given.sum())):
        if not heap:
            break
        _, i = heapq.heappop(heap)
        given[i] += 1
        if (k := int(before[i] + given[i])) < most:
            heapq.heappush(heap, (-gain(float(success[i]), k), i))
    return given


def price_of(success: Float[np.ndarray, " N"], samples: float, *, most: int, least: int = 1) -> float:
    """Price at which prompts with these probabilities have this many samples on average: the smallest gain taken.

    Raises:
        ValueError: there is no such average within the bounds.
    """
    if not least <= samples <= most:
        raise ValueError(f"samples = {samples} on average; give {least} to {most}.")
    gains = sorted((gain(float(p), k) for p in success for k in range(least, most)), reverse=True)
    count = round((samples - least) * len(success))
    return min(max(gains[count - 1], sys.float_info.min), 1 - 1e-12) if count else 1 - 1e-12
