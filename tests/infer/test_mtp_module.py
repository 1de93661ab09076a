"""Modules for multi-token prediction of published models draft as transformers' layers do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.hub import load_hf
from jaxllm.hub.huggingface import HubModel
from jaxllm.infer import LLM, Engine, EngineConfig, SamplingParams
from jaxllm.infer.speculate.draft_head import head_forward, head_model, output_params, read_features
from jaxllm.infer.speculate.draft_model import ServedModel
from jaxllm.infer.speculate.mtp_module import load_module
from jaxllm.models import Segments, functional
from tests import quick
from tests.hub import peers
from tests.infer import mtp_models

SIZES = EngineConfig(
    max_sequences=2, max_batched_tokens=16, pages=40, page_size=4, buckets=(16,), decode_steps=2, max_len=64,
    samplers=("full",), speculate="mtp", verify_tokens=3, draft_length="fixed",
)  # fmt: skip


def build(loaded: HubModel, path: Path | None, config: EngineConfig = SIZES) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", quick.jit)
        return Engine.of(functional(loaded.config), loaded.params, config, strict=True, path=path)


def serve(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    asked = [engine.submit(prompt, params) for prompt in prompts]
    while engine.busy:
        engine.step()
    return [one.sequences[0].tokens for one in asked]


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("family", mtp_models.FAMILIES)
def test_logits_are_those_of_transformers_layers(family, tmp_path, rng, float64):
    """Of two drafted tokens, the second from the module's own feature."""
    torch_model, own = mtp_models.save(family, int(rng.integers(100)), tmp_path / "model")
    loaded = load_hf(tmp_path / "model", dtype="float64")
    params = jax.tree.map(lambda x: x.addressable_data(0), loaded.params)
    model, tokens = functional(loaded.config), rng.integers(1, 40, 9).tolist()
    served = ServedModel(model, params, SIZES, None, 40, path=tmp_path / "model")
    head = load_module(served)
    row = jnp.arange(10, dtype=jnp.int32)[None]
    hidden, _ = model.forward(params, jnp.asarray([tokens], jnp.int32), row[:, :9], Segments())
    smaller, _ = head_model(model, params)
    before, outputs, logits = (
        read_features(model, params, head, hidden)[:, :-1],
        output_params(params, head),
        [],
    )
    for _ in range(2):
        pairs = jnp.asarray([tokens[1:]], jnp.int32)
        made, _ = head_forward(smaller, params, head, before, pairs, row[:, : pairs.shape[1]], Segments())
        logits.append(np.asarray(smaller.head(outputs, made)[0, -1]))
        tokens.append(int(logits[-1].argmax()))
        before = jnp.concatenate([before, read_features(smaller, outputs, head, made[:, -1:])], axis=1)
    want = mtp_models.drafted(torch_model, own, tokens[:9], 2)
    np.testing.assert_allclose(np.stack(logits), want, rtol=0, atol=1e-9 * np.abs(want).max())


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("family", mtp_models.FAMILIES)
def test_an_engine_drafts_what_transformers_layers_draft(family, tmp_path, rng, float64, monkeypatch):
    """Greedy and sampled completions are plain decoding's; greedy drafts are those of the layers."""
    torch_model, own = mtp_models.save(family, 3, tmp_path / "model")
    loaded = load_hf(tmp_path / "model", dtype="float64")
    prompts = [rng.integers(1, 40, n).tolist() for n in (1, 2, 9, 23)]
    engine = build(loaded, tmp_path / "model")
    proposer: Any = engine.proposer
    propose, drafts = proposer.propose_all, 0
    greedy, sampled = SamplingParams(max_tokens=15, temperature=0.0), SamplingParams(max_tokens=15, seed=4)
    with monkeypatch.context() as patch:
        patch.setattr(proposer, "propose_all", lambda wanted: [[] for _ in wanted])
        want = [serve(engine, prompts, params) for params in (greedy, sampled)]
    assert engine.metrics.drafts == 0

    def checked(wanted: list[Any]) -> Any:
        nonlocal drafts
        found = propose(wanted)
        for (one, _), tokens in zip(wanted, found, strict=True):
            if tokens and len(one.tokens) > 1 and one.request.params.temperature == 0 and drafts < 5:
                logits = mtp_models.drafted(torch_model, own, one.tokens, len(tokens))
                assert tokens == logits.argmax(axis=1).tolist()
                drafts += 1
        return found

    monkeypatch.setattr(proposer, "propose_all", checked)
    assert [serve(engine, prompts, params) for params in (greedy, sampled)] == want
    assert drafts == 5
    assert engine.metrics.drafts > 20
    assert proposer.program_cache.counts.late == 0


def test_a_model_without_a_module_is_refused(tmp_path):
    peers.peer("deepseek_v3", 3).save(tmp_path / "none")
    loaded = load_hf(tmp_path / "none")
    with pytest.raises(ValueError, match=r"none has no module for multi-token prediction: .*layers.3.eh_proj.weight"):
        build(loaded, tmp_path / "none")
    with pytest.raises(ValueError, match="the model is not from a checkpoint; give draft:MODEL, or ngram"):
        build(loaded, None)
    with pytest.raises(ValueError, match="'mtp:2': mtp:2; the module is the served model's own"):
        LLM("no/such/model", speculate="mtp:2")
