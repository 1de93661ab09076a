"""A 2-bit KV format and a retention rule: served as their dense references compute, in every way to serve."""

from __future__ import annotations

import dataclasses

import numpy as np

from tests.infer import engines, meshes
from tests.infer.proposers import Mode, OracleProposer
from tests.proofs.harness import proof
from tests.seams.dense_reference import DenseReference
from tests.seams.test_cache_seams import RULE, config, most_pages, served_error

CACHES = [
    ("tight, recompute", "llama", "int2", None, ""),
    ("tight, recompute", "llama", "auto", "every_other_token", ""),
    ("tight, swap", "gemma3", "int2", "every_other_token", ""),
    ("tight, recompute", "deepseek_v3", "auto", "every_other_token", ""),
    ("tight, swap", "wide", "int2", None, "data=2,tensor=2"),
    ("tight, swap", "wide", "auto", "every_other_token", "data=2,tensor=2"),
]
"""(way to serve, model, KV format, retention rule, mesh)."""


@proof("seams", cases=CACHES, sample=1, float64=True, bound=1e-10)
def served_as_the_reference(case: tuple[str, str, str, str | None, str]) -> float:
    """Log-probabilities of random traffic; the training forward's are others."""
    way, model, kv_dtype, retention, mesh = case
    sizes = config(way, kv_dtype, retention)
    engine = meshes.over(mesh, model, sizes, "float64") if mesh else engines.build(sizes, model, "float64")
    reference = DenseReference("int2" if kv_dtype == "int2" else "plain", RULE.keep if retention else None)
    return served_error(engine, model, reference, np.random.default_rng([*way.encode(), *model.encode()]))


@proof("seams", cases=[(None, 15), ("every_other_token", 8)], sample=1)
def pages_of_kept_tokens(case: tuple[str | None, int]) -> None:
    """Pages of 4 entries that 60 tokens hold: all of them, or half and the last."""
    retention, pages = case
    assert most_pages(retention) == pages


@proof("seams", cases=["all", "some", "none"], sample=1, float64=True)
def verified_under_a_rule(mode: Mode) -> None:
    """Completions beside those of an engine with the same rule that verifies nothing."""
    rng = np.random.default_rng([*mode.encode()])
    sizes = config("tight, swap", "auto", "every_other_token")
    oracle = OracleProposer(mode, rng, engines.VOCAB)
    plain = engines.build(sizes, "llama", "float64")
    verifying = engines.build(dataclasses.replace(sizes, verify_tokens=3), "llama", "float64", proposer=oracle)
    asked = [one | {"cancel": None} for one in engines.traffic(rng, sizes, 6)]
    want = engines.serve(plain, asked)
    oracle.learn(want)
    got = engines.serve(verifying, asked)
    assert [s.tokens for r in got for s in r.sequences] == [s.tokens for r in want for s in r.sequences]
    metrics = verifying.metrics
    assert metrics.proposed_tokens > 0
    assert (metrics.accepted_tokens == metrics.proposed_tokens) == (mode == "all")
    assert (metrics.accepted_tokens == 0) == (mode == "none")
