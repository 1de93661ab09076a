"""Mixtures of experts from Hugging Face: errors that name the problem."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxllm.convert.convert import convert
from jaxllm.hub import HubError, decoder_config, load_hf
from jaxllm.hub.safetensors import INDEX, open_model, write_model
from tests.hub import peers
from tests.hub.test_huggingface import same_files

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_act": "silu",
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 40,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixtral")
    model = peers.transformers.MixtralForCausalLM(peers.transformers.MixtralConfig(**MIXTRAL))
    model.save_pretrained(directory)
    return directory


def changed(saved: Path, out: Path, **fields: Any) -> Path:
    shutil.copytree(saved, out)
    config = json.loads((out / "config.json").read_text()) | fields
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (3, r"not used: .*block_sparse_moe.experts.3.w1.weight.* \(6 in all\).*gate.weight has shape \[4, 8\]"),
        (5, r"missing: .*block_sparse_moe.experts.4.w1.weight.* \(6 in all\).*asks for \[5, 8\]"),
    ],
)
def test_another_number_of_experts_is_named(saved: Path, tmp_path: Path, experts: int, message: str) -> None:
    with pytest.raises(HubError, match=message):
        load_hf(changed(saved, tmp_path / "model", num_local_experts=experts))


def test_a_missing_expert_is_named(saved: Path, tmp_path: Path) -> None:
    tensors = {
        name: np.array(tensor)
        for name, tensor in open_model(saved).items()
        if ".1.block_sparse_moe.experts.2.w3" not in name
    }
    write_model(tmp_path / "model", tensors, {"config.json": (saved / "config.json").read_text()}, 2**30)
    with pytest.raises(HubError, match=r"missing: model.layers.1.block_sparse_moe.experts.2.w3.weight \(1 in all\)"):
        load_hf(tmp_path / "model")


def test_a_missing_shard_of_experts_is_named(saved: Path, tmp_path: Path) -> None:
    tensors = {name: np.array(tensor) for name, tensor in open_model(saved).items()}
    write_model(tmp_path / "model", tensors, {"config.json": (saved / "config.json").read_text()}, 2000)
    where = json.loads((tmp_path / "model" / INDEX).read_text())["weight_map"]
    lost = where["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    (tmp_path / "model" / lost).unlink()
    with pytest.raises(HubError, match=lost):
        load_hf(tmp_path / "model")


def test_an_expert_that_is_not_finite_is_named(saved: Path, tmp_path: Path) -> None:
    tensors = {name: np.array(tensor) for name, tensor in open_model(saved).items()}
    tensors["model.layers.1.block_sparse_moe.experts.2.w2.weight"][3, 1] = np.nan
    write_model(tmp_path / "model", tensors, {"config.json": (saved / "config.json").read_text()}, 2**30)
    with pytest.raises(HubError, match=r"mlp/experts/down \(row 1 of its layers, expert 2\) holds values"):
        load_hf(tmp_path / "model")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts_per_tok": 5}, "top_k = 5 of experts = 4; choose 4 or fewer"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok = 0; legal: 1 to"),
        ({"num_experts": 8}, "disagree about the number of experts"),
        ({"num_local_experts": None}, "lacks 'num_experts'"),
        ({"model_type": "olmoe", "clip_qkv": -8.0}, "clip = -8.0; give a positive number"),
    ],
)
def test_fields_that_make_no_mixture_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(HubError, match=message):
        decoder_config(MIXTRAL | fields)


def test_balance_biases_stay_in_float32(tmp_path: Path) -> None:
    """There and back of a model in bfloat16, as DeepSeek-V3 is published."""
    plain = peers.peer("deepseek_v3", 3).save(tmp_path / "plain")
    kept = "e_score_correction_bias"
    tensors = {n: np.array(a) if kept in n else a.astype(ml_dtypes.bfloat16) for n, a in open_model(plain).items()}
    config = json.loads((plain / "config.json").read_text()) | {"dtype": "bfloat16"}
    write_model(tmp_path / "before", tensors, {"config.json": json.dumps(config)}, 2**30)
    assert convert(tmp_path / "before", tmp_path / "ours", "jaxllm").dtype == "bfloat16"
    convert(tmp_path / "ours", tmp_path / "after", "hf")
    same_files(tmp_path / "before", tmp_path / "after")
    convert(tmp_path / "before", tmp_path / "wide", "hf", dtype="float32")
    assert {str(a.dtype) for a in open_model(tmp_path / "wide").values()} == {"float32"}
