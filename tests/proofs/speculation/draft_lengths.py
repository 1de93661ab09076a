"""Length of drafts: tokens per second of the adaptive length beside every fixed one, on a simulated device."""

from __future__ import annotations

import numpy as np

from jaxllm.infer import EngineConfig, SamplingParams
from jaxllm.infer.scheduling.sequence import Request, Sequence
from jaxllm.infer.speculate.draft_length import AdaptiveDraftLength
from tests.proofs.harness import proof

PASSES = 5000


def seconds_of(padded: int, knee: float) -> float:
    """Time of a step on a device whose steps take a second up to ``knee`` rows, and in proportion beyond."""
    return max(1.0, padded / knee)


def fixed_speed(count: int, config: EngineConfig, rates: np.ndarray, knee: float, drafting: float) -> float:
    """Expected tokens per second with ``count`` draft tokens for every sequence; with 0 it is plain decoding."""
    buckets = config.prompt_buckets if count else config.decode_buckets
    padded = next(size for size in buckets if size >= len(rates) * (1 + count))
    tokens = sum(float((rates**place).sum()) for place in range(count + 1))
    return tokens / (seconds_of(padded, knee) + count * drafting)


def adaptive_speed(config: EngineConfig, rates: np.ndarray, knee: float, drafting: float, seed: int) -> float:
    """Tokens per second of the adaptive length, which sees its own drafts accepted or refused, and noisy times.

    For each step it counts the expected tokens and the expected time of the drafts that were chosen, so that luck with
    the accepted tokens is no part of the result; luck with what is learned from them is.
    """
    rng = np.random.default_rng(seed)
    length = AdaptiveDraftLength(config.verify_tokens, config.decode_buckets, config.prompt_buckets, knee)
    request = Request(0, [1], SamplingParams(max_tokens=10**9), b"", 0, frozenset())
    sequences = [Sequence(request, number, number, [1]) for number in range(len(rates))]
    seconds = total = 0.0
    for _ in range(PASSES):
        counts = length.counts(sequences)
        rows = len(rates) + sum(counts.values())
        buckets = config.prompt_buckets if counts else config.decode_buckets
        padded = next(size for size in buckets if size >= rows)
        took = seconds_of(padded, knee)
        length.record_step(padded, took * float(rng.uniform(0.95, 1.05)), decode=not counts)
        if counts:
            deepest = max(counts.values())
            length.record_drafting(deepest, deepest * drafting)
            took += deepest * drafting
        for one, rate in zip(sequences, rates.tolist(), strict=True):
            count, accepted = counts.get(one, 0), 0
            while accepted < count and rng.random() < rate:
                accepted += 1
            if count:
                length.record_draft(one, count, accepted)
            one.pending += 1 + accepted
            total += sum(rate**place for place in range(count + 1))
        seconds += took
    return total / seconds


@proof("speculation", count=200, sample=4, bound={"loss": 0.05, "loss to plain": 0.03})
def adaptive_is_nearly_the_best_fixed(seed: int) -> dict[str, float]:
    """Batches of 1 to 16, acceptance alike or not, drafters that are free or take a third of a pass, any knee.

    The best fixed length is known from the rates, of which the policy knows nothing. In ``PASSES`` passes it learns
    them several times over, since evidence fades; a sequence of some hundred tokens may lose more, or less.
    """
    rng = np.random.default_rng(seed)
    batch, knee = int(rng.choice([1, 2, 4, 8, 16])), float(rng.choice([2, 8, 40, 300]))
    drafting = float(rng.choice([0.0, 0.1, 0.33]))
    rates = rng.uniform(0, 1, batch) if rng.random() < 0.5 else np.full(batch, rng.uniform(0, 0.98))
    config = EngineConfig(max_sequences=batch, speculate="ngram")
    plain, *fixed = (fixed_speed(count, config, rates, knee, drafting) for count in range(config.verify_tokens + 1))
    own = adaptive_speed(config, rates, knee, drafting, seed)
    return {"loss": max(0.0, 1 - own / max(plain, *fixed)), "loss to plain": max(0.0, 1 - own / plain)}
