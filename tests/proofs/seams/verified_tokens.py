"""Verification of proposed tokens: completions are those of plain decoding, in every way to serve."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxllm.infer import SamplingParams
from tests.infer import engines, meshes
from tests.infer.proposers import Mode, OracleProposer
from tests.infer.test_verification import asked, beside, check_cancelled_in_flight, writer, written
from tests.proofs.harness import proof

WAYS = [
    ("roomy", "llama", ""),
    ("tight, recompute", "llama", ""),
    ("tight, swap", "llama", ""),
    ("tight, swap", "wide", "data=2,tensor=2"),
]
"""(way to serve, model, mesh)."""


@proof("seams", cases=WAYS, sample=1, float64=True, bound=1e-10)
def verified_is_plain_decoding(case: tuple[str, str, str]) -> float:
    """With all, some and none of the proposals accepted, short of pages, over page borders, with steps in flight."""
    way, model, mesh = case
    config = engines.ENGINES[way]
    rng = np.random.default_rng([*way.encode(), *mesh.encode()])
    oracle = OracleProposer("all", rng, engines.VOCAB)
    plain = engines.build(config, model, "float64")
    sizes = dataclasses.replace(config, verify_tokens=3)
    if mesh:
        verifying = meshes.over(mesh, model, sizes, "float64", proposer=oracle)
    else:
        verifying = engines.build(sizes, model, "float64", proposer=oracle)
    worst = 0.0
    for oracle.mode in ("all", "some", "none"):
        made = beside(plain, verifying, asked(rng, config, 5), oracle)
        # Pages of completions that were verified are found again, and hold what the training forward computes.
        again = [
            {"prompt": s.tokens[:40], "params": SamplingParams(max_tokens=24, temperature=0.0, logprobs=1, seed=3)}
            for r in made[-3:] for s in r.sequences
        ]  # fmt: skip
        hits = verifying.scheduler.hit_tokens
        made += beside(plain, verifying, again, oracle)
        worst = max(worst, engines.error(model, "float64", made))
        assert way != "roomy" or verifying.scheduler.hit_tokens > hits
    assert way == "roomy" or mesh or verifying.scheduler.preemptions > 0
    return worst


@proof("seams", cases=["all", "some"], sample=1, float64=True)
def verified_grammars(mode: Mode) -> None:
    """Text, stop strings and grammars beside an engine without verification."""
    oracle = OracleProposer(mode, np.random.default_rng([*mode.encode()]), 256)
    beside(writer(), writer(verify_tokens=4, proposer=oracle), written(), oracle)


@proof("seams", cases=[2, 4], sample=1, float64=True)
def accepted_tokens_take_no_steps(verify_tokens: int) -> None:
    """Steps of 41 tokens: one each without verification, one for each full chunk with it."""
    config = dataclasses.replace(engines.ENGINES["roomy"], decode_steps=1)
    oracle = OracleProposer("all", np.random.default_rng(0), engines.VOCAB)
    plain = engines.build(config, "llama", "float64")
    sizes = dataclasses.replace(config, verify_tokens=verify_tokens)
    verifying = engines.build(sizes, "llama", "float64", proposer=oracle)
    requests = [{"prompt": [5, 6, 7], "params": SamplingParams(max_tokens=41, temperature=0.0, seed=0)}]
    beside(plain, verifying, requests, oracle)
    assert (plain.metrics.steps, verifying.metrics.steps) == (41, 1 + -(-40 // (verify_tokens + 1)))


@proof("seams", cases=["tight, recompute", "tight, swap"], sample=1)
def cancelled_while_verified(way: str) -> None:
    """Requests that are cancelled, and weights that are replaced, while a verification runs."""
    rng = np.random.default_rng([*way.encode()])
    oracle = OracleProposer("all", rng, engines.VOCAB)
    engine = engines.build(dataclasses.replace(engines.ENGINES[way], verify_tokens=3), proposer=oracle)
    check_cancelled_in_flight(engine, oracle, rng)
