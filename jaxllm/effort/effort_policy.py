"""Effort policy: how the tokens of a budget are spent on a prompt to get one good completion."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from jaxllm.effort.sample_rounds import (
    Candidate,
    EffortProblem,
    EffortTools,
    Rounds,
    SampleRequest,
    lockstep,
)
from jaxllm.effort.verifiers import verifier_reserve, wants_logprobs
from jaxllm.infer.sampling_params import SamplingParams

POLICIES: list[type[EffortPolicy]] = []
"""Table of policies, one row each; ``policy_table`` fills it. JSON names a class by the default of its ``policy``."""


@dataclass(frozen=True)
class SamplingOverrides:
    """Sampling parameters that a policy sets; None: those of the request. See ``SamplingParams``."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    stop: tuple[str, ...] | None = None

    def apply(self, params: SamplingParams) -> SamplingParams:
        """Sampling parameters with these in place.

        Raises:
            ValueError: a value is not legal.
        """
        own = {one.name: getattr(self, one.name) for one in fields(self)}
        return replace(params, **{name: value for name, value in own.items() if value is not None})


@dataclass(frozen=True)
class EffortSolution:
    """Solution of a problem: the chosen candidate, and all that were drawn.

    Attributes:
        best: chosen candidate.
        score: its score under the policy: the verifier's, or its answer's share of votes.
        candidates: all candidates, in the order in which they were drawn.
        tokens: tokens that were generated for it, those of judges included.
    """

    best: Candidate
    score: float
    candidates: tuple[Candidate, ...]
    tokens: int


@dataclass(frozen=True, kw_only=True)
class EffortPolicy(ABC):
    """Effort policy: generates candidates for a problem and chooses one.

    Attributes:
        sampling: sampling parameters that the policy sets.
        model: model that samples: "" is the main one; otherwise one of the solver's other models, or an adapter.
        budget: most tokens that may be generated for a prompt, candidates and judges together; None: no limit.
    """

    sampling: SamplingOverrides = field(default_factory=SamplingOverrides)
    model: str = ""
    budget: int | None = None

    @abstractmethod
    def solve(self, problem: EffortProblem, tools: EffortTools) -> Rounds[EffortSolution]:
        """Solves one problem, whose parameters ``prepared`` has set, with the budget of ``tools``."""

    def solve_all(self, problems: Sequence[EffortProblem], tools: EffortTools) -> Rounds[list[EffortSolution]]:
        """Solves problems side by side, each with a budget of its own; in the order of the problems."""
        ready = [self.prepared(problem) for problem in problems]
        return (yield from lockstep([self.solve(one, tools.with_budget(self.budget)) for one in ready]))

    def prepared(self, problem: EffortProblem) -> EffortProblem:
        """Problem with this policy's sampling parameters.

        Raises:
            ValueError: the request has a parameter that does not go with a policy, or nothing fits the budget.
        """
        params, fresh = self.sampling.apply(problem.params), SamplingParams()
        for name in ("n", "best_of", "beams", "echo", "prompt_logprobs"):
            if getattr(params, name) != getattr(fresh, name):
                raise ValueError(
                    f"{name} = {getattr(params, name)!r} does not go with an effort policy, which chooses one "
                    f"completion itself; leave it at {getattr(fresh, name)!r}."
                )
        least = params.max_tokens + verifier_reserve(getattr(self, "verifier", None))
        if self.budget is not None and self.budget < least:
            raise ValueError(
                f"budget = {self.budget} tokens, and a completion may take {least} (max_tokens = {params.max_tokens}): "
                "not one fits. Give a larger budget, or a smaller max_tokens (in the policy: sampling.max_tokens)."
            )
        return replace(problem, params=params)

    @property
    def width(self) -> int:
        """Largest number of sequences that one prompt has in the engine at a time."""
        return 1


def draw(
    policy: EffortPolicy,
    problem: EffortProblem,
    tools: EffortTools,
    count: int,
    drawn: int = 0,
    verifier: object = None,
) -> Rounds[list[Candidate]]:
    """Draws candidates of a problem; fewer where the budget ends.

    Args:
        drawn: number of candidates drawn before.
        verifier: verifier that will score them: it may need log-probabilities, or tokens of its own.
    """
    request = SampleRequest(
        problem.prompt, for_verifier(replace(problem.params, n=count), verifier), policy.model, drawn,
        verifier_reserve(verifier),
    )  # fmt: skip
    (found,) = yield from tools.sample([request])
    return found


def for_verifier(params: SamplingParams, verifier: object) -> SamplingParams:
    """Sampling parameters with log-probabilities, if a verifier reads them."""
    return replace(params, logprobs=0) if wants_logprobs(verifier) and params.logprobs is None else params


def best_of(candidates: Sequence[Candidate], scores: Sequence[float], tools: EffortTools) -> EffortSolution:
    """Solution that chooses the candidate of the largest score, the first of equals."""
    best = max(range(len(candidates)), key=lambda i: scores[i])
    return EffortSolution(candidates[best], scores[best], tuple(candidates), tools.budget.spent)
