"""Effort policies over an engine: what is prefilled, seeds, and verifiers that ask the engine."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jaxllm.effort import BestOfN, JudgeVerifier, LogprobVerifier
from jaxllm.infer import SamplingParams
from tests.effort.drivers import tiny_solver
from tests.proofs.harness import proof


def prompt_of(rng: np.random.Generator) -> str:
    """A prompt of 1 to 150 letters."""
    return "".join(map(chr, rng.integers(97, 123, rng.integers(1, 151))))


@proof("effort", count=40, sample=2)
def shared_prefixes_are_prefilled_once(seed: int) -> None:
    """Prompt tokens that the engine computes: the prompt, and its last token again for each further candidate.

    In waves, the prompt comes from the prefix cache, but for its last page.
    """
    solver, rng = tiny_solver(), np.random.default_rng(seed)
    engine, prompt, n = solver.llm.engine, prompt_of(rng), int(rng.integers(2, 10))
    params = SamplingParams(max_tokens=int(rng.integers(1, 12)), seed=seed)
    length, page = len(solver.llm.ids(prompt)), engine.config.page_size
    before = engine.metrics.prompt_tokens
    (found,) = solver.solve(BestOfN(n, LogprobVerifier()), [prompt], params)
    assert len(found.candidates) == n
    assert engine.metrics.prompt_tokens - before == length + n - 1
    before, hits = engine.metrics.prompt_tokens, engine.scheduler.hit_tokens
    solver.solve(BestOfN(n, LogprobVerifier(), wave=1), [prompt], params)
    cached = (length - 1) // page * page
    assert engine.scheduler.hit_tokens - hits >= n * cached
    assert engine.metrics.prompt_tokens - before == n * length - (engine.scheduler.hit_tokens - hits)


@proof("effort", count=40, sample=2)
def log_probability_is_the_engines_best_of(seed: int) -> None:
    """Best-of-N by log-probability gives the tokens and bits of ``SamplingParams.best_of``; seeded waves draw the same.

    Token budgets are kept, whatever they cut.
    """
    solver, rng = tiny_solver(), np.random.default_rng(seed)
    prompt, n = prompt_of(rng), int(rng.integers(1, 8))
    params = SamplingParams(max_tokens=int(rng.integers(1, 12)), temperature=float(rng.uniform(0.3, 1.5)), seed=seed)
    (found,) = solver.solve(BestOfN(n, LogprobVerifier()), [prompt], params)
    (want,) = solver.llm.generate(prompt, dataclasses.replace(params, best_of=n, logprobs=0))
    assert (found.best.tokens, found.best.logprobs) == (want.outputs[0].tokens, want.outputs[0].logprobs)
    wave = int(rng.integers(1, n + 1))
    (waves,) = solver.solve(BestOfN(n, LogprobVerifier(), wave=wave), [prompt], params)
    assert [one.tokens for one in waves.candidates] == [one.tokens for one in found.candidates]
    budget = int(rng.integers(params.max_tokens, 5 * params.max_tokens + 1))
    generated = solver.llm.engine.metrics.generated_tokens
    (cut,) = solver.solve(BestOfN(n, LogprobVerifier(), budget=budget), [prompt], params)
    assert solver.llm.engine.metrics.generated_tokens - generated == cut.tokens <= budget


@proof("effort", count=20, sample=1, bound=1e-12)
def judges_return_the_probability_of_yes(seed: int) -> float:
    """The score is softmax over the log-probabilities of the two answers, and its tokens are in the budget."""
    solver, rng = tiny_solver(), np.random.default_rng(seed)
    prompt, judge = prompt_of(rng), JudgeVerifier(question=" ok?", yes="y", no="n")
    params = SamplingParams(max_tokens=6, seed=seed, ignore_eos=True)
    (found,) = solver.solve(BestOfN(3, judge, budget=3 * 8), [prompt], params)
    assert found.tokens == 3 * (6 + 2)
    ids = solver.llm.ids(prompt) + solver.llm.tokenizer.encode(found.best.text + " ok?").tolist()
    values = []
    for answer in "yn":
        forced = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, allowed_tokens=(ord(answer),))
        values.append(solver.llm.generate([ids], forced)[0].outputs[0].logprobs[0])
    return abs(found.score - math.exp(values[0]) / (math.exp(values[0]) + math.exp(values[1])))
