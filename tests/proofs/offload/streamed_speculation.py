"""Speculative decoding over streamed weights: completions are those of plain decoding, wherever the layers are."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

import sharding
from jaxllm.infer import Request
from jaxllm.infer.speculate.draft_length import FixedDraftLength
from jaxllm.infer.streaming.experts.expert_schedule import SCHEDULES
from jaxllm.infer.streaming.streamed_runner import StreamedRunner
from jaxllm.models import MoeConfig
from tests.infer import engines
from tests.infer.proposers import OracleProposer
from tests.infer.test_verification import asked, equal
from tests.proofs.engine.programs import Compilations
from tests.proofs.harness import proof
from tests.proofs.offload.blocks import drawn_cache
from tests.proofs.offload.sharded_layers import DIVIDED
from tests.proofs.offload.streamed_weights import FAMILIES, MIXTURES, WAYS, drawn
from tests.proofs.speculation.completions import MOST, ONE_DEVICE, RandomDraftLength, proposer_of, speculate

PROPOSERS = ("ngram", "draft", "parallel", "tree")
"""Those whose draft is not of the streamed layers."""
KINDS = {"layers": FAMILIES, "slots of experts": MIXTURES, "batches": FAMILIES, "shards": tuple(DIVIDED)}
"""What is streamed besides layers -> models."""
KV_FORMATS = ("auto", "auto", "int8", "fp8", "int4")


@proof("offload", count=40, sample=1, float64=True, bound={"logprobs": 1e-12},
       counts=("proposed", "accepted", *PROPOSERS, *KINDS))  # fmt: skip
def speculation_over_streamed_layers(seed: int) -> dict[str, float]:
    """Random traffic with n-grams, draft models (by layers in parallel too) and trees of them, over layers, experts in
    slots, batches by turns (n-grams alone) and shards by random placements: tokens of the same engine without drafts,
    and log-probabilities of the training forward where the KV cache holds what was computed, else of that engine.
    Lengths of drafts are fixed or drawn. Nothing is compiled meanwhile.
    """
    rng = np.random.default_rng(seed)
    kind = str(rng.choice(list(KINDS)))
    model, way = str(rng.choice(KINDS[kind])), str(rng.choice([way for way in WAYS if way != "invariant"]))
    kinds = {"batches": ("ngram",), "shards": tuple(name for name in PROPOSERS if name not in ONE_DEVICE)}
    name, kv = str(rng.choice(kinds.get(kind, PROPOSERS))), str(rng.choice(KV_FORMATS))
    sizes = dataclasses.replace(
        engines.ENGINES[way], decode_steps=1, verify_tokens=MOST, kv_dtype=kv, draft_trees=name == "tree"
    )
    architecture, fields = engines.model_of(model, "float64"), dict[str, Any]()
    units = sum(repeats for _, repeats in architecture.segments)
    silent = OracleProposer("silent", rng, 1)
    with tempfile.TemporaryDirectory() as folder:
        placement = drawn(rng, units, Path(folder))
        if kind == "slots of experts":
            experts = min(block.mlp.experts for block in architecture.blocks if isinstance(block.mlp, MoeConfig))
            absent: Any = str(rng.choice(list(SCHEDULES)))
            placement = dataclasses.replace(placement, expert_slots=int(rng.integers(1, experts + 1)), absent=absent)
        if kind == "batches":
            sizes = dataclasses.replace(sizes, preemption="recompute")
            placement = dataclasses.replace(placement, cache=drawn_cache(rng, 20000, units, Path(folder)))
        if kind == "shards":
            tensor = int(rng.choice(DIVIDED[model]))
            fields["mesh"] = sharding.MeshSpec.parse(f"tensor={tensor}").build(jax.devices()[:tensor])
        engine = engines.build(sizes, model, "float64", placement=placement, proposer=silent, **fields)
        requests, proposer = asked(rng, engine.config, 3), proposer_of(name, engine, model, rng)
        plain, heard = engine.draft_length, Compilations()
        speculate(engine, silent, plain)
        with heard:
            want = engines.serve(engine, requests)
            speculate(engine, proposer, FixedDraftLength(MOST) if rng.random() < 0.5 else RandomDraftLength(rng))
            got = engines.serve(engine, requests)
        assert not heard.names
        equal(got, want)
        runner, metrics = engine.runner, engine.metrics
        assert isinstance(runner, StreamedRunner)
        assert runner.window.counts.most <= placement.window
        assert name == "ngram" or metrics.proposed_tokens > 0
        runner.close()
    found = dict.fromkeys((*PROPOSERS, *KINDS), 0.0) | {name: 1.0, kind: 1.0}
    found |= {"proposed": float(metrics.proposed_tokens), "accepted": float(metrics.accepted_tokens)}
    return found | {"logprobs": engines.error(model, "float64", got) if kv == "auto" else difference(got, want)}


def difference(got: list[Request], want: list[Request]) -> float:
    """The largest difference of the log-probabilities of the same tokens."""
    pairs = [
        (a, b)
        for one, other in zip(got, want, strict=True)
        for a, b in zip(one.sequences, other.sequences, strict=True)
    ]
    return max(float(np.abs(np.subtract(a.logprobs, b.logprobs)).max(initial=0)) for a, b in pairs)
