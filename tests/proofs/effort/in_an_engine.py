"""Effort policies over an engine: what is prefilled, seeds, and verifiers that ask the engine."""

from __future__ import annotations

import asyncio
import dataclasses
import math

import numpy as np

from jaxllm.effort import (
    AdaptiveBestOfK,
    BestOfN,
    JudgeVerifier,
    LogprobVerifier,
    Majority,
    RegexVerifier,
    Revision,
    SelectiveAllocation,
    SuccessProbe,
    VerifierBeam,
)
from jaxllm.infer import SamplingParams
from jaxllm.infer.scheduling.policies import Service
from jaxllm.serve import effort_generation
from tests.effort.drivers import tiny_solver
from tests.infer.engines import check_books
from tests.proofs.harness import proof
from tests.serve import servers


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
    """Best-of-N by log-probability gives the completion of ``SamplingParams.best_of``; seeded waves draw the same.

    Token budgets are kept, whatever they cut.
    """
    solver, rng = tiny_solver(), np.random.default_rng(seed)
    prompt, n = prompt_of(rng), int(rng.integers(1, 8))
    params = SamplingParams(max_tokens=int(rng.integers(1, 12)), temperature=float(rng.uniform(0.3, 1.5)), seed=seed)
    (found,) = solver.solve(BestOfN(n, LogprobVerifier()), [prompt], params)
    (want,) = solver.llm.generate(prompt, dataclasses.replace(params, best_of=n, logprobs=0))
    assert found.best.tokens == want.outputs[0].tokens
    # In float32: the second prompt comes from the prefix cache, and its last token is computed in a smaller step.
    np.testing.assert_allclose(found.best.logprobs, want.outputs[0].logprobs, rtol=0, atol=1e-5)
    wave = int(rng.integers(1, n + 1))
    (waves,) = solver.solve(BestOfN(n, LogprobVerifier(), wave=wave), [prompt], params)
    assert [one.tokens for one in waves.candidates] == [one.tokens for one in found.candidates]
    budget = int(rng.integers(params.max_tokens, 5 * params.max_tokens + 1))
    generated = solver.llm.engine.metrics.generated_tokens
    (cut,) = solver.solve(BestOfN(n, LogprobVerifier(), budget=budget), [prompt], params)
    assert solver.llm.engine.metrics.generated_tokens - generated == cut.tokens <= budget


@proof("effort", count=20, sample=1, bound=1e-6)  # float32, in batches of other sizes
def judges_return_the_probability_of_yes(seed: int) -> float:
    """The score is softmax over the log-probabilities of the two answers, and its tokens are in the budget."""
    solver, rng = tiny_solver(), np.random.default_rng(seed)
    prompt, judge = prompt_of(rng), JudgeVerifier(question=" ok?", yes="y", no="n")
    params = SamplingParams(max_tokens=6, seed=seed, ignore_eos=True)
    (found,) = solver.solve(BestOfN(3, judge, budget=3 * 8), [prompt], params)
    assert found.tokens == 3 * (6 + 2)
    ids = [*solver.llm.ids(prompt), *found.best.tokens, *solver.llm.tokenizer.encode(" ok?").tolist()]
    values = []
    for answer in "yn":
        forced = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, allowed_tokens=(ord(answer),))
        values.append(solver.llm.generate([ids], forced)[0].outputs[0].logprobs[0])
    return abs(found.score - math.exp(values[0]) / (math.exp(values[0]) + math.exp(values[1])))


POLICIES = {
    one.policy: one
    for one in (
        BestOfN(5, wave=2),
        Majority(4, "[a-z]", RegexVerifier("e")),
        VerifierBeam(4, 2, step="e", step_tokens=5),
        Revision(2, 2, again=" no:"),
        AdaptiveBestOfK(SuccessProbe((0.1,) * 16, 0.0), 0.05),
        SelectiveAllocation(BestOfN(1), BestOfN(3), plan_tokens=12, yes="y", no="n", assess="{step}?", work="{step}:"),
    )
}


@proof("effort", cases=tuple(POLICIES), sample=2)
def python_and_http_give_the_same(name: str) -> None:
    """Seeded, a policy chooses the same tokens and spends as many over ``LLM`` as in the server's asynchronous engine.

    Several prompts at a time give what each gives alone. The engine's books are in order afterwards.
    """
    solver, params, policy = tiny_solver(), SamplingParams(max_tokens=12, seed=5), POLICIES[name]
    prompts = ["12+34=", "a prompt of more than two pages of eight tokens", "e"]
    found = solver.solve(policy, prompts, params)

    async def served() -> list[tuple[tuple[int, ...], int]]:
        async with servers.tiny_backend() as backend:
            return await asyncio.gather(*(one(backend, list(solver.llm.ids(prompt))) for prompt in prompts))

    async def one(backend: object, ids: list[int]) -> tuple[tuple[int, ...], int]:
        delta, spent = await effort_generation.solve(backend, policy, ids, params, salt="", service=Service())  # type: ignore[arg-type]
        return delta.tokens, spent

    assert asyncio.run(served()) == [(solution.best.tokens, solution.tokens) for solution in found]
    check_books(solver.llm.engine)


@proof("effort", count=20, sample=1)
def shared_contexts_of_later_rounds_are_cached(seed: int) -> None:
    """Beams, revisions and decomposed problems go on from their own tokens: whole pages of a prompt are computed once.

    The engine computes no more prompt tokens than one page for each request of a later round, and the new text in it.
    """
    solver, rng = tiny_solver(), np.random.default_rng(seed)
    engine = solver.llm.engine
    page, params = engine.config.page_size, SamplingParams(max_tokens=16, seed=seed, ignore_eos=True)
    prompt = prompt_of(rng)
    for policy in (VerifierBeam(4, 2, step_tokens=4), Revision(2, 2, again=" no:"), POLICIES["selective_allocation"]):
        asked: list[int] = []
        submit = engine.submit

        def counted(prompt, *args, submit=submit, asked=asked, **fields):  # type: ignore[no-untyped-def]
            asked.append(len(prompt))
            return submit(prompt, *args, **fields)

        engine.submit = counted  # type: ignore[method-assign]
        try:
            before = engine.metrics.prompt_tokens
            solver.solve(policy, [prompt], params)
            computed = engine.metrics.prompt_tokens - before
        finally:
            del engine.submit  # type: ignore[method-assign]
        new_text = max(asked) - asked[0] if len(asked) > 1 else 0
        assert computed <= asked[0] + 4 + (len(asked) - 1) * (2 * page + new_text), (policy.policy, computed, asked)
        assert computed < sum(asked) or sum(asked) == asked[0] or asked[0] < 2 * page
