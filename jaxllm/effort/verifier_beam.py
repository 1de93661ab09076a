"""Beam search under a verifier: keeps the best partial completions after every step (arXiv:2408.03314, section 5.1)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from jaxllm.effort.effort_policy import EffortPolicy, EffortSolution, best_of, for_verifier
from jaxllm.effort.sample_rounds import Candidate, EffortProblem, EffortTools, Rounds, SampleRequest
from jaxllm.effort.verifiers import AnyVerifier, LogprobVerifier, verifier_reserve, verify
from jaxllm.infer.sampling_params import SamplingParams


@dataclass(frozen=True)
class VerifierBeam(EffortPolicy):
    """Beam search whose steps are lines and whose score is a verifier's.

    It draws ``n`` first steps, keeps the ``n / branch`` partial completions that the verifier scores highest, draws
    ``branch`` next steps of each, and so on until all that are kept have ended. The beams' KV cache comes from the
    prefix cache.

    Attributes:
        n: number of partial completions after a step.
        branch: number of next steps drawn of each one that is kept; divides ``n``.
        verifier: scores partial and whole completions.
        step: string that ends a step.
        step_tokens: most tokens of a step.
        rounds: most steps.
    """

    n: int = 8
    branch: int = 4
    verifier: AnyVerifier = field(default_factory=LogprobVerifier)
    step: str = "\n"
    step_tokens: int = 64
    rounds: int = 40
    policy: Literal["verifier_beam"] = field(default="verifier_beam", kw_only=True)

    def __post_init__(self) -> None:
        if self.n < 1 or self.branch < 1 or self.n % self.branch:
            raise ValueError(
                f"verifier_beam: n = {self.n}, branch = {self.branch}; branch must divide n, both positive."
            )
        if not self.step or self.step_tokens < 1 or self.rounds < 1:
            raise ValueError("verifier_beam: give a step that is not empty, and step_tokens and rounds of 1 or more.")

    @property
    def width(self) -> int:
        """Sequences at a time."""
        return self.n

    def prepared(self, problem: EffortProblem) -> EffortProblem:
        """Problem with this policy's parameters; those with a state across steps are refused by name."""
        fresh = SamplingParams()
        for name in ("grammar", "min_tokens", "presence_penalty", "frequency_penalty"):
            if getattr(problem.params, name) != getattr(fresh, name):
                raise ValueError(f"{name} does not go with verifier_beam, whose steps are requests of their own.")
        return super().prepared(problem)

    def solve(self, problem: EffortProblem, tools: EffortTools) -> Rounds[EffortSolution]:
        """Searches and returns the completion of the largest score; of those that ended, if there are any."""
        beams: list[tuple[Candidate, float, bool]] = [(Candidate("", (), "length"), 0.0, False)]
        count = self.n
        for _ in range(self.rounds):
            live = [one for one, _, ended in beams if not ended]
            found = yield from tools.sample(
                [self._request(problem, one, count, i * count) for i, one in enumerate(live)]
            )
            grown = [
                self._grown(problem, one, more, tools) for one, some in zip(live, found, strict=True) for more in some
            ]
            grown = list({one.tokens: (one, ended) for one, ended in grown}.values())
            if not grown:
                break
            scores = yield from verify(self.verifier, problem, [one for one, _ in grown], tools)
            pool = [beam for beam in beams if beam[2]]
            pool += [(one, score, ended) for (one, ended), score in zip(grown, scores, strict=True)]
            beams = sorted(pool, key=lambda beam: -beam[1])[: self.n // self.branch]
            count = self.branch
            if all(ended for _, _, ended in beams):
                break
        # Without one that ended, the budget or the rounds ended first.
        done = [beam for beam in beams if beam[2]] or [(replace(one, finish="length"), s, True) for one, s, _ in beams]
        return best_of([one for one, _, _ in done], [score for _, score, _ in done], tools)

    def _request(self, problem: EffortProblem, one: Candidate, count: int, drawn: int) -> SampleRequest:
        """Request of the next steps after a partial completion."""
        params = replace(
            for_verifier(problem.params, self.verifier),
            n=count,
            stop=(*problem.params.stop, self.step),
            include_stop=True,
            max_tokens=min(self.step_tokens, problem.params.max_tokens - len(one.tokens)),
        )
        return SampleRequest(problem.prompt + one.tokens, params, self.model, drawn, verifier_reserve(self.verifier))

    def _grown(
        self, problem: EffortProblem, one: Candidate, more: Candidate, tools: EffortTools
    ) -> tuple[Candidate, bool]:
        """Partial completion with its next step, and whether it has ended."""
        params, whole = problem.params, one.tokens + more.tokens
        text = tools.decode(whole)
        # A stop string may begin in the step before.
        places = [(stop, text.find(stop, max(0, len(one.text) - len(stop) + 1))) for stop in params.stop]
        cuts = [at + len(stop) * params.include_stop for stop, at in places if at >= 0]
        ended = bool(cuts) or len(whole) >= params.max_tokens or (more.finish == "stop" and self.step not in more.text)
        return one.followed_by(more, text[: min(cuts)] if cuts else text), ended
