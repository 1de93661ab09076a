"""A model beside the one that it was made of: loss, divergence and agreement against numpy in float64."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import cli
from jaxllm.convert.load import load_model
from jaxllm.evals.model_comparison import compare_models
from jaxllm.models.attention_context import Segments


@pytest.fixture
def loaded(finished):
    return load_model(finished / "runs" / "tiny")


def test_figures_are_those_of_the_distributions(loaded, rng):
    other = dataclasses.replace(
        loaded, params=jax.tree.map(lambda x: x + 0.1 * jnp.asarray(rng.normal(size=x.shape), x.dtype), loaded.params)
    )
    rows = rng.integers(0, 256, (3, 9)).astype(np.int32)
    seen: list[int] = []
    found = compare_models(loaded, other, rows, seen.append)

    def scores(one) -> np.ndarray:
        with jax.set_mesh(one.mesh):
            positions = jnp.broadcast_to(jnp.arange(9), rows.shape)
            hidden, _ = one.model.forward(one.params, jnp.asarray(rows), positions, Segments())
            logits = np.asarray(one.model.head(one.params, hidden), np.float64)[:, :-1]
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    one, two = scores(loaded), scores(other)
    taken = [-np.take_along_axis(x, rows[:, 1:, None], axis=2).mean() for x in (one, two)]
    kl = (np.exp(one) * (one - two)).sum(-1).mean()
    assert kl > 1e-3
    assert (found.tokens, seen) == (24, [1, 2, 3])
    np.testing.assert_allclose([found.original_nll, found.nll, found.kl], [*taken, kl], rtol=1e-4)
    assert found.agreement == pytest.approx((one.argmax(-1) == two.argmax(-1)).mean())


def test_a_model_has_lost_nothing_of_itself(finished, capsys, tmp_path):
    run, text = str(finished / "runs" / "tiny"), tmp_path / "text.txt"
    text.write_text("What was lost, and what was not. " * 4)
    assert cli.main(["eval", run, "--original", run, "--text", str(text), "--max-len", "16", "--limit", "3"]) == 0
    said = capsys.readouterr().out
    assert "45 tokens of" in said
    assert "(+0.00%)" in said
    assert "KL         0.0000" in said
    assert "100.0%" in said


def test_what_cannot_be_compared_is_named(loaded, finished, capsys, tmp_path):
    config = dataclasses.replace(loaded.model.config, vocab_size=300)
    other = dataclasses.replace(loaded, model=dataclasses.replace(loaded.model, config=config))
    with pytest.raises(ValueError, match="different tokenizers, of 280 and 300 tokens"):
        compare_models(loaded, other, np.zeros((1, 4), np.int32))
    with pytest.raises(ValueError, match="rows of 1 tokens have none that follows another"):
        compare_models(loaded, loaded, np.zeros((1, 1), np.int32))
    run, short = str(finished / "runs" / "tiny"), tmp_path / "short.txt"
    short.write_text("short")
    for words, message in (
        (["--text", str(short)], "--text is what a model is compared on with its --original"),
        (["--original", run, "--text", str(short), "--tasks", "t.jsonl"], "in place of --tasks"),
        (["--original", run, "--needle"], "--needle goes with"),
        (["--original", run, "--text", str(short)], "--text has 5 tokens, and a row has 512"),
        (["--original", run, "--text", str(tmp_path / "none.txt")], "there is no file"),
        (["--original", run, "--step", "4"], "--original goes with --text"),
    ):
        assert cli.main(["eval", run, *words]) == 2
        assert message in capsys.readouterr().err
