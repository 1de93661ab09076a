"""Speculative decoding: completions are those of plain decoding, and samples have the model's distribution."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import jax
import numpy as np
import scipy.stats

from jaxllm.infer import Engine, SamplingParams
from jaxllm.infer.engine.engine_metrics import EngineMetrics
from jaxllm.infer.grammar import Grammar
from jaxllm.infer.scheduling.scheduler import Scheduler
from jaxllm.infer.scheduling.sequence import Request
from jaxllm.infer.speculate.draft_head import FUSIONS
from jaxllm.infer.speculate.draft_length import AdaptiveDraftLength, DraftLength, FixedDraftLength
from jaxllm.infer.speculate.ngram import NgramProposer
from jaxllm.text import ByteTokenizer
from pallas_kernels.paged_attention.kv_formats import kv_format, quantised_formats
from tests.infer import engines
from tests.infer.drafts import drawn_head, drawn_module, learned_head, trained_draft
from tests.infer.proposers import OracleProposer
from tests.infer.test_verification import asked, equal
from tests.proofs.harness import proof

WAYS = ("roomy", "tight, recompute", "tight, swap", "contiguous", "layers apart")
PROPOSERS = ("ngram", "draft", "parallel", "tree", "head", "mtp", "self", "trained")
HEADS, SLOT_DRAFTS = ("head", "mtp"), ("head", "mtp", "parallel")
FAMILIES = tuple(engines.MODELS | engines.MIXTURES)
MOST = 3
"""Draft tokens."""


class RandomDraftLength(FixedDraftLength):
    """Lengths at random, none for some: drafting begins and stops while steps are in flight."""

    def __init__(self, rng: np.random.Generator):
        super().__init__(MOST)
        object.__setattr__(self, "rng", rng)

    def counts(self, sequences: list[Any]) -> dict[Any, int]:
        rng: np.random.Generator = self.rng  # type: ignore[attr-defined]
        if rng.random() < 0.3:
            return {}
        return {one: int(rng.integers(1, MOST + 1)) for one in sequences if rng.random() < 0.8}


def build(way: str, family: str, *, tokenizer: Any = None, **fields: Any) -> Engine:
    """An engine that verifies, in float64; ``speculate`` gives it a proposer."""
    sizes = dataclasses.replace(engines.ENGINES[way], verify_tokens=MOST, **fields)
    apart = way == "layers apart"
    return engines.build(
        sizes,
        family,
        "float64",
        apart=apart,
        tokenizer=tokenizer,
        proposer=OracleProposer("silent", np.random.default_rng(0), 1),
    )


def speculate(engine: Engine, proposer: Any, length: DraftLength) -> None:
    """Gives an engine a proposer and lengths of drafts."""
    scheduler = engine.scheduler
    assert isinstance(scheduler, Scheduler)
    engine.proposer = scheduler.proposer = proposer
    engine.draft_length = scheduler.draft_length = length
    engine.metrics = EngineMetrics()


def proposer_of(name: str, engine: Engine, family: str, rng: np.random.Generator) -> Any:
    """A proposer of each kind; the draft is the model with other numbers mixed in."""
    if name == "ngram":
        return NgramProposer(int(rng.integers(1, 5)))
    if name == "head":
        return engines.head_draft(engine, drawn_head(family, str(rng.choice([*FUSIONS])), rng))
    if name == "mtp":
        return engines.head_draft(engine, drawn_module(family, rng))
    if name == "self":
        layers = engines.model_of(family, "float64").layers
        return engines.self_draft(engine, int(rng.integers(1, layers)))
    if name == "trained":
        return engines.self_draft(engine, trained_draft(family, int(rng.integers(1, MOST)), rng))
    share, one, other = rng.choice([0.0, 0.1, 0.5]), *(engines.params_of(family, "float64", seed) for seed in (4, 5))
    params = jax.tree.map(lambda a, b: (1 - share) * a + share * b, one, other)
    if name == "parallel":
        config = engines.model_of(family, "float64")
        return engines.layer_parallel_draft(engine, config, params, int(rng.integers(1, 4)))
    make = engines.tree_draft if name == "tree" else engines.draft
    return make(engine, engines.model_of(family, "float64"), params)


@proof("speculation", count=40, sample=1, float64=True, bound=1e-10, counts=("proposed", "accepted"))
def speculated_is_plain(seed: int) -> dict[str, float]:
    """Every proposer, family, KV format and way to serve, drawn: tokens, texts and ends are those of plain decoding.

    Greedy and sampled, with logits processors, grammars' masks apart, several completions, short of pages, and with
    lengths of drafts that change at random. Log-probabilities are those of the training forward where the KV cache
    holds what was computed.
    """
    rng = np.random.default_rng(seed)
    way, name, family = (str(rng.choice(some)) for some in (WAYS, PROPOSERS, FAMILIES))
    if name in HEADS and way == "tight, swap":  # which features do not go with
        way = "tight, recompute"
    # Trees and swapped pages go with formats that encode a token by itself.
    trees, each = name == "tree", name == "tree" or way == "tight, swap"
    lossy = ("bfloat16", *(form for form in quantised_formats() if not (each and kv_format(form).residual)))
    kv = "auto" if rng.random() < 0.5 or family in engines.MIXTURES else str(rng.choice(lossy))
    engine = build(way, family, kv_dtype=kv, draft_trees=trees, draft_features=name in HEADS)
    requests = asked(rng, engine.config, 3)
    want = engines.serve(engine, requests)
    assert engine.metrics.drafts == 0
    proposer = proposer_of(name, engine, family, rng)
    counts = {"error": 0.0, "proposed": 0.0, "accepted": 0.0}
    for length in (FixedDraftLength(MOST), RandomDraftLength(rng)):
        speculate(engine, proposer, length)
        got = engines.serve(engine, requests)
        equal(got, want)
        if kv == "auto":
            counts["error"] = max(counts["error"], engines.error(family, "float64", got))
        counts["proposed"] += engine.metrics.proposed_tokens
        counts["accepted"] += engine.metrics.accepted_tokens
    if name != "ngram":
        own = proposer if name in SLOT_DRAFTS else proposer.runner
        assert own.program_cache.counts.late == 0
        assert counts["proposed"] > 0
    assert engine.runner.program_cache is not None
    assert engine.runner.program_cache.counts.late == 0
    return counts


DRAWS, ALLOWED = 6000, (3, 11, 20, 37)
"""Completions of two tokens and one more; the tokens that they may have."""


@proof("speculation", cases=PROPOSERS, sample=1, float64=True)
def samples_have_the_exact_distribution(name: str) -> None:
    """Chi-square of the second and third token against the model's probabilities, and equality draw by draw."""
    fields = {"draft_trees": name == "tree", "draft_features": name in HEADS}
    engine, rng = build("roomy", "llama", decode_steps=1, **fields), np.random.default_rng([*name.encode()])
    prompt, allowed = [5, 9, 5, 9, *ALLOWED, 5, 9], ALLOWED
    if name in ("tree", *HEADS):  # which guess likely tokens
        likeliest = np.argsort(engines.logprobs_of("llama", "float64", prompt)[-1])[-4:]
        allowed = tuple(sorted(likeliest.tolist()))
    requests = [
        {"prompt": prompt, "params": SamplingParams(max_tokens=4, seed=seed, allowed_tokens=allowed)}
        for seed in range(DRAWS)
    ]
    parts = [requests[at : at + 1000] for at in range(0, DRAWS, 1000)]
    want = [one for part in parts for one in engines.serve(engine, part, check=False)]
    if name == "head":
        proposer = engines.head_draft(engine, learned_head("gated", 150, 0)[0])
    else:
        proposer = proposer_of(name, engine, "llama", rng)
    speculate(engine, proposer, FixedDraftLength(MOST))
    got = [one for part in parts for one in engines.serve(engine, part, check=False)]
    equal(got, want)
    assert engine.metrics.accepted_tokens > DRAWS / 20
    expected = np.zeros((4,) * 3)
    logs = lambda tokens: engines.logprobs_of("llama", "float64", tokens)[-1][list(allowed)]  # noqa: E731
    first = softmax(logs(prompt))
    for i, j in itertools.product(range(4), repeat=2):
        second = softmax(logs([*prompt, allowed[i]]))
        third = softmax(logs([*prompt, allowed[i], allowed[j]]))
        expected[i, j] = first[i] * second[j] * third
    seen = np.zeros((4,) * 3)
    for request in got:
        seen[tuple(allowed.index(token) for token in request.sequences[0].tokens[len(prompt) :][:3])] += 1
    enough = expected * DRAWS >= 5
    observed = np.append(seen[enough], seen[~enough].sum())
    wanted = np.append(expected[enough], expected[~enough].sum()) * DRAWS
    assert scipy.stats.chisquare(observed, wanted).pvalue > 1e-4


