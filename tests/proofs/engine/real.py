"""The real SmolLM2: its log-probabilities, and a heavy-tailed load of many clients of whom some disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.infer import LLM, AsyncEngine, EngineConfig, SamplingParams
from jaxllm.models import Segments
from tests import environment
from tests.proofs.harness import proof

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind it at all. "
PROMPTS, OUTPUTS = (3.91, 1.78), (5.24, 1.18)
"""Mean and deviation of the logarithm of tokens, as in 11,135 conversations with assistants: half of the prompts have
34 tokens or fewer, one in a hundred 3,400 or more."""


@functools.cache
def smollm2() -> LLM:
    sizes = EngineConfig(
        max_sequences=64,
        max_batched_tokens=256,
        max_len=512,
        pages=200,
        buckets=(64, 256),
        samplers=("full",),
        decode_steps=4,
    )
    return LLM("smollm2", sizes, strict=True, manifest=environment.ROOT / ".cache" / "jaxllm" / "engine")


@proof("engine", count=6, sample=1, bound=1e-3, parallel=False)
def smollm2_logprobs(seed: int) -> float:
    """Chunked prefill, batches, prefixes and decode in float32: log-probabilities within a thousandth of a nat."""
    llm, rng = smollm2(), np.random.default_rng(seed)
    words = llm.ids(TEXT * 8)
    prompts = [words[: rng.integers(5, 120)] + rng.integers(0, 40000, rng.integers(1, 30)).tolist() for _ in range(6)]
    params = SamplingParams(max_tokens=24, seed=seed, top_p=0.9, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    model = llm.loaded.model

    @jax.jit
    def forward(params, tokens):
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        return jax.nn.log_softmax(model.head(params, model.forward(params, tokens, positions, Segments())[0])[0])

    worst = 0.0
    for made in llm.generate(prompts, params):
        tokens = np.array([*made.prompt, *made.outputs[0].tokens], np.int32)
        padded = np.zeros((1, 192), np.int32)
        padded[0, : len(tokens)] = tokens
        want = np.asarray(forward(llm.loaded.params, padded))[np.arange(len(tokens) - 1), tokens[1:]]
        got = [value for value, _ in made.prompt_scores] + list(made.outputs[0].logprobs)
        worst = max(worst, float(np.abs(want - got).max()))
    return worst


@proof("engine", count=2, sample=1, bound=1e-2, parallel=False)
def smollm2_under_load(seed: int) -> float:
    """64 clients with heavy-tailed lengths over too few pages; a sixth disconnect; each gets its own text, complete.

    What they hear is what follows their own prompts: the log-probabilities that came with the tokens are found again by
    scoring prompt and text as one.
    """
    return asyncio.run(_load(seed, 64))


async def _load(seed: int, callers: int) -> float:
    rng = np.random.default_rng(seed)
    llm = smollm2()
    asked = []
    for _ in range(callers):
        many, output = (int(np.exp(rng.normal(*shape))) + 1 for shape in (PROMPTS, OUTPUTS))
        asked.append((rng.integers(0, 40000, min(many, 200)).tolist(), min(output, 40)))
    leaves = rng.random(callers) < 1 / 6

    async def call(number: int) -> tuple[list[int], list[float]]:
        prompt, output = asked[number]
        await asyncio.sleep(float(rng.exponential(0.2)))
        params = SamplingParams(max_tokens=output, seed=number, logprobs=0, ignore_eos=True)
        tokens: list[int] = []
        logprobs: list[float] = []
        async with contextlib.aclosing(engine.stream(prompt, params)) as stream:
            async for piece in stream:
                tokens += piece.tokens
                logprobs += piece.logprobs
                if leaves[number] and len(tokens) > output // 2:
                    break
        return tokens, logprobs

    async with AsyncEngine(llm.engine) as engine:
        made = await asyncio.gather(*(call(number) for number in range(callers)))
        while llm.engine.busy:
            await asyncio.sleep(0.05)
    for number, (tokens, _) in enumerate(made):
        assert len(tokens) == asked[number][1] or leaves[number]
    assert llm.engine.scheduler.idle
    assert all(pages.available == pages.count for pages in llm.engine.scheduler.pages)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    whole = [prompt + tokens for (prompt, _), (tokens, _) in zip(asked, made, strict=True)]
    worst = 0.0
    some = rng.choice(callers, 16, replace=False)
    for number, scored in zip(some, llm.generate([whole[i] for i in some], params), strict=True):
        (prompt, _), (_, logprobs) = asked[number], made[number]
        again = [value for value, _ in scored.prompt_scores[len(prompt) - 1 :]]
        worst = max(worst, float(np.abs(np.subtract(again, logprobs)).max()))
    return worst
