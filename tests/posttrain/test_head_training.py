"""Draft heads: an engine drafts what whole passes draft, a head learns, and both fusions are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.infer import LLM, EngineConfig, SamplingParams
from jaxllm.infer.speculate.draft_head import (
    FUSIONS,
    HEAD_FILE,
    DraftHead,
    head_forward,
    head_model,
    load_head,
    new_head,
    save_head,
)
from jaxllm.infer.speculate.draft_length import FixedDraftLength
from jaxllm.infer.speculate.draft_model import ServedModel
from jaxllm.infer.speculate.head_draft import HeadProposer
from jaxllm.infer.speculate.proposer_table import configured
from jaxllm.models import Segments, functional
from jaxllm.posttrain import DraftHeadRunConfig
from recipes.eagle import eagle_smollm2
from tests import quick
from tests.infer import engines, meshes
from tests.infer.drafts import drawn_head, learned_head
from tests.infer.proposers import OracleProposer
from tests.infer.test_verification import asked, equal
from tests.proofs.speculation.completions import speculate

TOKENS = 3


def build(way: str, family: str, dtype: str = "float64", **fields: Any) -> Any:
    """An engine that keeps features, and verifies."""
    sizes = dataclasses.replace(engines.ENGINES[way], verify_tokens=TOKENS, draft_features=True, **fields)
    silent = OracleProposer("silent", np.random.default_rng(0), 1)
    return engines.build(sizes, family, dtype, proposer=silent, apart=way == "layers apart")


def whole_passes(family: str, head: DraftHead) -> Callable[[list[int], int, int], list[int]]:
    """``(tokens, found, count) -> draft``, greedy and without a cache; ``found`` tokens have no features.

    One program for all lengths: what is behind the tokens changes nothing in front of it.
    """
    whole, params = functional(engines.model_of(family, "float64")), engines.params_of(family, "float64")
    smaller, _ = head_model(whole, params)
    positions = jnp.arange(engines.LONGEST, dtype=jnp.int32)[None]
    features = quick.jit(lambda tokens: whole.forward(params, tokens, positions, Segments())[0][0])

    @quick.jit
    def drafted(before: Any, tokens: Any) -> Any:
        made, _ = head_forward(smaller, params, head, before, tokens, positions, Segments())
        return made[0], jnp.argmax(smaller.head(params, made)[0], axis=-1)

    def draft(tokens: list[int], found: int, count: int) -> list[int]:
        padded = np.zeros((1, engines.LONGEST), np.int32)
        padded[0, : len(tokens)] = tokens
        before = np.pad(np.asarray(features(padded)), ((1, 0), (0, 0)))[: engines.LONGEST]
        before[: found + 1] = 0
        for end in range(len(tokens), len(tokens) + count):
            made, likeliest = drafted(before[None], padded)
            if end < engines.LONGEST:
                padded[0, end], before[end] = likeliest[end - 1], made[end - 1]
        return [*padded[0, len(tokens) : len(tokens) + count].tolist()]

    return draft


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize(
    ("way", "family", "fusion"),
    [("tight, recompute", "llama", "gated"), ("layers apart", "gemma3", "concat"), ("contiguous", "gpt2", "gated")],
)
def test_an_engine_drafts_what_whole_passes_draft(way, family, fusion, rng, float64, tmp_path, monkeypatch):
    """Greedy drafts, after prefix hits and preemptions too; completions are those of plain decoding."""
    save_head(drawn_head(family, fusion, rng), tmp_path)
    head = load_head(str(tmp_path))
    assert head.fusion == fusion
    engine = build(way, family)
    requests = asked(rng, engine.config, 3)
    want = engines.serve(engine, requests)
    proposer, drafts = engines.head_draft(engine, head), 0
    speculate(engine, proposer, FixedDraftLength(TOKENS))
    propose = proposer.propose_all
    exact = whole_passes(family, DraftHead(fusion, jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), head.weights)))

    def checked(wanted: list[Any]) -> Any:
        nonlocal drafts
        found = propose(wanted)
        for (one, count), tokens in zip(wanted, found, strict=True):
            if tokens and one.request.params.temperature == 0 and not drafts > 8:
                assert tokens == exact(one.tokens, one.found, count)[: len(tokens)]
                drafts += 1
        return found

    monkeypatch.setattr(proposer, "propose_all", checked)
    equal(engines.serve(engine, requests), want)
    assert drafts > 3
    assert proposer.program_cache.counts.late == 0


def acceptance(engine: Any, head: DraftHead) -> float:
    """Accepted tokens of a draft, over greedy completions."""
    speculate(engine, engines.head_draft(engine, head), FixedDraftLength(TOKENS))
    rng = np.random.default_rng(5)
    asked_for = SamplingParams(max_tokens=40, temperature=0.0)
    prompts = (rng.integers(0, engines.VOCAB, 6).tolist() for _ in range(24))
    engines.serve(engine, [{"prompt": prompt, "params": asked_for} for prompt in prompts])
    return engine.metrics.accepted_tokens / engine.metrics.drafts


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("fusion", FUSIONS)
def test_a_short_training_raises_acceptance(fusion):
    """Loss falls; more drafts of the engine are accepted."""
    head, metrics = learned_head(fusion, 120, 0)
    assert metrics[-1]["loss"] < 0.5 * metrics[0]["loss"]
    assert metrics[-1]["right"] > 2 * metrics[0]["right"]
    untrained = new_head(
        functional(engines.model_of("llama", "float32")), engines.params_of("llama", "float32"), fusion
    )
    engine = build("roomy", "llama", "float32")
    before, after = (acceptance(engine, one) for one in (untrained, head))
    assert after > 2 * before, (before, after)


@pytest.mark.drawn(0.6)
def test_what_does_not_go_together_is_refused(rng, tmp_path, float64):
    with pytest.raises(ValueError, match=r"cannot be read.*jaxllm train eagle_smollm2. writes one"):
        LLM("no/such/model", speculate=f"head:{tmp_path}")
    head = drawn_head("llama", "concat", rng)
    save_head(head, tmp_path)
    config = configured(EngineConfig(speculate=f"head:{tmp_path}"))
    assert (config.draft_features, config.verify_tokens) == (True, 4)
    with pytest.raises(ValueError, match="do not go with preemption = 'swap'"):
        configured(EngineConfig(speculate=f"head:{tmp_path}", preemption="swap"))
    with pytest.raises(ValueError, match=r"draft head's segments/0/0/.* this model needs"):
        engines.head_draft(build("roomy", "gemma3"), head)
    sizes = dataclasses.replace(engines.ENGINES["roomy"], verify_tokens=TOKENS, draft_features=True)
    with pytest.raises(ValueError, match="are kept on one device"):
        meshes.over("tensor=2", "wide", sizes, proposer=OracleProposer("silent", rng, 1))
    half = (tmp_path / HEAD_FILE).read_bytes()
    (tmp_path / HEAD_FILE).write_bytes(half[: len(half) // 2])
    with pytest.raises(ValueError, match="cannot be read"):
        load_head(str(tmp_path))


def test_settings_are_checked():
    run = eagle_smollm2()
    assert isinstance(run, DraftHeadRunConfig)
    for fields, message in (
        ({"fusion": "sum"}, "fusion = 'sum'; legal: concat, gated"),
        ({"noise": -1.0}, "give 0 or more"),
        ({"init_from": ""}, "a draft head are those of a model: give init_from"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(run, **fields)


@pytest.mark.drawn(1)
def test_compiled_programs_are_found_again(tmp_path):
    engine = build("one after the other", "llama", "float32")
    model, params = functional(engines.model_of("llama", "float32")), engines.params_of("llama", "float32")
    served = ServedModel(model, params, engine.config, None, engines.VOCAB, manifest=tmp_path)
    counts = [HeadProposer(new_head(model, params, "gated"), served).program_cache.counts for _ in range(2)]
    assert [(one.compiled, one.loaded) for one in counts] == [(2, 0), (0, 2)]