def softmax(logs: np.ndarray) -> np.ndarray:
    weights = np.exp(logs - logs.max())
    return weights / weights.sum()


FORM = r"[a-f]{3}[0-9]{5,20}"


def written(rng: np.random.Generator, request: dict[str, Any]) -> dict[str, Any]:
    """A request with a grammar in place of its parameters."""
    params = SamplingParams(
        max_tokens=int(rng.integers(1, engines.LONGEST - len(request["prompt"]) + 1)),
        temperature=float(rng.choice([0.0, 0.7])),
        seed=int(rng.integers(2**32)),
        n=int(rng.integers(1, 3)),
        grammar=Grammar.regex(FORM),
    )
    return request | {"params": params}


@proof("speculation", count=24, sample=1, float64=True, counts=("preemptions", "cancelled", "grammars", "drafts"))
def nothing_leaks(seed: int) -> dict[str, float]:
    """64 streams, a third with a grammar, cancelled, preempted and with weights replaced: every page comes back.

    Lengths of drafts are drawn, or the adaptive ones of measured times, which may be none. No program is compiled late.
    """
    rng = np.random.default_rng(seed)
    name, way = str(rng.choice(PROPOSERS)), str(rng.choice(["tight, recompute", "tight, swap"]))
    way = "tight, recompute" if name in HEADS else way
    tokenizer, trees = ByteTokenizer(), name == "tree"
    engine = build(way, "bytes", tokenizer=tokenizer, draft_trees=trees, draft_features=name in HEADS)
    proposer = proposer_of(name, engine, "bytes", rng)
    config = engine.config
    measured = not trees and rng.random() < 0.5
    lengths = AdaptiveDraftLength(MOST, config.decode_buckets, config.prompt_buckets)
    speculate(engine, proposer, lengths if measured else RandomDraftLength(rng))
    made, step = list[Request](), 0
    traffic = [
        written(rng, one) if number % 3 == 0 else one for number, one in enumerate(engines.traffic(rng, config, 64))
    ]
    while engine.busy or len(made) < len(traffic):
        for one in traffic[len(made) : len(made) + int(rng.integers(0, 4))]:
            made.append(engine.submit(one["prompt"], one["params"], salt=one["salt"]))
        if made and rng.random() < 0.05:
            engine.cancel(made[int(rng.integers(len(made)))])
        if rng.random() < 0.005:
            engine.swap(engine.runner.params)
        engine.step()
        engines.check_books(engine)
        step += 1
        assert step < 20_000
    ended = [sequence for request in made for sequence in request.sequences]
    assert all(one.finish in ("stop", "length", "cancelled") for one in ended)
    full = [one for one in ended if one.request.params.grammar is not None and one.finish == "stop"]
    assert all(re.fullmatch(FORM, one.text) for one in full)
    assert all(pages.available == pages.count for pages in engine.scheduler.pages)
    runners: list[Any] = [engine.runner]
    if name != "ngram":
        runners.append(proposer if name in SLOT_DRAFTS else proposer.runner)
    assert all(one.program_cache is not None and one.program_cache.counts.late == 0 for one in runners)
    assert measured or engine.metrics.drafts > 0
    gone = sum(one.finish == "cancelled" for one in ended)
    preempted, drafts = engine.scheduler.preemptions, engine.metrics.drafts
    found = {"preemptions": preempted, "cancelled": gone, "grammars": len(full), "drafts": drafts}
    return {key: float(value) for key, value in found.items()}
