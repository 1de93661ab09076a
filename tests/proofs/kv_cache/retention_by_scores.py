"""Retention rules that choose by scores: their definition, the full cache, pages that come back, and what they cost."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.infer import Engine, SamplingParams
from jaxllm.infer.runner.paged_cache import layer_groups
from jaxllm.infer.runner.retention.corm import Corm
from jaxllm.posttrain.frozen.retention_training import HEADS_FILE, train_heads
from pallas_kernels.paged_attention.retention import by_scores
from recipes.locret import locret_smollm2
from tests import environment
from tests.infer import engines
from tests.proofs.harness import proof
from tests.proofs.kv_cache.eviction_baselines import quality
from tests.proofs.kv_cache.retention import WAYS
from tests.seams.dense_reference import DenseReference, error
from tests.seams.score_reference import ScoreReference

SMALL = {"corm": "corm:1.2,3,8", "pyramid": "pyramid:0.4,3,8"}
WHOLE = {"corm": "corm:0,3,8", "pyramid": "pyramid:1,3,8"}
RULES = [(way, model, name) for way, model in WAYS for name in SMALL]
"""(way to serve, model, rule)."""


def reference(model: str, retention: str) -> ScoreReference:
    """Reference of a rule for a model: of each layer its own."""
    config = engines.model_of(model, "float64")
    rules: list[Any] = [Corm(0.0)] * config.layers
    for group in layer_groups(config, "auto", retention):
        for number, layer in enumerate(group.layers):
            if (rule := by_scores(group.rules[number // group.rows])) is not None:
                rules[layer] = rule
    return ScoreReference(tuple(rules))


def served(case: tuple[str, str, str], retention: str, seed: str) -> tuple[Engine, list[Any]]:
    """An engine with a rule, and the random traffic that it has served."""
    way, model, _ = case
    rng = np.random.default_rng([*"".join(case).encode(), *seed.encode()])
    sizes = dataclasses.replace(engines.ENGINES[way], prefix_cache=False, retention=retention)
    engine = engines.build(sizes, model, "float64")
    asked = engines.traffic(rng, sizes, 6)
    long = SamplingParams(max_tokens=24, temperature=0.0, logprobs=0)
    asked += [{"prompt": rng.integers(0, engines.VOCAB, n).tolist(), "params": long} for n in (33, 21)]
    for one in asked:
        one["params"] = dataclasses.replace(one["params"], prompt_logprobs=None, logprobs=0)
    return engine, engines.serve(engine, asked)


@proof("kv_cache", cases=RULES, sample=1, float64=True, bound={"whole": 1e-10, "dropped": 1e-10})
def scores_in_every_way(case: tuple[str, str, str]) -> dict[str, float]:
    """Random traffic: a rule that keeps everything is the training forward; a small budget is the plain reference.

    However prompts are split, and whatever is preempted or swapped.
    """
    _, model, name = case
    engine, made = served(case, WHOLE[name], "whole")
    worst = {"whole": error(model, DenseReference(), made)}
    assert engine.metrics.kept_entries > 0 == engine.metrics.dropped_entries
    engine, made = served(case, SMALL[name], "dropped")
    assert engine.metrics.dropped_entries > 0
    assert error(model, DenseReference(), made) > 1e-4
    return worst | {"dropped": error(model, reference(model, SMALL[name]), made)}


@proof("kv_cache", cases=[(model, name) for model in ("llama", "gemma3") for name in SMALL], sample=1)
def evicted_pages_come_back(case: tuple[str, str]) -> None:
    """A sequence of 60 tokens: its pages are those of the fullest layer and kv head, counted on the device."""
    model, name = case
    sizes = dataclasses.replace(
        engines.ENGINES["roomy"], prefix_cache=False, retention=SMALL[name], page_size=4, max_sequences=1,
        decode_steps=1, samplers=("plain",),
    )  # fmt: skip
    engine = engines.build(sizes, model)
    engine.submit(list(range(30)), SamplingParams(max_tokens=30, temperature=0.0))
    spec, most, length = engine.runner.spec, 0, 0
    while engine.busy:
        engine.step()
        engines.check_books(engine)
        for sequence in engine.scheduler.running:
            chunks = [c for step in engine._in_flight for plan in step.plans for c in plan.chunks]
            landed = not any(chunk.start and chunk.start % 8 == 0 for chunk in chunks)
            for table, group in enumerate(spec.tables):
                if by_scores(spec.groups[group].rule) is None or not sequence.pages[table]:
                    continue
                pages = sequence.pages[table]
                most = max(most, len(pages))
                at = np.asarray(engine.runner.pools[group].positions)[:, :, :, 0][:, pages]  # L J K C
                used = (at >= 0).swapaxes(1, 2).reshape(at.shape[0], at.shape[2], -1)
                counts = used.sum(-1)
                assert counts.max() <= sequence.entries[table] <= 4 * len(pages)
                # Entries are in the first slots.
                assert (used == (np.arange(used.shape[2]) < counts[..., None])).all()
                if landed:
                    assert len(pages) == -(-int(counts.max()) // 4)
            length = max(length, sequence.computed)
    assert length == 59
    assert most < 15
    assert engine.scheduler.returned_pages > 0 or name == "pyramid", "whose budgets grow: it takes fewer pages"
    assert all(pages.available == pages.count for pages in engine.scheduler.pages)


REAL = {"corm": "corm:8,32,64", "pyramid": "pyramid:0.4,32,64", "locret": "locret:192,64,64"}
BASELINES = "random:0:uniform:0.4,32,64", "recent:uniform:0.4,32,64"
"""Which hold no fewer bytes than any of those rules."""


@functools.cache
def trained_heads() -> Path:
    """Retaining heads that the recipe has trained, with its own settings."""
    run = dataclasses.replace(locret_smollm2(), out=str(environment.ROOT / ".cache" / "proofs" / "kv_cache"))
    return train_heads(run).directory / HEADS_FILE


def with_heads(rule: str) -> str:
    """The rule, with the trained heads if it is one that has some."""
    name, _, sizes = rule.partition(":")
    return f"locret:{trained_heads()},{sizes}" if name == "locret" else rule


@proof("kv_cache", cases=[(name, seed) for name in REAL for seed in range(3)], sample=1, bound=1.0)
def chosen_beat_random_and_recent(case: tuple[str, int]) -> float:
    """SmolLM2 on plays, baselines with no fewer bytes: growth of the NLL over the full cache's, by the least of theirs.

    Texts of 512 tokens, other ones for each seed; entries leave every 64 tokens.
    """
    name, seed = case
    full, own = quality("all", seed), quality(with_heads(REAL[name]), seed)
    others = [quality(baseline, seed) for baseline in BASELINES]
    assert own.bytes < 0.6 * full.bytes
    for other in others:
        assert other.bytes >= own.bytes
    assert own.nll > full.nll
    return (own.nll - full.nll) / (min(other.nll for other in others) - full.nll)
