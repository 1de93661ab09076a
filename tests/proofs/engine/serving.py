"""Served log-probabilities equal the training forward's; batch invariance makes them equal bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.infer import engines
from tests.proofs.harness import proof

WAYS = [(model, way) for model in engines.MODELS for way in engines.ENGINES]


@proof("engine", cases=WAYS, sample=2, float64=True, bound=1e-10)
def families_in_every_way(case: tuple[str, str]) -> float:
    """Each family's tiny model, served in each way to random traffic: log-probabilities are the training forward's."""
    model, way = case
    engine = engines.engine(way, model, "float64")
    worst = 0.0
    for seed in range(4):
        rng = np.random.default_rng([seed, *model.encode(), *way.encode()])
        made = engines.serve(engine, engines.traffic(rng, engine.config, 12))
        worst = max(worst, engines.error(model, "float64", made))
    return worst


@st.composite
def traces(draw: st.DrawFn) -> dict[str, Any]:
    """Requests that arrive at random; few models and ways, so that programs serve for many traces."""
    return {
        "model": draw(st.sampled_from(["llama", "gemma3"])),
        "way": draw(st.sampled_from(["tight, swap", "tight, recompute"])),
        "many": draw(st.integers(1, 16)),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


@proof("engine", count=200, sample=4, chunk=20, float64=True, strategy=traces(), bound=1e-10)
def arrival_traces(example: dict[str, Any]) -> float:
    """Random traces of arrivals, shared prompts, multiple completions, cancellations, with too few pages for all."""
    engine = engines.engine(example["way"], example["model"], "float64")
    requests = engines.traffic(np.random.default_rng(example["seed"]), engine.config, example["many"])
    return engines.error(example["model"], "float64", engines.serve(engine, requests))


@proof("engine", count=60, sample=3)
def bits_do_not_depend_on_neighbours(seed: int) -> None:
    """Batch-invariant: tokens and log-probabilities of a request, alone and in a full batch, are bit-identical."""
    rng = np.random.default_rng(seed)
    engine = engines.engine("invariant", "gemma3")
    crowd = engines.traffic(rng, engine.config, 10)
    crowd = [dict(asked, cancel=None) for asked in crowd]
    together = engines.serve(engine, crowd)
    for asked, request in zip(crowd, together, strict=True):
        if rng.random() < 0.5:  # the other half may still find each other's pages
            for pages in engine.scheduler.pages:
                pages.clear_cache()
        (alone,) = engines.serve(engine, [dict(asked, at=0)])
        assert alone.prompt_scores == request.prompt_scores
        for one, other in zip(alone.sequences, request.sequences, strict=True):
            assert one.tokens == other.tokens
            assert one.logprobs == other.logprobs
            assert one.top == other.top


@proof("engine", count=40, sample=2)
def draws_do_not_depend_on_the_way(seed: int) -> None:
    """Equal seeds give equal completions with other chunks, pages, preemption, in float64 up to near ties."""
    rng = np.random.default_rng(seed)
    asked = [dict(a, cancel=None) for a in engines.traffic(rng, engines.ENGINES["roomy"], 6)]
    for a in asked:
        a["params"] = dataclasses.replace(a["params"], n=1)
    texts = []
    for way in ("one after the other", "tight, recompute"):
        made = engines.serve(engines.engine(way), asked)
        texts.append([request.sequences[0].tokens for request in made])
    same = sum(one == other for one, other in zip(*texts, strict=True))
    assert same >= len(asked) - 1, "a draw within rounding of the boundary between two tokens may fall either way"
