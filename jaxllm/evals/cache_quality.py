"""Quality of a KV cache: negative log-likelihood of a text read through it, recall of pass keys, and bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxllm.convert.load import LoadedModel
from jaxllm.data import corpus
from jaxllm.infer import LLM, EngineConfig, SamplingParams
from jaxllm.infer.kv_cache_options import with_kv_cache
from pallas_kernels.paged_attention.retention import by_scores

MOST_TOKENS = 1024
"""Longest text that ``jaxllm eval --needle`` reads by default."""
CHUNK = 256
"""Tokens of a prefill chunk: all tokens before it are read from the cache."""
_NEEDLE = " The pass key is {key}. Remember it. {key} is the pass key.\n"
_QUESTION = "\nWhat is the pass key? The pass key is"


@dataclass(frozen=True)
class CacheQuality:
    """Quality of a KV cache.

    Attributes:
        nll: mean negative log-likelihood of the tokens of a text, in nats.
        recall: share of pass keys that greedy decoding repeats.
        sequence_bytes: bytes of the KV cache of one sequence of that length; under a retention rule that chooses by
            scores, the most that one of the texts held.
    """

    nll: float
    recall: float
    sequence_bytes: int


def cache_quality(
    loaded: LoadedModel, length: int, kv_format: str = "auto", kv_keep: str = "all", *, needles: int = 5, rows: int = 2
) -> CacheQuality:
    """Measures a KV cache of a model on the held-out plays of Shakespeare.

    Args:
        loaded: model.
        length: tokens of a text.
        kv_format, kv_keep: see ``with_kv_cache``.
        needles: texts with a pass key each, at depths from the start to the end.
        rows: texts for the log-likelihood.

    Raises:
        ValueError: the text is too short for so many tokens; or see ``with_kv_cache``.
    """
    sizes = EngineConfig(
        max_sequences=1, max_batched_tokens=CHUNK, max_len=length + 64, buckets=(CHUNK,), samplers=("full",),
        decode_steps=1, prefix_cache=False,
    )  # fmt: skip
    llm = LLM(loaded, with_kv_cache(sizes, kv_format, kv_keep))
    ids = llm.ids(corpus.path("heldout").read_text("utf-8")[: 8 * length * rows])
    if len(ids) < length * rows:
        raise ValueError(f"the held-out text has too few tokens for {rows} times {length}.")
    groups, page_size = llm.engine.runner.spec.groups, llm.engine.runner.spec.page_size
    scores, held = [], 0
    for first in range(0, rows * length, length):
        request = llm.engine.submit(ids[first : first + length], SamplingParams(max_tokens=1, prompt_logprobs=0))
        while llm.engine.busy:
            llm.engine.step()
            pages = zip(groups, llm.engine.scheduler.pages, strict=True)
            held = max(held, sum((p.count - p.available) * group.page_bytes(page_size) for group, p in pages))
        scores += [score for score, _ in request.text_scores]
    nll = -float(np.mean(scores))
    rng, found = np.random.default_rng(0), 0
    question = llm.ids(_QUESTION, add_special_tokens=False)
    for depth in np.linspace(0.0, 1.0, needles):
        key = str(rng.integers(10_000, 100_000))
        needle = llm.ids(_NEEDLE.format(key=key), add_special_tokens=False)
        if (room := length - len(needle) - len(question)) < needles:
            raise ValueError(f"a text of {length} tokens has no room for a pass key and its question; give more.")
        hay = ids[:room]
        at = max(1, int(depth * len(hay)))
        prompt = [*hay[:at], *needle, *hay[at:], *question]
        (answer,) = llm.generate([prompt], SamplingParams(max_tokens=12, temperature=0.0))
        found += key in answer.outputs[0].text
    if not any(by_scores(group.rule) for group in groups):
        held = sum(group.sequence_bytes(length, page_size) for group in groups)
    return CacheQuality(nll, found / needles, held)
