"""Speculative decoding: completions are those of plain decoding, and samples have the model's distribution."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import scipy.stats

from jaxllm.infer import Engine, SamplingParams
from jaxllm.infer.engine.engine_metrics import EngineMetrics
from jaxllm.infer.grammar import Grammar
from jaxllm.infer.scheduling.sequence import Request
from jaxllm.infer.speculate.draft_head import FUSIONS
from jaxllm.infer.speculate.draft_length import AdaptiveDraftLength, DraftLength, FixedDraftLength
from jaxllm.infer.speculate.ngram import NgramProposer
from jaxllm.text import ByteTokenizer
from pallas_kernels.paged_attention.kv_formats import kv_format, quantised_formats
from tests.infer import engines, meshes
from tests.infer.drafts import drawn_head, drawn_module, learned_head, trained_draft
from tests.infer.proposers import OracleProposer
from tests.infer.test_verification import asked, equal
from tests.proofs.harness import proof

MESHES = ("data=2", "tensor=2", "data=2,tensor=2", "context=2")
WAYS = ("roomy", "tight, recompute", "tight, swap", "contiguous", "layers apart", *MESHES)
PROPOSERS = ("ngram", "draft", "parallel", "tree", "head", "mtp", "self", "trained")
HEADS, SLOT_DRAFTS = ("head", "mtp"), ("head", "mtp", "parallel")
ONE_DEVICE = (*SLOT_DRAFTS,)
"""Refused over a mesh."""
FAMILIES, WIDE = tuple(engines.MODELS | engines.MIXTURES), tuple(engines.WIDE)
MOST, DRAWS = 3, 12
"""Draft tokens; draws of traffic for an engine."""


class RandomDraftLength(FixedDraftLength):
    """Lengths at random, none for some: drafting begins and stops while steps are in flight. Some drafts are cut."""

    def __init__(self, rng: np.random.Generator):
        super().__init__(MOST)
        object.__setattr__(self, "rng", rng)

    def counts(self, sequences: list[Any]) -> dict[Any, int]:
        rng: np.random.Generator = self.rng  # type: ignore[attr-defined]
        if rng.random() < 0.3:
            return {}
        return {one: int(rng.integers(1, MOST + 1)) for one in sequences if rng.random() < 0.8}

    def kept(self, sequences: list[Any], drafts: Mapping[Any, int]) -> Mapping[Any, int]:
        rng: np.random.Generator = self.rng  # type: ignore[attr-defined]
        if rng.random() < 0.7:
            return drafts
        cut = {one: int(rng.integers(0, count + 1)) for one, count in drafts.items()}
        return {one: count for one, count in cut.items() if count}


def build(way: str, family: str, *, tokenizer: Any = None, **fields: Any) -> Engine:
    """An engine that verifies, in float64; ``speculate`` gives it a proposer."""
    silent = OracleProposer("silent", np.random.default_rng(0), 1)
    if way in MESHES:
        sizes = dataclasses.replace(engines.ENGINES["roomy"], verify_tokens=MOST, **fields)
        return meshes.over(way, family, sizes, "float64", proposer=silent)
    sizes = dataclasses.replace(engines.ENGINES[way], verify_tokens=MOST, **fields)
    apart = way == "layers apart"
    return engines.build(sizes, family, "float64", apart=apart, tokenizer=tokenizer, proposer=silent)


def speculate(engine: Engine, proposer: Any, length: DraftLength) -> None:
    """Gives an engine a proposer and lengths of drafts."""
    engine.proposer, engine.draft_length = proposer, length
    for scheduler in getattr(engine.scheduler, "schedulers", [engine.scheduler]):  # of replicas
        scheduler.proposer, scheduler.draft_length = proposer, length
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


@proof("speculation", count=42, sample=1, float64=True, bound={"error": 1e-10},
       counts=("draws", "proposed", "accepted"))  # fmt: skip
def speculated_is_plain(seed: int) -> dict[str, float]:
    """Every proposer, family, KV format, mesh and way to serve, drawn: tokens, texts and ends are plain decoding's.

    An engine serves ``DRAWS`` draws of traffic. Greedy and sampled, with logits processors, grammars' masks apart,
    several completions, short of pages, and with lengths of drafts that are fixed or change at random.
    Log-probabilities are those of the training forward where the KV cache holds what was computed.
    """
    rng = np.random.default_rng(seed)
    way, name = (str(rng.choice(some)) for some in (WAYS, PROPOSERS))
    if way in MESHES and name in ONE_DEVICE:
        name = str(rng.choice([one for one in PROPOSERS if one not in ONE_DEVICE]))
    family = str(rng.choice(WIDE if way in MESHES else FAMILIES))
    if name in HEADS and way == "tight, swap":  # which features do not go with
        way = "tight, recompute"
    # Trees, swapped pages and tokens over devices go with formats that encode a token by itself.
    trees, each = name == "tree", name == "tree" or way in ("tight, swap", "context=2", "contiguous")
    unordered = way in MESHES or way == "layers apart"
    refused = lambda form: (each and form.residual) or (unordered and form.orders_channels) or form.on_host  # noqa: E731
    lossy = ("bfloat16", *(form for form in quantised_formats() if not refused(kv_format(form))))
    kv = "auto" if rng.random() < 0.5 or family in engines.MIXTURES else str(rng.choice(lossy))
    engine = build(way, family, kv_dtype=kv, draft_trees=trees, draft_features=name in HEADS)
    silent, plain = engine.proposer, engine.draft_length
    proposer = proposer_of(name, engine, family, rng)
    counts = {"error": 0.0, "draws": 0.0, "proposed": 0.0, "accepted": 0.0}
    for draw in range(DRAWS):
        requests = asked(rng, engine.config, 3)
        speculate(engine, silent, plain)
        want = engines.serve(engine, requests)
        assert engine.metrics.drafts == 0
        speculate(engine, proposer, RandomDraftLength(rng) if draw % 2 else FixedDraftLength(MOST))
        got = engines.serve(engine, requests)
        equal(got, want)
        if kv == "auto":
            counts["error"] = max(counts["error"], engines.error(family, "float64", got))
        counts["draws"] += 1
        counts["proposed"] += engine.metrics.proposed_tokens
        counts["accepted"] += engine.metrics.accepted_tokens
    if name != "ngram":
        own = proposer if name in SLOT_DRAFTS else proposer.runner
        assert own.program_cache.counts.late == 0
        assert counts["proposed"] > 0
    assert engine.runner.program_cache is not None
    assert engine.runner.program_cache.counts.late == 0
    return counts


COMPLETIONS, TOGETHER, LENGTH, BINS = 4_100, 410, 50, 50
"""Completions, so many at a time, and their tokens; equally likely places of a token in its distribution."""


@proof("speculation", cases=PROPOSERS, sample=1, float64=True, counts=("draws", "accepted"))
def samples_have_the_exact_distribution(name: str) -> dict[str, float]:
    """200,000 verified draws: chi-square against the exact distribution of each, and equality draw by draw.

    A token takes up a share of its distribution's [0, 1), after those of smaller ids; a point of that share at random
    is uniform over [0, 1) where tokens are drawn from this distribution, whatever tokens came before. The distribution
    is the training forward pass's, shaped by temperature and top-k. The first token of a completion, which prefill
    samples, is not counted.
    """
    fields = {"draft_trees": name == "tree", "draft_features": name in HEADS}
    sizes = {"max_sequences": 64, "max_batched_tokens": 256, "buckets": (256,), "pages": 600, "decode_steps": 1}
    engine, rng = build("roomy", "llama", **sizes, **fields), np.random.default_rng([*name.encode()])
    silent, plain = engine.proposer, engine.draft_length
    if name == "head":
        proposer = engines.head_draft(engine, learned_head("gated", 150, 0)[0])
    else:
        proposer = proposer_of(name, engine, "llama", rng)
    seen, accepted = np.zeros(BINS), 0
    for begin in range(0, COMPLETIONS, TOGETHER):
        requests = [
            {
                "prompt": rng.integers(0, engines.VOCAB, 10).tolist(),
                "params": SamplingParams(max_tokens=LENGTH, seed=seed, temperature=HEAT, top_k=TOP),
            }
            for seed in range(begin, begin + TOGETHER)
        ]
        speculate(engine, silent, plain)
        want = engines.serve(engine, requests, check=False)
        speculate(engine, proposer, FixedDraftLength(MOST))
        got = engines.serve(engine, requests, check=False)
        equal(got, want)
        accepted += engine.metrics.accepted_tokens
        for request in got:
            seen += np.bincount((places(request.sequences[0].tokens, 11, rng) * BINS).astype(int), minlength=BINS)
    draws = int(seen.sum())
    assert draws == COMPLETIONS * (LENGTH - 1) >= 200_000
    assert accepted > draws / 50
    assert scipy.stats.chisquare(seen).pvalue > 1e-4
    return {"draws": float(draws), "accepted": float(accepted)}


HEAT, TOP = 0.6, 12


def places(tokens: list[int], begin: int, rng: np.random.Generator) -> np.ndarray:
    """Float[N]: a point of each token's share of its distribution, from the token at ``begin``."""
    logs = engines.logprobs_of("llama", "float64", tokens)[begin - 1 : -1] / HEAT
    logs[logs < np.sort(logs, axis=1)[:, -TOP, None]] = -np.inf
    shares = np.exp(logs - logs.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    rows = np.arange(len(shares))
    own = shares[rows, tokens[begin:]]
    return np.cumsum(shares, axis=1)[rows, tokens[begin:]] - own * rng.uniform(size=len(shares))


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
