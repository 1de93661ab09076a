"""Trained self-speculation: branches of a row, what a draft learns, and an engine that drafts several tokens a pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxllm.data.batch import Batch
from jaxllm.infer import LLM, SamplingParams
from jaxllm.infer.speculate.draft_length import FixedDraftLength
from jaxllm.infer.speculate.self_draft import with_layers
from jaxllm.infer.speculate.trained_draft import TrainedDraft, drafting_params, load_draft_file, save_draft
from jaxllm.models import Segments, functional
from jaxllm.peft import AdapterConfig
from jaxllm.peft.low_rank_factors import LowRank
from jaxllm.posttrain import DraftRunConfig
from jaxllm.posttrain.frozen.draft_training import branched_row, draft_step, new_draft
from jaxllm.posttrain.frozen.visible_tokens import VisibleTokens
from recipes.s3d import s3d_smollm2
from tests import quick
from tests.infer import engines, meshes
from tests.infer.drafts import ADAPTER, layers_of, one_device, trained_draft
from tests.infer.proposers import OracleProposer
from tests.infer.test_verification import asked, equal
from tests.proofs.speculation.completions import speculate


def pass_alone(model: str, draft: TrainedDraft) -> Callable[[list[int], int], np.ndarray]:
    """``(text, masks) -> logits`` after the last token of a text and after each mask token, without a cache.

    One program for all lengths: what is behind the tokens changes nothing in front of it.
    """
    whole, params = functional(engines.model_of(model, "float64")), engines.params_of(model, "float64")
    smaller, kept = with_layers(whole, params, list(draft.layers))
    weights = drafting_params(draft, smaller, kept, merge=False)
    length = engines.LONGEST + draft.masks.shape[0]

    @quick.jit
    def run(weights: Any, tokens: Any) -> Any:
        hidden, _ = smaller.forward(weights, tokens, jnp.arange(length)[None], Segments())
        return smaller.head(weights, hidden)[0]

    def logits(text: list[int], masks: int) -> np.ndarray:
        tokens = np.zeros((1, length), np.int32)
        tokens[0, : len(text) + masks] = [*text, *range(engines.VOCAB, engines.VOCAB + masks)]
        with quick.mesh_of(weights):
            return np.asarray(run(weights, tokens))[len(text) - 1 : len(text) + masks]

    return logits


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_branches_of_a_row_are_passes_alone(family, rng, float64):
    """Windows, soft caps and sinks too; two documents and padding in a row."""
    draft = trained_draft(family, 2, rng)
    tokens = rng.integers(0, engines.VOCAB, (1, 20)).astype(np.int32)
    segments = np.asarray([[1] * 11 + [2] * 7 + [0] * 2], np.int32)
    positions = np.asarray([[*range(11), *range(7), 0, 1]], np.int32)
    batch, at = Batch(tokens, tokens, segments, positions), jnp.asarray([[3, 9, 10, 14, 17, 19]])
    row = branched_row(batch, at, 2, engines.VOCAB)
    whole, params = functional(engines.model_of(family, "float64")), engines.params_of(family, "float64")
    smaller, kept = with_layers(whole, params, layers_of(family))
    weights = drafting_params(draft, smaller, kept, merge=False)
    hidden, _ = smaller.forward(weights, row.tokens, row.positions, VisibleTokens(row.visible))
    logits = np.asarray(smaller.head(weights, jnp.take_along_axis(hidden, row.places[..., None], axis=1)))[0]
    alone = pass_alone(family, draft)
    for number, anchor in enumerate(at[0].tolist()[:5]):
        begin = 0 if anchor < 11 else 11
        want = alone(tokens[0, begin : anchor + 1].tolist(), 2)
        np.testing.assert_allclose(logits[3 * number : 3 * number + 3], want, rtol=0, atol=1e-10)
    known = np.asarray(row.known).reshape(6, 3)
    assert known.tolist() == [[True] * 3, [True, True, False], [True, False, False], [True] * 3,
                              [True, False, False], [False] * 3]  # fmt: skip
    np.testing.assert_array_equal(np.asarray(row.labels).reshape(6, 3)[:3], [[3, 4, 5], [9, 10, 11], [10, 11, 12]])


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize(
    ("way", "family"), [("tight, recompute", "llama"), ("layers apart", "gemma3"), ("contiguous", "smollm2")]
)
def test_an_engine_drafts_what_a_pass_alone_drafts(way, family, rng, float64, tmp_path, monkeypatch):
    """Greedy drafts are the likeliest tokens of a pass without a cache; completions are those of plain decoding."""
    save_draft(trained_draft(family, 2, rng), tmp_path / "draft.safetensors")
    draft = load_draft_file(tmp_path / "draft.safetensors")
    sizes = dataclasses.replace(engines.ENGINES[way], verify_tokens=3)
    silent = OracleProposer("silent", rng, 1)
    engine = engines.build(sizes, family, "float64", proposer=silent, apart=way == "layers apart")
    requests = asked(rng, engine.config, 2)
    want = engines.serve(engine, requests)
    proposer, drafts = engines.self_draft(engine, draft), 0
    speculate(engine, proposer, FixedDraftLength(3))
    propose, alone = proposer.propose_all, pass_alone(family, draft)

    def checked(wanted: list[Any]) -> Any:
        nonlocal drafts
        found = propose(wanted)
        for (one, count), tokens in zip(wanted, found, strict=True):
            if tokens and one.request.params.temperature == 0 and not drafts > 40:
                likeliest = alone(one.tokens, min(count, 3) - 1).argmax(axis=1).tolist()
                assert tokens == likeliest[: len(tokens)]
                drafts += 1
        return found

    monkeypatch.setattr(proposer, "propose_all", checked)
    equal(engines.serve(engine, requests), want)
    assert drafts > 3
    assert engine.metrics.proposed_tokens > engine.metrics.drafts, "several tokens a pass"
    assert proposer.runner.program_cache is not None
    assert proposer.runner.program_cache.counts.late == 0
    if way == "layers apart":  # all that the draft adds to the bytes of the model are mask embeddings and factors
        served = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(engine.runner.params)}
        drafting = jax.tree.leaves(proposer.runner.params)
        added = [x for x in drafting if x.unsafe_buffer_pointer() not in served]
        sizes = draft.masks.size + sum(one.a.size + one.b.size for one in draft.factors.values())
        assert sum(x.nbytes for x in added) == 8 * sizes
        assert len(added) < len(drafting)


@pytest.mark.drawn(0.3)
def test_a_mesh_drafts_the_same(rng, float64):
    """Factors are merged there; greedy completions are those of plain decoding."""
    draft = trained_draft("wide", 2, rng)
    sizes = dataclasses.replace(engines.ENGINES["roomy"], verify_tokens=3)
    engine = meshes.over("tensor=2", "wide", sizes, "float64", proposer=OracleProposer("silent", rng, 1))
    text = rng.integers(0, engines.VOCAB, 9).tolist()
    requests = [{"prompt": text, "params": SamplingParams(max_tokens=12, temperature=0.0)}]
    want = engines.serve(engine, requests)
    proposer = engines.self_draft(engine, draft)
    speculate(engine, proposer, FixedDraftLength(3))
    got = engines.serve(engine, requests)
    equal(got, want)
    assert engine.metrics.drafts > 0
    proposer._held.clear()
    one = engine.submit(text, SamplingParams(max_tokens=1, temperature=0.0))
    engine.step()
    sequence = one.sequences[0]
    likeliest = pass_alone("wide", draft)(sequence.tokens, 2).argmax(axis=1).tolist()
    sequence.slot = max(sequence.slot, 0)
    found = next(iter(proposer.propose_all([(sequence, 3)])))
    assert found == likeliest


@pytest.mark.drawn(3)
def test_a_draft_learns_and_the_model_stays(rng):
    """Divergence falls on one batch; accepted tokens rise; only masks and factors are among what a step returns."""
    config = engines.model_of("llama", "float32")
    model, weights = functional(config), engines.params_of("llama", "float32")
    draft, _ = new_draft(model, weights, one_device(), [0, 1], dataclasses.replace(ADAPTER, rank=8), 2, 0)
    values = {"masks": draft.masks, "factors": {path: (one.a, one.b) for path, one in draft.factors.items()}}

    def made(values: Any) -> TrainedDraft:
        factors = {path: LowRank(a, b, draft.factors[path].scale) for path, (a, b) in values["factors"].items()}
        return TrainedDraft(draft.layers, values["masks"], factors)

    tokens = rng.integers(0, engines.VOCAB, (2, 24)).astype(np.int32)
    batch = Batch(tokens, tokens, np.ones_like(tokens), np.tile(np.arange(24, dtype=np.int32), (2, 1)))
    rule = optax.adam(2e-2)
    step, state, found = jax.jit(draft_step(model, made, rule, 12, 0)), rule.init(values), []
    for _ in range(80):
        values, state, metrics = step(values, state, weights, jax.tree.map(jnp.asarray, batch))
        found.append({name: float(value) for name, value in metrics.items()})
    assert found[-1]["loss"] < 0.5 * found[0]["loss"]
    first, last = (np.mean([one["accepted"] for one in some]) for some in (found[:10], found[-10:]))
    assert last > first + 0.1  # of eight seeds, seven rise by 1.2 to 2 tokens, and one by 0.19
    assert set(values) == {"masks", "factors"}


@pytest.mark.drawn(0.6)
def test_files_that_are_no_draft_of_this_model(rng, tmp_path, float64):
    path = tmp_path / "draft.safetensors"
    with pytest.raises(ValueError, match=r"cannot be read.*jaxllm train s3d_smollm2. writes such a file"):
        LLM("no/such/model", speculate=f"self:{path}")
    save_draft(trained_draft("llama", 2, rng), path)
    draft = load_draft_file(path)
    engine = engines.build(dataclasses.replace(engines.ENGINES["roomy"], verify_tokens=3), "gemma3", "float64",
                           proposer=OracleProposer("silent", rng, 1))  # fmt: skip
    with pytest.raises(ValueError, match=r"the trained draft's factors of segments/0/0/.* Train a draft of this model"):
        engines.self_draft(engine, draft)
    with pytest.raises(ValueError, match="keeps layer 9, but the model has 4"):
        engines.self_draft(engine, dataclasses.replace(draft, layers=(0, 9)))
    with pytest.raises(ValueError, match="for a model of 3 numbers a token; this one has 16"):
        engines.self_draft(engine, dataclasses.replace(draft, masks=draft.masks[:, :3]))
    half = path.read_bytes()
    path.write_bytes(half[: len(half) // 2])
    with pytest.raises(ValueError, match="cannot be read"):
        load_draft_file(path)


def test_settings_are_checked():
    run = s3d_smollm2()
    assert isinstance(run, DraftRunConfig)
    for fields, message in (
        ({"layers": 30}, "layers = 30, but the model has 30; give 1 to 29"),
        ({"anchors": 257}, "give 1 or more, and 1 to 256"),
        ({"adapter": AdapterConfig("prompt")}, "give lora or rslora"),
        ({"accumulate": 2}, "accumulate = 2, which the training of self-speculation's drafts does not read"),
        ({"init_from": ""}, "self-speculation's drafts are those of a model: give init_from"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(run, **fields)
