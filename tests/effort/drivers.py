"""Drivers of effort policies for tests: a scripted model, and a tiny random one in an engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.convert.load import LoadedModel
from jaxllm.effort.effort_policy import EffortPolicy, EffortSolution
from jaxllm.effort.effort_solver import EffortSolver
from jaxllm.effort.sample_rounds import Candidate, EffortProblem, EffortTools, Rounds, SampleRequest, T
from jaxllm.infer import LLM, SamplingParams
from jaxllm.text.byte_tokenizer import ByteTokenizer
from tests.serve import servers

TOKENIZER = ByteTokenizer()


class ScriptedModel:
    """Model whose completions a function writes: (prompt, number of the sample of this prompt) -> text.

    Attributes:
        requests: all requests that it answered, by round.
        generated: tokens that it generated.
    """

    def __init__(
        self,
        write: Callable[[str, int], str],
        hidden: Callable[[Sequence[int]], Any] = lambda ids: [1.0],
        max_len: int = 10_000,
    ):
        self.write, self.hidden, self.max_len = write, hidden, max_len
        self.requests: list[list[SampleRequest]] = []
        self.counts: dict[str, int] = {}
        self.generated = 0

    def run(self, rounds: Rounds[T]) -> T:
        """Answers the rounds of a generator."""
        answers: Any = None
        while True:
            try:
                asked = rounds.send(answers)
            except StopIteration as end:
                return end.value
            self.requests.append(asked)
            answers = [self._answer(request) for request in asked]

    def solve(
        self, policy: EffortPolicy, prompts: Sequence[str], params: SamplingParams | None = None
    ) -> list[EffortSolution]:
        """Solves prompts by a policy."""
        problems = [
            EffortProblem(tuple(TOKENIZER.encode(text).tolist()), text, params or SamplingParams(max_tokens=16))
            for text in prompts
        ]
        tools = EffortTools(TOKENIZER, lambda ids: np.asarray(self.hidden(ids), np.float32), self.max_len)
        return self.run(policy.solve_all(problems, tools))

    def _answer(self, request: SampleRequest) -> list[Candidate]:
        prompt, out = TOKENIZER.decode(list(request.prompt)), list[Candidate]()
        assert request.params.n >= 1
        for _ in range(request.params.n):
            number = self.counts[prompt] = self.counts.get(prompt, -1) + 1
            text = self.write(prompt, number)
            stops = [text.index(stop) + len(stop) for stop in request.params.stop if stop in text]
            text = text[: min(stops, default=len(text))]
            tokens = [*TOKENIZER.encode(text).tolist(), *([] if stops else [TOKENIZER.eos_id])]
            finish = "stop" if len(tokens) <= request.params.max_tokens else "length"
            tokens = tokens[: request.params.max_tokens]
            self.generated += len(tokens)
            stopped = next((stop for stop in request.params.stop if text.endswith(stop)), None)
            if stopped is not None and not request.params.include_stop:
                text = text.removesuffix(stopped)
            logprobs = tuple(-0.1 * (1 + token % 7) for token in tokens)
            wanted = request.params.logprobs is not None
            shown = text if finish == "stop" else TOKENIZER.decode(tokens)
            out.append(Candidate(shown, tuple(tokens), finish, logprobs if wanted else ()))
        return out


@functools.cache
def tiny_solver() -> EffortSolver:
    """Solver over a tiny random model of bytes, in the engine that the server's tests use."""
    engine = servers.tiny_engine()
    llm = LLM.__new__(LLM)  # over an engine that is there
    llm.engine, llm.tokenizer = engine, TOKENIZER
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    llm.loaded = LoadedModel(engine.runner.model, engine.runner.params, TOKENIZER, None, mesh, 0, {}, None)  # type: ignore[attr-defined]
    return EffortSolver(llm)
