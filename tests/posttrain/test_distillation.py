"""Distilled drafts: the loss is its definition, and a trained draft is a model that an engine drafts with."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from jaxllm.convert.load import load_model
from jaxllm.data import Batch, DataConfig
from jaxllm.hub import find_model, open_source
from jaxllm.infer import LLM, EngineConfig, SamplingParams
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig, functional
from jaxllm.posttrain import DistillationRunConfig, train_distilled
from jaxllm.posttrain.frozen.distillation import distillation_step, student_of, trained_of, with_trained
from jaxllm.train import train
from recipes.draft import draft_smollm2
from tests import quick
from tests.infer import engines
from tests.train import runs

MODEL = DecoderConfig(280, 16, 3, pattern=(BlockConfig(AttentionConfig(2, 1, 8), MlpConfig(16)),))
SIZES = EngineConfig(
    max_sequences=1, max_batched_tokens=16, pages=20, page_size=4, buckets=(16,), samplers=("full",), max_len=64
)


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("family", "layers"), [("llama", [0]), ("gemma3", [0, 3])])
def test_metrics_are_their_definition(family, layers, rng, float64):
    """Two documents and padding in a row; a step lowers the loss, and touches only what is trained."""
    model, weights = functional(engines.model_of(family, "float64")), engines.params_of(family, "float64")
    student, params = student_of(model, weights, layers)
    tokens = rng.integers(0, engines.VOCAB, (1, 14)).astype(np.int32)
    segments = np.asarray([[1] * 7 + [2] * 5 + [0] * 2], np.int32)
    batch = Batch(tokens, tokens, segments, np.asarray([[*range(7), *range(5), 0, 1]], np.int32))
    rule = optax.sgd(1e-4)
    step = jax.jit(distillation_step(model, student, rule))
    values, state, metrics = step(trained_of(params), rule.init(trained_of(params)), weights, batch)

    found, wanted = [], []
    for text in (tokens[:, :7], tokens[:, 7:12]):
        for logits, one, own in ((found, student, params), (wanted, model, weights)):
            logits.append(jax.nn.log_softmax(quick.logits(one.config, own, text))[0])
    q, p = (np.exp(np.concatenate(x)) for x in (found, wanted))
    # Softmax is taken in float32 there.
    assert float(metrics["loss"]) == pytest.approx(np.sum(p * np.log(p / q), axis=1).mean(), rel=1e-5)
    assert float(metrics["overlap"]) == pytest.approx(np.minimum(p, q).sum(1).mean(), rel=1e-5)
    assert float(metrics["right"]) == pytest.approx((p.argmax(1) == q.argmax(1)).mean())
    assert float(step(values, state, weights, batch)[2]["loss"]) < float(metrics["loss"])
    whole = with_trained(params, values)
    for part in ("embedding", "head"):
        kept = {path: x for path, x in jax.tree.leaves_with_path(params[part]) if "norm" not in str(path)}
        after = dict(jax.tree.leaves_with_path(whole[part]))
        assert all(x is after[path] for path, x in kept.items())


@pytest.mark.drawn(1)
def test_a_draft_is_a_model_that_drafts(tmp_path: Path) -> None:
    """From a run to a directory that `--speculate draft:DIR` loads; completions are those of plain decoding."""
    with runs.shared_programs():
        base = train(runs.run_config(tmp_path, model=MODEL, steps=20, name="base")).directory
    text = str(tmp_path / "text.txt")
    config = DistillationRunConfig(
        name="draft",
        model=load_model(str(base)).model.config,
        init_from=str(base),
        data=DataConfig(text, tokenizer="model", seq_len=16, batch_size=8, cache_dir=str(tmp_path / "cache")),
        steps=60,
        layers=1,
        out=str(tmp_path / "runs"),
    )
    draft = train_distilled(config).directory / "model"
    loaded, whole = load_model(str(draft)), load_model(str(base))
    assert loaded.model.config.layers == 1
    np.testing.assert_array_equal(loaded.params["embedding"]["table"], whole.params["embedding"]["table"])
    assert not np.array_equal(
        jax.tree.leaves(loaded.params["segments"])[0], jax.tree.leaves(whole.params["segments"])[0][:1]
    )

    asked = SamplingParams(max_tokens=24, temperature=0.0)
    prompt = (tmp_path / "text.txt").read_text()[:20]
    plain = LLM(str(base), SIZES).generate([prompt], asked)
    drafting = LLM(str(base), SIZES, speculate=f"draft:{draft}", speculate_tokens=2)
    assert drafting.generate([prompt], asked)[0].outputs[0].text == plain[0].outputs[0].text
    assert drafting.engine.metrics.accepted_tokens > 0
    with pytest.raises(ValueError, match=r"model exists; give another name or out, or remove it"):
        train_distilled(config)


def test_settings_are_checked() -> None:
    run = draft_smollm2()
    assert run.model == open_source(find_model("smollm2")).config
    for fields, message in (
        ({"layers": 30}, "layers = 30, but the model has 30; give 1 to 29"),
        ({"accumulate": 2}, "accumulate = 2, which the training of distilled drafts does not read"),
        ({"init_from": ""}, "distilled drafts are those of a model: give init_from"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(run, **fields)
