"""S3's admission by predicted KV cache, and BatchLLM's groups, beside what they replace, on simulated engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxllm.infer import Engine, EngineConfig, SamplingParams
from jaxllm.infer.scheduling.length_classifier import LengthClassifier
from jaxllm.infer.scheduling.policies import POLICIES, LengthPredictor, Policy
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


def play(
    prompts: Prompts,
    policy: Policy | None,
    predict: Callable[[int, int], float] | None = None,
    kind: type[Timed] = Timed,
    config: EngineConfig = TIGHT,
) -> Played:
    """Runs a batch that is known ahead."""
    runner = kind(config)
    engine = Engine(runner, config, VOCAB, policy=policy, clock=lambda: runner.now, predict=predict)
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


class Instructed(Timed):
    """Simulated runner whose completions end after a number of tokens that the prompt's first token decides.

    The second token of a prompt is its length.
    """

    def _following(self, text: list[int | None]) -> int:
        if len(text) < 2:
            return END  # a chunk of the prompt, whose token nobody uses
        kind, many = text[0], text[1]
        assert kind is not None
        assert many is not None
        wanted = GOALS[kind] + (sum(token or 0 for token in text[:many]) % 3) - 1
        return END if len(text) - many >= wanted - 1 else VOCAB - 2


GOALS, END = (3, 6, 12, 36), VOCAB - 1
"""Tokens that a completion has on average, by the instruction that its prompt begins with; and the last one."""


def instructed(rng: np.random.Generator, many: int) -> Prompts:
    """Prompts for ``Instructed``."""
    params = SamplingParams(max_tokens=40, temperature=0.0, stop_ids=(END,))
    out = []
    for _ in range(many):
        length = int(rng.integers(6, 14))
        body = rng.integers(len(GOALS), VOCAB - 2, length - 2).tolist()
        out.append(([int(rng.integers(len(GOALS))), length, *body], params))
    return out


@proof("kv_cache", count=40, sample=2, bound={"of the mean's error": 0.6, "of the best error": 3.0})
def prompts_predict_lengths(seed: int) -> dict[str, float]:
    """200 completions whose lengths a word of the prompt decides, the others drawn by Zipf's law, then 100 others: the
    mean error of the learned predictor in powers of two, over that of means by prompt length, and over that of the
    expectation given the word."""
    rng = np.random.default_rng(seed)
    learned, mean, errors = LengthClassifier(), LengthPredictor(), np.zeros(3)
    for number in range(300):
        length = int(rng.integers(6, 60))
        kind, body = int(rng.integers(4)), (rng.zipf(1.3, length - 1) % 5000 + 4).tolist()
        prompt = [*body[:2], kind, *body[2:]]
        generated = int(rng.lognormal(np.log(10 * 4**kind), 0.3)) + 1
        if number >= 200:
            best = 10 * 4**kind * np.exp(0.3**2 / 2) + 0.5
            found = learned.predict(prompt, 4096), mean.predict(length, 4096), best
            errors += [abs(np.log2(one / generated)) for one in found]
        learned.learn(prompt, generated)
        mean = mean.with_completion(length, generated)
    return {"of the mean's error": float(errors[0] / errors[1]), "of the best error": float(errors[0] / errors[2])}


@proof("kv_cache", count=40, sample=2, bound={"steps": 0.8, "preempted": 0.1})
def learned_lengths_admit_more(seed: int) -> dict[str, float]:
    """150 requests whose first token decides their length, more than there are pages for: the same tokens as with means
    by prompt length and as with the maximum reserved; steps over those with the maximum, and preemptions a request."""
    prompts = instructed(np.random.default_rng(seed), 150)
    whole, mean, learned = (
        play(prompts, POLICIES[policy], predict, Instructed)
        for policy, predict in (
            ("predicted", lambda prompt, most: float(most)),
            ("predicted", None),
            ("learned", None),
        )
    )
    assert whole.tokens == mean.tokens == learned.tokens
    return {"steps": learned.steps / whole.steps, "preempted": learned.preemptions / len(prompts)}


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
