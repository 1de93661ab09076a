"""S3's admission by predicted KV cache, and BatchLLM's groups, beside what they replace, on simulated engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxllm.infer import Engine, SamplingParams
from jaxllm.infer.scheduling.policies import POLICIES, Policy
from tests.infer.engines import VOCAB
from tests.infer.traces import SIZES, Timed
from tests.proofs.harness import proof

TIGHT = dataclasses.replace(SIZES, pages=40, max_sequences=12, max_batched_tokens=32, buckets=(32,))
Prompts = list[tuple[list[int], SamplingParams]]


@dataclasses.dataclass
class Played:
    """What came of a batch: the tokens of each prompt, steps, mean sequences in a step, most pages, preemptions."""

    tokens: list[list[int]]
    steps: int
    running: float
    pages: int
    preemptions: int
    prompt_tokens: int


def play(prompts: Prompts, policy: Policy | None, predict: Callable[[int, int], float] | None = None) -> Played:
    """Runs a batch that is known ahead."""
    runner = Timed(TIGHT)
    engine = Engine(runner, TIGHT, VOCAB, policy=policy, clock=lambda: runner.now, predict=predict)
    requests = [engine.submit(*one) for one in prompts]
    running, pages = [], 0
    while engine.busy:
        engine.step()
        running.append(len(engine.scheduler.running))
        (pool,) = engine.scheduler.pages
        pages = max(pages, sum(count > 0 for count in pool.ref_counts))
    tokens = [r.sequences[0].tokens for r in requests]
    metrics = engine.metrics
    return Played(
        tokens, metrics.steps, float(np.mean(running)), pages, engine.scheduler.preemptions, metrics.prompt_tokens
    )


def unknown_lengths(rng: np.random.Generator) -> Prompts:
    """Prompts of different lengths whose completions may have 40 tokens and mostly end earlier."""
    params = SamplingParams(max_tokens=40, temperature=0.0, stop_ids=tuple(rng.permutation(VOCAB)[:5].tolist()))
    return [(rng.integers(0, VOCAB, n).tolist(), params) for n in rng.permutation(np.arange(2, 22))]


@proof("kv_cache", count=40, sample=2)
def predicted_bytes_admit_more(seed: int) -> None:
    """With an oracle, a noisy one and none: the same tokens. The oracle has more sequences at a time, fewer steps and
    no preemption; the reservation of all that each may generate has the fewest sequences."""
    rng = np.random.default_rng(seed)
    prompts = unknown_lengths(rng)
    whole = play(prompts, POLICIES["predicted"], lambda prompt, most: float(most))
    lengths = {len(p): len(t) - len(p) for (p, _), t in zip(prompts, whole.tokens, strict=True)}
    noise = {n: float(rng.choice([0.5, 1.0, 2.0])) for n in lengths}
    oracle = play(prompts, POLICIES["predicted"], lambda prompt, most: lengths[prompt])
    noisy = play(prompts, POLICIES["predicted"], lambda prompt, most: lengths[prompt] * noise[prompt])
    learnt = play(prompts, POLICIES["predicted"])
    assert whole.tokens == oracle.tokens == noisy.tokens == learnt.tokens
    assert whole.preemptions == oracle.preemptions == 0
    assert whole.running < oracle.running
    assert oracle.steps < whole.steps
    assert noisy.steps < whole.steps
    assert learnt.steps < whole.steps


@proof("kv_cache", count=40, sample=2)
def groups_take_fewer_steps_and_pages(seed: int) -> None:
    """Four batches of groups with a common beginning, mixed, more than there are pages for: the same tokens, and in all
    fewer prompt tokens, steps and peak pages than first come, first served with an LRU prefix cache; no preemption."""
    rng, sums = np.random.default_rng(seed), np.zeros((2, 3), int)
    for _ in range(4):
        prompts = in_groups(rng)
        first_come, grouped = play(prompts, None), play(prompts, POLICIES["grouped"])
        assert first_come.tokens == grouped.tokens
        assert grouped.preemptions == 0
        sums += [(one.prompt_tokens, one.steps, one.pages) for one in (grouped, first_come)]
    assert np.all(sums[0] < sums[1])


def in_groups(rng: np.random.Generator) -> Prompts:
    """Prompts of nine groups with a common beginning each, mixed."""
    prompts: Prompts = []
    for _ in range(9):
        common = rng.integers(0, VOCAB, 4 * int(rng.integers(7, 10))).tolist()
        for _ in range(5):
            own = rng.integers(0, VOCAB, int(rng.integers(1, 8))).tolist()
            prompts.append(([*common, *own], SamplingParams(max_tokens=int(rng.integers(4, 16)), temperature=0.0)))
    return [prompts[i] for i in rng.permutation(len(prompts))]
