"""BatchLLM's groups and batches by memory, and S3's bin packing, beside what they replace, on simulated engines."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

from jaxllm.infer import SamplingParams
from jaxllm.infer.scheduling.policies import POLICIES, Grouped
from jaxllm.infer.scheduling.prefix_groups import prefix_groups
from tests.infer.engines import VOCAB
from tests.proofs.harness import proof
from tests.proofs.kv_cache.policies import TIGHT, Prompts, play, unknown_lengths

ROOMY = dataclasses.replace(TIGHT, pages=60, max_sequences=24)


@proof("kv_cache", count=300, sample=20)
def groups_save_the_most(seed: int) -> None:
    """Random prefix trees of up to 8 prompts: the pages that groups compute, one prefix each and the rests, are the
    fewest of all choices of prefixes. Every prompt is in one group, and begins with its prefix."""
    rng = np.random.default_rng(seed)
    many = int(rng.integers(1, 9))
    texts = ["".join(rng.choice(list("ab"), rng.integers(0, 6), p=(0.7, 0.3))) for _ in range(many)]
    rows = {one: [text[: end + 1].encode() for end in range(len(text))] for one, text in enumerate(texts)}
    computed, seen = 0, list[int]()
    for group in prefix_groups(rows):
        (prefix,) = {texts[one][: group.pages] for one in group.members}
        assert len(prefix) == group.pages
        if len(group.members) == 1:
            computed += len(texts[group.members[0]])
        else:
            computed += group.pages + sum(len(texts[one]) - group.pages for one in group.members)
        seen += group.members
    assert sorted(seen) == list(range(many))
    prefixes = sorted({text[:end] for text in texts for end in range(1, len(text) + 1)})
    least = sum(map(len, texts))
    for count in range(1, min(len(prefixes), many) + 1):
        for chosen in itertools.combinations(prefixes, count):
            saved = sum(max((len(one) for one in chosen if text.startswith(one)), default=0) for text in texts)
            least = min(least, sum(map(len, texts)) - saved + sum(map(len, chosen)))
    assert computed == least


def about_documents(rng: np.random.Generator, params: dict[str, Any] | None = None) -> Prompts:
    """Questions about nine documents behind one instruction, mixed; completions are long or short by the document."""
    size = TIGHT.page_size or 1
    instruction = rng.integers(0, VOCAB, 2 * size).tolist()
    prompts: Prompts = []
    for _ in range(9):
        document = [*instruction, *rng.integers(0, VOCAB, size * int(rng.integers(4, 7))).tolist()]
        longest = int(rng.choice([3, 14]))
        for _ in range(int(rng.integers(1, 7))):
            own = rng.integers(0, VOCAB, int(rng.integers(1, 8))).tolist()
            tokens = {"max_tokens": int(rng.integers(1, longest + 1)), "temperature": 0.0} | (params or {})
            prompts.append(([*document, *own], SamplingParams(**tokens)))
    return [prompts[i] for i in rng.permutation(len(prompts))]


def unique_tokens(prompts: Prompts) -> int:
    """Tokens of the prompts' pages, each page once, and of what is beyond them; a prompt's last is always computed."""
    size = TIGHT.page_size or 1
    pages = {tuple(p[: end * size]) for p, _ in prompts for end in range(1, (len(p) - 1) // size + 1)}
    return len(pages) * size + sum((len(p) - 1) % size + 1 for p, _ in prompts)


@proof("kv_cache", count=40, sample=2)
def trees_are_prefilled_once(seed: int) -> None:
    """Six batches of questions about documents behind one instruction, more than there are pages for, first come,
    first served with an LRU prefix cache beside groups, and groups admitted by known lengths: the same tokens; every
    token of the prefix tree is computed once, nothing is preempted, and in all there are fewer steps and peak pages;
    with predictions, which leave a tenth of the pages, fewer of these again."""
    rng, sums = np.random.default_rng(seed), np.zeros((3, 2), int)
    for _ in range(6):
        prompts = about_documents(rng)
        played = [
            play(prompts, POLICIES[name], lambda prompt, most: float(most))
            for name in ("first-come", "grouped", "grouped-predicted")
        ]
        assert played[0].tokens == played[1].tokens == played[2].tokens
        for one in played[1:]:
            assert one.prompt_tokens == unique_tokens(prompts) < played[0].prompt_tokens
            assert one.preemptions == 0
        sums += [(one.steps, one.pages) for one in played]
    steps, pages = sums.T
    assert steps[1] < steps[0]
    assert pages[2] < pages[1] < pages[0]


@proof("kv_cache", count=40, sample=2)
def memory_forms_larger_batches(seed: int) -> None:
    """Three batches whose completions may have 24 tokens and mostly end earlier, about which only their mean is known:
    the same tokens; with pages for what is predicted, to nine tenths of them, more sequences in a step than with pages
    for all, in all, and fewer steps, and so beside a limit of four sequences."""
    rng, sums = np.random.default_rng(seed), np.zeros((3, 2))
    for _ in range(3):
        stops = tuple(rng.permutation(VOCAB)[:4].tolist())
        prompts = about_documents(rng, {"max_tokens": 24, "stop_ids": stops})
        few = dataclasses.replace(ROOMY, max_sequences=4)
        whole, memory, counted = (
            play(prompts, policy, lambda prompt, most: 6.0, config=config)
            for policy, config in ((Grouped(), ROOMY), (POLICIES["grouped-predicted"], ROOMY), (Grouped(0.9), few))
        )
        assert whole.tokens == memory.tokens == counted.tokens
        sums += [(one.steps, one.running) for one in (whole, memory, counted)]
    steps, running = sums.T
    assert steps[1] < min(steps[0], steps[2])
    assert running[1] > max(running[0], running[2])


@proof("kv_cache", count=40, sample=2, bound={"wrong by 2": 1.3, "wrong by 4": 1.6})
def packed_bytes_admit_more(seed: int) -> dict[str, float]:
    """Four batches by decreasing first fit: the same tokens as reserving the maximum; with known lengths no preemption,
    more sequences at a time and fewer steps. Steps with predictions that are wrong by up to a factor of 2, and of 4,
    over those with known lengths; in all they are fewer than with the maximum too."""
    rng, steps = np.random.default_rng(seed), np.zeros(4, int)
    for _ in range(4):
        prompts = unknown_lengths(rng)
        whole = play(prompts, POLICIES["predicted"], lambda prompt, most: float(most))
        lengths = {len(p): len(t) - len(p) for (p, _), t in zip(prompts, whole.tokens, strict=True)}
        drawn = {n: float(rng.uniform(-1, 1)) for n in lengths}
        played = [whole]
        for factor in (1, 2, 4):
            guess = {n: lengths[n] * factor ** drawn[n] for n in lengths}
            played.append(play(prompts, POLICIES["packed"], lambda prompt, most, guess=guess: guess[prompt]))
        assert all(one.tokens == whole.tokens for one in played)
        assert played[1].preemptions == 0
        assert played[1].running > whole.running
        assert played[1].steps < whole.steps
        steps += [one.steps for one in played]
    assert max(steps[2:]) < steps[0]
    return {"wrong by 2": float(steps[2] / steps[1]), "wrong by 4": float(steps[3] / steps[1])}


@proof("kv_cache", count=40, sample=2)
def packing_takes_fewer_steps(seed: int) -> None:
    """Two batches of 60 prompts whose lengths are known and have a heavy tail: decreasing first fit has the tokens of
    arrival order, neither preempts, and it has more sequences at a time and fewer steps in all."""
    rng, sums = np.random.default_rng(seed), np.zeros((2, 2))
    for _ in range(2):
        drawn = np.minimum(np.exp(rng.normal(2.2, 0.7, (60, 2))).astype(int) + 1, 30).tolist()
        prompts: Prompts = [
            (rng.integers(0, VOCAB, n).tolist(), SamplingParams(max_tokens=most, temperature=0.0)) for n, most in drawn
        ]
        played = [play(prompts, POLICIES[one], lambda prompt, most: float(most)) for one in ("predicted", "packed")]
        assert played[0].tokens == played[1].tokens
        assert played[0].preemptions == played[1].preemptions == 0
        sums += [(one.steps, one.running) for one in played]
    (arrival, packed), running = sums.T
    assert packed < arrival
    assert running[1] > running[0]
