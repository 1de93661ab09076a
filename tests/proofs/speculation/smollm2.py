"""Speculative decoding of the real SmolLM2: greedy completions of 100 prompts are plain decoding's."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np

import jaxllm
from jaxllm.convert.load import load_model
from jaxllm.infer import LLM, Completion, EngineConfig, SamplingParams
from tests.near_ties import first_near_tie
from tests.proofs.harness import proof

PROMPTS, LENGTH, NEW = 100, 48, 24
SIZES = EngineConfig(
    max_sequences=8,
    max_batched_tokens=128,
    max_len=LENGTH + NEW,
    buckets=(128,),
    decode_steps=1,
    prefix_cache=False,
    draft_length="fixed",
    samplers=("full",),
    top_logprobs=2,
)


@functools.cache
def prompts() -> list[list[int]]:
    """Pieces of this package's code: half of what a model of code is asked to go on with."""
    tokenizer = load_model("smollm2").tokenizer
    assert tokenizer is not None
    root = Path(jaxllm.__file__).parent
    code = "\n".join(file.read_text() for file in sorted(root.glob("*.py")))
    tokens = tokenizer.encode(code)
    begins = np.random.default_rng(0).choice(len(tokens) - LENGTH, PROMPTS, replace=False)
    return [np.asarray(tokens[begin : begin + LENGTH]).tolist() for begin in begins]


@functools.cache
def plain() -> list[Completion]:
    return LLM("smollm2", SIZES).generate(prompts(), params())


def params() -> SamplingParams:
    return SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True, logprobs=2)


@proof("speculation", cases=("ngram", "self:15", "draft:smollm2", "tree:smollm2,8"), sample=1, parallel=False,
       bound={"error": 2e-4}, counts=("near-ties", "accepted of each draft"))  # fmt: skip
def smollm2_is_plain(speculate: str) -> dict[str, float]:
    """100 greedy completions of code, eight at a time, in float32; log-probabilities up to the first near-tie, too.

    A completion may differ from where the two likeliest tokens are nearly as likely (``near_ties``): such places are
    printed and counted.
    """
    verify = int(speculate.partition(",")[2] or 4)
    drafting = LLM("smollm2", dataclasses.replace(SIZES, speculate=speculate, verify_tokens=verify))
    got, ties, error = drafting.generate(prompts(), params()), 0, 0.0
    for number, (one, other) in enumerate(zip(plain(), got, strict=True)):
        want, drafted = one.outputs[0], other.outputs[0]
        tie = first_near_tie(want, drafted)
        same = NEW if tie is None else tie
        error = max(error, float(np.abs(np.subtract(want.logprobs[:same], drafted.logprobs[:same])).max(initial=0)))
        if tie is not None:
            print(f"prompt {number} differs from token {tie}, a near-tie", flush=True)
            ties += 1
    metrics = drafting.engine.metrics
    jax.clear_caches()
    return {"error": error, "near-ties": float(ties), "accepted of each draft": metrics.acceptance_length - 1}
