"""Sequential revision: the model sees its earlier answers and tries again (arXiv:2408.03314, section 6)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from jaxllm.effort.effort_policy import EffortPolicy, EffortSolution, best_of, for_verifier
from jaxllm.effort.sample_rounds import Candidate, EffortProblem, EffortTools, Rounds, SampleRequest
from jaxllm.effort.verifiers import AnyVerifier, LogprobVerifier, verifier_reserve, verify


@dataclass(frozen=True)
class Revision(EffortPolicy):
    """Sequential revision: chains of answers, each drawn after those before it; the verifier chooses among all.

    The ratio of ``chains`` (parallel) to ``revisions`` (sequential) is the paper's: easy prompts gain by revising, hard
    ones by several chains.

    Attributes:
        chains: number of chains.
        revisions: number of revisions of each chain, after its first answer.
        verifier: scores the answers.
        again: text between two answers of a chain; it may name special tokens, such as those of a chat template.
        context: most earlier answers that a revision sees.
        accept: a chain ends with an answer of at least this score; None: it does not.
    """

    chains: int = 2
    revisions: int = 3
    verifier: AnyVerifier = field(default_factory=LogprobVerifier)
    again: str = "\n\nThis answer may be wrong. A better answer:"
    context: int = 4
    accept: float | None = None
    policy: Literal["revision"] = field(default="revision", kw_only=True)

    def __post_init__(self) -> None:
        if self.chains < 1 or self.revisions < 0 or self.context < 1:
            raise ValueError(
                f"revision: chains = {self.chains}, revisions = {self.revisions}, context = {self.context}; give 1 or "
                "more chains and context, and 0 or more revisions."
            )

    @property
    def width(self) -> int:
        """Sequences at a time: one for each chain."""
        return self.chains

    def solve(self, problem: EffortProblem, tools: EffortTools) -> Rounds[EffortSolution]:
        """Runs the chains side by side and returns the answer of the largest score."""
        params, again = for_verifier(problem.params, self.verifier), tools.encode(self.again, specials=True)
        reserve = verifier_reserve(self.verifier)
        first = SampleRequest(problem.prompt, replace(params, n=self.chains), self.model, 0, reserve)
        (found,) = yield from tools.sample([first])
        scores = yield from verify(self.verifier, problem, found, tools)
        candidates, chains = list(found), [[one] for one in found]
        open_chains = [i for i, score in enumerate(scores) if not self._accepts(score)]
        for number in range(1, self.revisions + 1):
            prompts = {i: self._prompt(problem, chains[i], again, tools) for i in open_chains}
            prompts = {i: ids for i, ids in prompts.items() if len(ids) + params.max_tokens <= tools.max_len}
            drawn = [number * self.chains + i for i in prompts]
            asked = [
                SampleRequest(ids, params, self.model, n, reserve)
                for ids, n in zip(prompts.values(), drawn, strict=True)
            ]
            rows = yield from tools.sample(asked)
            revised = {i: row[0] for i, row in zip(prompts, rows, strict=True) if row}
            if not revised:
                break
            values = yield from verify(self.verifier, problem, list(revised.values()), tools)
            candidates += revised.values()
            scores += values
            for i, one in revised.items():
                chains[i].append(one)
            open_chains = [i for i, value in zip(revised, values, strict=True) if not self._accepts(value)]
        return best_of(candidates, scores, tools)

    def _accepts(self, score: float) -> bool:
        return self.accept is not None and score >= self.accept

    def _prompt(
        self, problem: EffortProblem, chain: list[Candidate], again: tuple[int, ...], tools: EffortTools
    ) -> tuple[int, ...]:
        """Prompt of a revision: the problem's, then the last answers with the text after each."""
        return problem.prompt + tuple(token for one in chain[-self.context :] for token in (*tools.said(one), *again))
