"""Rounds of sampling: how effort policies ask an engine for completions without knowing which engine answers.

A policy is a generator. It yields the requests of a round, receives their candidates, and returns its result. A driver
answers the rounds: ``EffortSolver`` with an ``LLM``, the HTTP server with its asynchronous engine. Several generators
become one by ``lockstep``, so that the engine batches the requests of all prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from jaxllm.infer.llm import Output
from jaxllm.infer.sampling_params import SEEDS, SamplingParams
from jaxllm.text import Tokenizer

T = TypeVar("T")
SEED_STRIDE = 0x9E3779B1
"""Distance between the seeds of a request's completions, the engine's: a seeded policy that draws two samples twice
gets the four samples that one request of four gives."""


@dataclass(frozen=True)
class EffortProblem:
    """Problem: a prompt that a policy spends tokens on.

    Attributes:
        prompt: token ids.
        text: text of the prompt, for verifiers.
        params: sampling parameters of one completion.
    """

    prompt: tuple[int, ...]
    text: str
    params: SamplingParams


@dataclass(frozen=True)
class SampleRequest:
    """Request of a round: ``params.n`` samples that continue a prompt.

    Attributes:
        prompt: token ids.
        params: sampling parameters.
        model: model that samples: "" is the main one; otherwise one of the driver's other models, or an adapter of the
            main one.
        drawn: number of samples that this prompt had before; a seeded request goes on after them.
        reserve: tokens that each sample costs beside its own, such as those of a judge.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    model: str = ""
    drawn: int = 0
    reserve: int = 0


@dataclass(frozen=True)
class Candidate:
    """Candidate: a completion of a problem.

    Attributes:
        text: its text.
        tokens: its tokens, the stop token included.
        finish: finish reason, see ``Output``.
        logprobs: log-probabilities of the tokens, if requested.
        top: top tokens at each position and their log-probabilities, if requested.
        origin: the engine's request, where the driver keeps it.
    """

    text: str
    tokens: tuple[int, ...]
    finish: str
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    origin: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, output: Output, origin: Any = None) -> Candidate:
        """Candidate of an engine's output."""
        return cls(output.text, output.tokens, output.finish, output.logprobs, output.top, origin)

    def followed_by(self, other: Candidate, text: str) -> Candidate:
        """This candidate and its continuation; ``text`` is that of both."""
        return replace(
            other,
            text=text,
            tokens=self.tokens + other.tokens,
            logprobs=self.logprobs + other.logprobs,
            top=self.top + other.top,
        )


Rounds = Generator[list[SampleRequest], list[list[Candidate]], T]
"""Generator that yields the requests of a round, receives the candidates of each, and returns a result."""


@dataclass
class TokenBudget:
    """Token budget: the most tokens that may be generated, and those that were.

    Attributes:
        total: most tokens; None: no limit.
        spent: tokens that were generated.
    """

    total: int | None = None
    spent: int = 0

    def fits(self, tokens: int, count: int) -> int:
        """Number of samples of at most this many tokens, up to ``count``, that fit into what is left."""
        return count if self.total is None else max(0, min(count, (self.total - self.spent) // tokens))


@dataclass(frozen=True)
class EffortTools:
    """Tools of a policy: the tokenizer, hidden states, and the token budget.

    Attributes:
        tokenizer: tokenizer of the model.
        embed: hidden state after some token ids, float32 [D] of norm 1.
        max_len: most tokens of a sequence, prompt included.
        budget: token budget that its samples are charged to.
    """

    tokenizer: Tokenizer
    embed: Callable[[Sequence[int]], np.ndarray]
    max_len: int
    budget: TokenBudget = field(default_factory=TokenBudget)

    def with_budget(self, total: int | None) -> EffortTools:
        """The same tools with a fresh budget."""
        return replace(self, budget=TokenBudget(total))

    def encode(self, text: str, *, specials: bool = False) -> tuple[int, ...]:
        """Token ids of a text that continues another; ``specials``: names of special tokens in it are those tokens.

        A policy's own texts, such as a question to a judge, may name special tokens: those of a chat template. What a
        model or a client wrote never does.
        """
        # Such tokenizers prepend a space themselves.
        text = text.removeprefix(" ") if self.tokenizer.prefix_space else text
        return tuple(int(i) for i in self.tokenizer.encode(text, specials=specials))

    def fill(self, template: str, step: str) -> tuple[int, ...]:
        """Token ids of a policy's text with "{step}" replaced; only the policy's own words may name special tokens."""
        before, found, after = template.partition("{step}")
        ids = self.encode(before, specials=True)
        return ids + self.encode(step) + self.encode(after, specials=True) if found else ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of a completion's tokens, without special tokens."""
        return self.tokenizer.decode(list(tokens))

    def said(self, candidate: Candidate) -> tuple[int, ...]:
        """Tokens of a candidate without the token that ended it, for a text that goes on after it."""
        ended = candidate.finish == "stop" and candidate.tokens[-1:] and candidate.tokens[-1] in self.tokenizer.stop_ids
        return candidate.tokens[:-1] if ended else candidate.tokens

    def sample(self, requests: Sequence[SampleRequest]) -> Rounds[list[list[Candidate]]]:
        """Asks for one round of samples, as many as the budget has room for at their full length, and charges them.

        The full length is charged when it is granted, so that generators side by side can share a budget.

        Returns:
            the candidates of each request; fewer than requested, or none, where the budget ends.
        """
        granted, asked, held = list[int](), list[SampleRequest](), 0
        for request in requests:
            cost = request.params.max_tokens + request.reserve
            count = self.budget.fits(cost, request.params.n)
            self.budget.spent += count * cost
            held += count * cost
            granted.append(count)
            if count:
                seed = request.params.seed
                later = None if seed is None else (seed + request.drawn * SEED_STRIDE) % SEEDS
                asked.append(replace(request, params=replace(request.params, n=count, seed=later)))
        answers: Iterator[list[Candidate]] = iter((yield asked) if asked else ())
        found = [next(answers) if count else [] for count in granted]
        self.budget.spent += sum(len(one.tokens) for some in found for one in some) - held
        return found


def lockstep(solvers: Sequence[Rounds[T]]) -> Rounds[list[T]]:
    """Runs generators side by side: their n-th rounds are one round, which the engine batches.

    Returns:
        their results, in order.
    """
    results: dict[int, T] = {}
    answers: dict[int, list[list[Candidate]] | None] = dict.fromkeys(range(len(solvers)))
    while answers:
        rounds: dict[int, list[SampleRequest]] = {}
        for number, answer in answers.items():
            try:
                rounds[number] = solvers[number].send(answer)  # type: ignore[arg-type]  # None begins a generator
            except StopIteration as end:
                results[number] = end.value
        if rounds:
            found = iter((yield [request for requests in rounds.values() for request in requests]))
            answers = {number: [next(found) for _ in requests] for number, requests in rounds.items()}
        else:
            answers = {}
    return [results[number] for number in range(len(solvers))]
