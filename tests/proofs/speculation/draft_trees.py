"""Draft trees: the mask is every branch as a sequence of its own, and larger trees have more accepted tokens a step."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxllm.infer import SamplingParams
from jaxllm.infer.engine.engine_metrics import EngineMetrics
from jaxllm.infer.speculate import tree_draft
from tests.infer import engines
from tests.infer.proposers import OracleTreeProposer
from tests.infer.test_tree_drafts import branch_error
from tests.infer.test_verification import equal
from tests.proofs.harness import proof

FAMILIES = tuple(engines.MODELS | engines.MIXTURES)
WINDOWED = 4
"""Tokens of a tree that is within the sliding windows of all families."""


@proof("speculation", count=40, sample=1, float64=True, bound=1e-10)
def tree_mask_is_each_path(seed: int) -> float:
    """Log-probabilities after each token of trees at random, read in two passes, beside each branch read alone.

    Every family, pages of every size, with windows and latents; all of the vocabulary is compared.
    """
    rng = np.random.default_rng(seed)
    family, way = (
        str(rng.choice(FAMILIES)),
        str(rng.choice(["roomy", "tight, recompute", "contiguous", "layers apart"])),
    )
    windowed = any(block.attention.window for block in engines.model_of(family, "float64").blocks)
    most = WINDOWED if windowed else 9
    sizes = dataclasses.replace(engines.ENGINES[way], verify_tokens=most, draft_trees=True)
    engine = engines.build(sizes, family, "float64", proposer=OracleTreeProposer("silent", rng, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_draft, "BRANCHES", engines.VOCAB)
        proposer = engines.tree_draft(engine, engines.model_of(family, "float64"), engines.params_of(family, "float64"))
    return max(branch_error(engine, family, proposer, rng, most) for _ in range(3))


BUDGETS = (1, 4, 15)


@proof("speculation", count=3, sample=1, float64=True, counts=tuple(f"accepted of {budget}" for budget in BUDGETS))
def accepted_rises_with_budget(seed: int) -> dict[str, float]:
    """Sampled completions with a draft that has some of the model's numbers: accepted tokens a step by the tree's size.

    Every budget accepts more than the one before it, and completions are the same for all.
    """
    rng = np.random.default_rng(seed)
    one, other = (engines.params_of("llama", "float64", number) for number in (4, 5))
    params = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, one, other)
    requests = [
        {"prompt": rng.integers(0, engines.VOCAB, 8).tolist(), "params": SamplingParams(max_tokens=30, seed=number)}
        for number in range(24)
    ]
    found, made = dict[str, float](), []
    for budget in BUDGETS:
        sizes = dataclasses.replace(engines.ENGINES["roomy"], max_sequences=1, verify_tokens=budget, draft_trees=True)
        engine = engines.build(sizes, "llama", "float64", proposer=OracleTreeProposer("silent", rng, 1))
        proposer = engines.tree_draft(engine, engines.MODELS["llama"], params)
        engine.scheduler.proposer = proposer  # type: ignore[attr-defined]
        engine.metrics = EngineMetrics()
        made.append(engines.serve(engine, requests))
        equal(made[-1], made[0])
        found[f"accepted of {budget}"] = engine.metrics.accepted_tokens / engine.metrics.drafts
    rates = list(found.values())
    assert rates == sorted(rates), rates
    assert rates[-1] > 2 * rates[0], rates
    return found
