"""Layers in parallel: the KV cache of what is known is exact after every round, and recalibration keeps acceptance."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.infer import Engine, SamplingParams
from jaxllm.infer.speculate.draft_length import FixedDraftLength
from jaxllm.infer.speculate.draft_model import HeldTokens
from jaxllm.infer.speculate.layer_parallel_draft import LayerParallelProposer
from jaxllm.models import functional
from tests import quick
from tests.infer import engines
from tests.infer.proposers import OracleProposer
from tests.infer.test_layer_parallel_draft import DEEP, rounds
from tests.infer.test_verification import equal
from tests.proofs.harness import proof
from tests.proofs.speculation.completions import speculate

TOKENS = 4


def verifying(model: str = "llama") -> Engine:
    config = dataclasses.replace(engines.ENGINES["roomy"], max_sequences=2, decode_steps=1, verify_tokens=TOKENS)
    return engines.build(config, model, "float64", proposer=OracleProposer("silent", np.random.default_rng(0), 1))


@proof("speculation", count=8, sample=1, float64=True)
def recalibrated_is_exact(seed: int) -> None:
    """Keys and values of known tokens within 1e-10 of an exact pass, over five rounds, on one device and several."""
    rng = np.random.default_rng(seed)
    parallel, devices = ((2, 1), (3, 1), (4, 1), (2, 2), (4, 2), (4, 4))[rng.integers(6)]
    params = jax.tree.map(jnp.asarray, quick.params(DEEP, seed=6, scale=0.5))
    rounds(engines.layer_parallel_draft(verifying(), DEEP, params, parallel, devices), rng)


class StaleProposer(LayerParallelProposer):
    """Keeps the approximate keys and values of accepted tokens, as without recalibration."""

    def propose_all(self, wanted: list[tuple[Any, int]]) -> Any:
        found = super().propose_all(wanted)
        for (one, _), draft in zip(wanted, found, strict=True):
            if draft is not None:
                held = self._held[one.slot]
                self._held[one.slot] = HeldTokens(one, held.length, draft[:-1])
        return found


@proof("speculation", count=3, sample=1, float64=True, counts=("one", "two", "four", "two, stale"))
def acceptance_of_layers_in_parallel(seed: int) -> dict[str, float]:
    """Accepted tokens a draft, of four, with the served model's own weights as the draft: groups of 1, 2 and 4 layers.

    And of 2 without recalibration. Completions are the same for all.
    """
    rng, params = np.random.default_rng(seed), jax.tree.map(jnp.asarray, quick.params(DEEP, seed=seed, scale=0.3))
    model, sizes = functional(DEEP), dataclasses.replace(engines.ENGINES["roomy"], decode_steps=1, verify_tokens=TOKENS)
    asked = [
        {"prompt": rng.integers(0, engines.VOCAB, 6).tolist(), "params": SamplingParams(max_tokens=50, seed=number)}
        for number in range(32)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", quick.jit)
        engine = Engine.of(model, params, sizes, proposer=OracleProposer("silent", rng, 1), strict=True)
    want, found = engines.serve(engine, asked), dict[str, float]()
    for name, parallel in (("one", 1), ("two", 2), ("four", 4), ("two, stale", 2)):
        with pytest.MonkeyPatch.context() as patch:
            if name == "two, stale":
                patch.setattr(engines, "LayerParallelProposer", StaleProposer)
            proposer = engines.layer_parallel_draft(engine, DEEP, params, parallel)
        speculate(engine, proposer, FixedDraftLength(TOKENS))
        equal(engines.serve(engine, asked), want)
        found[name] = engine.metrics.accepted_tokens / engine.metrics.drafts
    assert found["one"] == max(found.values())
    assert found["two, stale"] < found["two"]
    return found
