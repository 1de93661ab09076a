"""Training from a published model, and exporting the result to its format."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm import cli
from jaxllm.config import ConfigError
from jaxllm.data import DataError, load_dataset
from jaxllm.hub import HubModel, decoder_config, export_hf
from jaxllm.infer import load_model
from jaxllm.text import ByteTokenizer
from jaxllm.train import ResumeError, train
from tests import quick
from tests.train import runs

pytestmark = pytest.mark.usefixtures("shared_programs")

SOURCE = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "vocab_size": 272,
}


@pytest.fixture
def begin(tmp_path: Path) -> Path:
    directory = tmp_path / "begin"
    config = decoder_config(SOURCE)
    export_hf(HubModel(config, quick.params(config, scale=0.1), SOURCE), directory)
    ByteTokenizer().save(directory)
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return directory


def config(folder: Path, begin: Path, **fields: Any) -> Any:
    model = dataclasses.replace(decoder_config(SOURCE), remat="full", matmul_precision="int8", embed_grad=0.5)
    more = {"model": model, "init_from": str(begin), "tokenizer": "model", "steps": 2} | fields
    return runs.run_config(folder, **more)


@pytest.mark.drawn(0.3)
def test_a_run_begins_with_the_models_parameters(tmp_path: Path, begin: Path) -> None:
    run = config(tmp_path, begin)
    still = dataclasses.replace(
        run, optim=dataclasses.replace(run.optim, schedule=dataclasses.replace(run.optim.schedule, peak=1e-12))
    )
    assert train(still).complete
    trained = load_model(tmp_path / "runs" / "tiny")
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-9), trained.params, load_model(begin).params
    )
    assert trained.template is not None
    assert trained.template.render([{"role": "user", "content": "hi"}]) == "hi"
    assert trained.source == json.loads((begin / "config.json").read_text())
    assert trained.longest == 128


@pytest.mark.drawn(0.3)
def test_eval_measures_with_the_models_tokenizer(tmp_path: Path, begin: Path, capsys: pytest.CaptureFixture) -> None:
    """The run's configuration names no tokenizer of its own; what is measured is printed, whatever it is."""
    assert train(config(tmp_path, begin)).complete
    assert cli.main(["eval", str(tmp_path / "runs" / "tiny")]) in (0, 1)
    assert "bits per byte" in capsys.readouterr().out.split("held-out tokens")[1]


@pytest.mark.drawn(1)
def test_another_tokenizer_beside_a_run_is_refused(tmp_path: Path, begin: Path) -> None:
    assert train(config(tmp_path, begin)).complete
    first = tmp_path / "runs" / "tiny"
    load_dataset(runs.run_config(tmp_path, tokenizer="bpe:280").data).tokenizer.save(first / "tokenizer")
    with pytest.raises(ConfigError, match="is not the tokenizer that the checkpoint"):
        train(config(tmp_path, first, name="second"))


@pytest.mark.drawn(2)
def test_training_moves_on_from_there(tmp_path: Path, begin: Path) -> None:
    assert train(config(tmp_path, begin)).complete
    assert train(config(tmp_path, begin)).complete, "a finished run is not begun again"
    before, after = load_model(begin).params, load_model(tmp_path / "runs" / "tiny").params
    moved = [
        float(np.abs(np.asarray(a) - np.asarray(b)).max())
        for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    ]
    assert all(0 < m < 0.1 for m in moved)
    with pytest.raises(ResumeError, match="init_from"):
        train(config(tmp_path, begin, init_from="", tokenizer="byte"))


@pytest.mark.drawn(0.3)
def test_a_run_begins_where_another_ended(tmp_path: Path, begin: Path) -> None:
    """From a run's own checkpoint, in another dtype, and the first library's config.json still known."""
    assert train(config(tmp_path, begin)).complete
    first = tmp_path / "runs" / "tiny"
    model = dataclasses.replace(decoder_config(SOURCE), param_dtype="bfloat16", dtype="bfloat16")
    schedule = runs.run_config(tmp_path).optim.schedule
    still = {"schedule": dataclasses.replace(schedule, peak=1e-12)}
    assert train(config(tmp_path, first, name="second", model=model, **still)).complete
    old, new = load_model(first), load_model(tmp_path / "runs" / "second")
    for a, b in zip(jax.tree.leaves(old.params), jax.tree.leaves(new.params), strict=True):
        assert b.dtype == "bfloat16"
        np.testing.assert_array_equal(np.asarray(a).astype(b.dtype), np.asarray(b))
    assert new.source == old.source
    assert new.template is not None


def test_another_architecture_is_refused_field_by_field(tmp_path: Path, begin: Path) -> None:
    other = dataclasses.replace(decoder_config(SOURCE), layers=3, norm_eps=1e-6)
    with pytest.raises(ConfigError, match=r"model.layers: 2 -> 3\n  model.norm_eps: 1e-05 -> 1e-06") as raised:
        train(config(tmp_path, begin, model=other))
    assert "find_model" in str(raised.value)


def test_a_tokenizer_of_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="starts from no model"):
        train(runs.run_config(tmp_path, tokenizer="model"))


def test_rows_longer_than_learned_positions_are_refused(tmp_path: Path) -> None:
    base = runs.run_config(tmp_path)
    with pytest.raises(ValueError, match="the model has learned 5 positions"):
        dataclasses.replace(base, model=dataclasses.replace(base.model, learned_positions=5))
