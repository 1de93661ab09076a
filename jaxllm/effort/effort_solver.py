"""Effort solver: runs effort policies over an ``LLM``."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from jaxllm.effort.effort_policy import EffortPolicy, EffortSolution
from jaxllm.effort.sample_rounds import Candidate, EffortProblem, EffortTools, Rounds, SampleRequest, T
from jaxllm.infer.embedder import Embedder, Pooling
from jaxllm.infer.llm import LLM, Prompt
from jaxllm.infer.sampling_params import SamplingParams


class EffortSolver:
    """Effort solver: spends tokens on prompts by a policy.

        solver = EffortSolver(LLM("smollm2"))
        (solution,) = solver.solve(BestOfN(8, ArithmeticVerifier()), ["12+34="], SamplingParams(max_tokens=8))
        print(solution.best.text, solution.tokens)

    Args:
        llm: main model.
        models: other models, by the names that policies give in ``model``; a name that is not here is an adapter of the
            main model.
        pooling: how hidden states become one vector, see ``Embedder``.
    """

    def __init__(self, llm: LLM, models: Mapping[str, LLM] | None = None, *, pooling: Pooling = "last"):
        self.llm, self.models = llm, dict(models or {})
        self.pooling: Pooling = pooling

    @functools.cached_property
    def _embedder(self) -> Embedder:
        loaded = self.llm.loaded
        return Embedder(loaded.model, loaded.params, self.llm.engine.max_len, loaded.mesh)

    def embed(self, ids: Sequence[int]) -> np.ndarray:
        """Hidden state of the main model after token ids, float32 [D] of norm 1."""
        return self._embedder(list(ids), self.pooling)

    def problems(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[EffortProblem]:
        """Problems of prompts; ``params`` are the sampling parameters of all, or one for each.

        Raises:
            ValueError: there are more or fewer parameters than prompts.
        """
        if isinstance(params, SamplingParams) or params is None:
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(
                f"{len(params)} params are given for {len(prompts)} prompts; give one for all, or for each."
            )
        out = []
        for prompt, one in zip(prompts, params, strict=True):
            ids = tuple(self.llm.ids(prompt))
            out.append(EffortProblem(ids, prompt if isinstance(prompt, str) else self.llm.tokenizer.decode(ids), one))
        return out

    def solve(
        self,
        policy: EffortPolicy,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[EffortSolution]:
        """Solves prompts by a policy, batched by the engine; in the order of the prompts.

        Args:
            policy: how tokens are spent.
            prompts: texts or token ids.
            params: sampling parameters of one completion, for all prompts or one for each.

        Raises:
            ValueError: a parameter does not go with the policy, or the engine refuses a request.
        """
        tools = EffortTools(self.llm.tokenizer, self.embed, self.llm.engine.max_len)
        return self.run(policy.solve_all(self.problems(prompts, params), tools))

    def run(self, rounds: Rounds[T]) -> T:
        """Answers the rounds of a generator and returns its result."""
        try:
            requests = next(rounds)
            while True:
                requests = rounds.send(self._answer(requests))
        except StopIteration as end:
            return end.value

    def _answer(self, requests: Sequence[SampleRequest]) -> list[list[Candidate]]:
        """Candidates of each request; those of one model run together."""
        found: dict[int, list[Candidate]] = {}
        for name in dict.fromkeys(request.model if request.model in self.models else "" for request in requests):
            llm = self.models.get(name, self.llm)
            mine = [i for i, one in enumerate(requests) if (one.model if one.model in self.models else "") == name]
            adapters = [None if name else requests[i].model or None for i in mine]
            completions = llm.generate(
                [list(requests[i].prompt) for i in mine], [requests[i].params for i in mine], adapter=adapters
            )
            for i, completion in zip(mine, completions, strict=True):
                found[i] = [Candidate.of(output) for output in completion.outputs]
        return [found[i] for i in range(len(requests))]
