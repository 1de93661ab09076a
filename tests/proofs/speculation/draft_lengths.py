"""Length of drafts: tokens per second of the adaptive length beside every fixed one, on a simulated device."""

from __future__ import annotations

import numpy as np

from jaxllm.infer import EngineConfig, SamplingParams
from jaxllm.infer.engine.sequence import Request, Sequence
from jaxllm.infer.speculate.draft_length import AdaptiveDraftLength, DraftLength, FixedDraftLength
from tests.proofs.harness import proof

PASSES = 1500


def tokens_per_second(
    length: DraftLength, config: EngineConfig, rates: np.ndarray, knee: float, drafting: float, seed: int
) -> float:
    """Decodes a batch on a device whose steps take a second up to ``knee`` rows, and in proportion beyond."""
    rng = np.random.default_rng(seed)
    request = Request(0, [1], SamplingParams(max_tokens=10**9), b"", 0, frozenset())
    sequences = [Sequence(request, number, number, [1]) for number in range(len(rates))]
    seconds = total = 0.0
    for _ in range(PASSES):
        counts = length.counts(sequences)
        rows = len(rates) + sum(counts.values())
        buckets = config.prompt_buckets if counts else config.decode_buckets
        padded = next(size for size in buckets if size >= rows)
        took = max(1.0, padded / knee) * float(rng.uniform(0.95, 1.05))
        length.record_step(padded, took, decode=not counts)
        if counts:
            deepest = max(counts.values())
            length.record_drafting(deepest, deepest * drafting)
            took += deepest * drafting
        for one, rate in zip(sequences, rates, strict=True):
            count, accepted = counts.get(one, 0), 0
            while accepted < count and rng.random() < rate:
                accepted += 1
            if count:
                length.record_draft(one, count, accepted)
            one.pending += 1 + accepted
            total += 1 + accepted
        seconds += took
    return total / seconds


@proof("speculation", count=200, sample=4, bound={"loss": 0.05, "loss to plain": 0.03})
def adaptive_is_nearly_the_best_fixed(seed: int) -> dict[str, float]:
    """Batches of 1 to 16, acceptance alike or not, drafters that are free or take a third of a pass, any knee."""
    rng = np.random.default_rng(seed)
    batch, knee = int(rng.choice([1, 2, 4, 8, 16])), float(rng.choice([2, 8, 40, 300]))
    drafting = float(rng.choice([0.0, 0.1, 0.33]))
    rates = rng.uniform(0, 1, batch) if rng.random() < 0.5 else np.full(batch, rng.uniform(0, 0.95))
    config = EngineConfig(max_sequences=batch, speculate="ngram")
    most = config.verify_tokens

    def speed(length: DraftLength) -> float:
        return tokens_per_second(length, config, rates, knee, drafting, seed)

    fixed = [speed(FixedDraftLength(count)) for count in range(1, most + 1)]
    plain = speed(NoDrafts(0))
    own = speed(AdaptiveDraftLength(most, config.decode_buckets, config.prompt_buckets, knee))
    return {"loss": max(0.0, 1 - own / max(plain, *fixed)), "loss to plain": max(0.0, 1 - own / plain)}


class NoDrafts(FixedDraftLength):
    """Plain decoding."""

    def counts(self, sequences: list[Sequence]) -> dict[Sequence, int]:
        return {}
