"""Loading a trained model, and the errors when it is not one."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxllm.checkpoint import CheckpointCorruptError, Checkpointer
from jaxllm.data import DataError, load_dataset
from jaxllm.infer import ModelNotFoundError, load_model
from sharding import MeshSpec
from tests.train.runs import run_config


def test_a_run_opens_with_its_parameters_its_architecture_and_its_tokenizer(finished):
    loaded = load_model(finished / "runs" / "tiny")
    config = run_config(finished)
    assert loaded.step == 12
    assert loaded.model.config == config.model
    assert loaded.tokenizer.fingerprint == load_dataset(config.data).tokenizer.fingerprint
    assert loaded.meta["config"]["seed"] == config.seed
    with Checkpointer(finished / "runs" / "tiny" / "checkpoints", read_only=True) as checkpointer:
        saved, _ = checkpointer.restore()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(loaded.params), saved["params"])
    assert {device for leaf in jax.tree.leaves(loaded.params) for device in leaf.devices()} == {jax.devices()[0]}


def test_an_earlier_step_and_another_mesh(finished):
    earlier = load_model(finished / "runs" / "tiny", step=4, mesh=MeshSpec.parse("fsdp_tp").build())
    assert earlier.step == 4
    table = earlier.params["embedding"]["table"]
    assert table.addressable_shards[0].data.size == table.size // 8
    last = load_model(finished / "runs" / "tiny")
    assert not np.array_equal(table, last.params["embedding"]["table"])
    with pytest.raises(ModelNotFoundError, match="5"):
        load_model(finished / "runs" / "tiny", step=5)


def test_layers_apart_on_a_mesh(finished):
    loaded = load_model(finished / "runs" / "tiny", mesh=MeshSpec.parse("fsdp=4,tensor=2").build(), layers="apart")
    stacked = load_model(finished / "runs" / "tiny")
    layers = loaded.params["segments"]["0"]
    again = jax.tree.map(lambda *parts: np.stack([np.asarray(part) for part in parts]), *layers)
    jax.tree.map(np.testing.assert_array_equal, again, jax.device_get(stacked.params["segments"]["0"]))
    up = layers[0]["0"]["mlp"]["up"]
    assert up.addressable_shards[0].data.size == up.size // 8


def test_places_that_hold_no_model(tmp_path):
    with pytest.raises(ModelNotFoundError, match="there is no such directory"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ModelNotFoundError, match="it has no checkpoints/"):
        load_model(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ModelNotFoundError, match="no finished checkpoint yet"):
        load_model(tmp_path)


def test_a_tokenizer_that_is_not_the_runs_own(finished, copied):
    other = load_dataset(dataclasses.replace(run_config(finished).data, tokenizer="bpe:280")).tokenizer
    other.save(copied / "tokenizer")
    with pytest.raises(DataError, match="is not the tokenizer this checkpoint was trained with") as raised:
        load_model(copied)
    assert other.fingerprint[:12] in str(raised.value)


def test_a_missing_tokenizer_is_named(copied):
    for file in (copied / "tokenizer").iterdir():
        file.unlink()
    with pytest.raises(DataError, match=r"tokenizer"):
        load_model(copied)


def test_a_corrupt_newest_checkpoint_is_stepped_over_and_left_alone(copied, caplog):
    folder = next(path for path in (copied / "checkpoints").iterdir() if path.name.endswith("12"))
    for file in folder.rglob("*"):
        if file.is_file() and "table" in str(file) and "params" in str(file):
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
    assert load_model(copied).step == 8
    assert "CORRUPT CHECKPOINT" in caplog.text
    assert folder.exists(), "a reader renames nothing"
    with pytest.raises(CheckpointCorruptError, match="12"):
        load_model(copied, step=12)
