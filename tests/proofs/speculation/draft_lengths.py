"""Length of drafts: tokens per second of the adaptive length beside every fixed one, on a simulated device."""

from __future__ import annotations

import math

import numpy as np

from jaxllm.infer import EngineConfig, SamplingParams
from jaxllm.infer.scheduling.sequence import Request, Sequence
from jaxllm.infer.speculate.draft_length import AdaptiveDraftLength
from tests.proofs.harness import proof

PASSES = 5000


def seconds_of(padded: int, knee: float) -> float:
    """Time of a step on a device whose steps take a second up to ``knee`` rows, and in proportion beyond."""
    return max(1.0, padded / knee)


def padded_rows(config: EngineConfig, batch: int, drafted: int) -> int:
    """Rows of the program that decodes, or verifies ``drafted`` tokens of, a batch."""
    buckets = config.prompt_buckets if drafted else config.decode_buckets
    return next(size for size in buckets if size >= batch + drafted)


def fixed_speed(count: int, config: EngineConfig, rates: np.ndarray, offered: float, knee: float, each: float) -> float:
    """Expected tokens per second with ``count`` draft tokens for every sequence; with 0 it is plain decoding.

    A draft is proposed with probability ``offered``, for each sequence by itself, and costs ``each`` a token.
    """
    batch = len(rates)
    tokens = batch + offered * sum(float((rates**place).sum()) for place in range(1, count + 1))
    ways = [math.comb(batch, some) * offered**some * (1 - offered) ** (batch - some) for some in range(batch + 1)]
    passes = sum(share * seconds_of(padded_rows(config, batch, some * count), knee) for some, share in enumerate(ways))
    return tokens / (passes + count * each)


def adaptive_speed(
    config: EngineConfig, rates: np.ndarray, offered: float, knee: float, drafting: float, seed: int
) -> float:
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
        made = {one: count for one, count in counts.items() if rng.random() < offered}
        drafts = length.kept(sequences, made) if made else {}
        padded = padded_rows(config, len(rates), sum(drafts.values()))
        took = seconds_of(padded, knee)
        kind = "verification" if drafts else "undrafted" if counts and not made else "plain"
        length.record_step(padded, took * float(rng.uniform(0.95, 1.05)), kind)
        if counts:
            deepest = max(counts.values())
            length.record_drafting(deepest, deepest * drafting)
            took += deepest * drafting
        for one, rate in zip(sequences, rates.tolist(), strict=True):
            count, accepted = drafts.get(one, 0), 0
            while accepted < count and rng.random() < rate:
                accepted += 1
            if one in drafts or (one in counts and one not in made):
                length.record_draft(one, count, accepted)
            one.pending += 1 + accepted
            total += sum(rate**place for place in range(count + 1))
        seconds += took
    return total / seconds


@proof("speculation", count=200, sample=4, bound={"loss": 0.05, "loss to plain": 0.03})
def adaptive_is_nearly_the_best_fixed(seed: int) -> dict[str, float]:
    """Batches of 1 to 16, acceptance alike or not, drafters that are free or take a third of a pass, any knee.

    Half of the drafters propose something at every attempt, the others as n-grams do, in a share of attempts.

    The best fixed length is known from the rates, of which the policy knows nothing. In ``PASSES`` passes it learns
    them several times over, since evidence fades; a sequence of some hundred tokens may lose more, or less.
    """
    rng = np.random.default_rng(seed)
    batch, knee = int(rng.choice([1, 2, 4, 8, 16])), float(rng.choice([2, 8, 40, 300]))
    drafting = float(rng.choice([0.0, 0.1, 0.33]))
    rates = rng.uniform(0, 1, batch) if rng.random() < 0.5 else np.full(batch, rng.uniform(0, 0.98))
    offered = 1.0 if rng.random() < 0.5 else float(rng.uniform(0.05, 1))
    config = EngineConfig(max_sequences=batch, speculate="ngram")
    lengths = range(config.verify_tokens + 1)
    plain, *fixed = (fixed_speed(count, config, rates, offered, knee, drafting) for count in lengths)
    own = adaptive_speed(config, rates, offered, knee, drafting, seed)
    return {"loss": max(0.0, 1 - own / max(plain, *fixed)), "loss to plain": max(0.0, 1 - own / plain)}
