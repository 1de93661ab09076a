"""Exported ``config.json``: transformers builds the same model from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxllm.hub import HubError, HubModel, decoder_config, export_hf, load_hf
from jaxllm.hub.families.config_json import config_json
from jaxllm.models import (
    AttentionConfig,
    BlockConfig,
    DecoderConfig,
    DynamicScaling,
    Llama3Scaling,
    MlpConfig,
    RopeConfig,
    YarnScaling,
)
from recipes.llama3 import llama3_8b
from recipes.quickstart import quickstart
from tests import environment, quick, tiny
from tests.hub import peers

LENGTH = 128


def theirs(directory: Path) -> peers.Peer:
    """Model that transformers makes of a directory."""
    return peers.Peer(peers.opened(directory), np.empty(0, np.int32))


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("family", peers.FAMILIES | peers.MIXTURES)
def test_the_model_it_names_is_the_same(family: str, tmp_path: Path) -> None:
    """The architecture survives config.json: one model of each family, another with another seed of the tests."""
    peer = peers.peer(family, environment.seed() % 2 if family in peers.FAMILIES else 0)
    loaded = load_hf(peer.save(tmp_path / "theirs"))
    source = config_json(loaded.config, LENGTH)
    export_hf(HubModel(loaded.config, loaded.params, source), tmp_path / "ours")
    assert tiny.leaf_error(theirs(tmp_path / "ours").logits(peer.tokens), peer.logits()) < 1e-5
    again = load_hf(tmp_path / "ours")
    assert config_json(again.config, LENGTH) == source


def model(rope: RopeConfig | None = None, **fields: object) -> DecoderConfig:
    """A small model with heads that do not add up to its width."""
    attention = AttentionConfig(heads=4, kv_heads=2, head_dim=8, rope=rope or RopeConfig())
    attention = replace(attention, **{n: v for n, v in fields.items() if hasattr(attention, n)})
    block = BlockConfig(attention, MlpConfig(hidden=12), fields.get("norms", "pre"))  # type: ignore[arg-type]
    rest = {n: v for n, v in fields.items() if not hasattr(attention, n) and n != "norms"}
    return DecoderConfig(**{"vocab_size": 40, "embed_dim": 16, "layers": 3, "pattern": (block,), **rest})  # type: ignore[arg-type]


MODELS = {
    "llama": model(),
    "mistral": model(window=5),
    "qwen2": model(bias="qkv"),
    "qwen3": model(qk_norm="head", tied=False),
    "olmo2": model(qk_norm="all", norms="post"),
    "gemma2": model(norms="sandwich", norm="rms_plus_one", embed_scale=4.0, window=3, softcap=2.0),
    "gemma3_text": model(norms="sandwich", norm="rms_plus_one", embed_scale=4.0, qk_norm="head"),
    "phi3": model(RopeConfig(fraction=0.5)),
    "gpt2": DecoderConfig(
        vocab_size=40,
        embed_dim=16,
        layers=2,
        pattern=(BlockConfig(AttentionConfig(4, 4, 4, None, bias="all"), MlpConfig(9, "gelu", False, True)),),
        learned_positions=30,
        norm="layer",
    ),
}
MODELS["gemma2"] = replace(
    MODELS["gemma2"],
    pattern=(replace(MODELS["gemma2"].pattern[0], mlp=MlpConfig(12, "gelu_tanh")),),
)


@pytest.mark.parametrize("family", MODELS)
def test_models_made_here_open_in_transformers(family: str, tmp_path: Path) -> None:
    config = MODELS[family]
    source = config_json(config, LENGTH, {"eos_token_id": 3})
    assert source["model_type"] == family
    assert (source["bos_token_id"], source["eos_token_id"], source["pad_token_id"]) == (None, 3, None)
    params = quick.params(config)
    export_hf(HubModel(config, params, source), tmp_path / "out")
    tokens = np.arange(1, 25, dtype=np.int32).reshape(2, 12)
    assert tiny.leaf_error(quick.logits(config, params, tokens), theirs(tmp_path / "out").logits(tokens)) < 1e-5
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == source | {"dtype": "float32"}


def test_the_recipes_have_a_family() -> None:
    assert config_json(quickstart().model, 128)["model_type"] == "qwen3"
    assert config_json(llama3_8b().model, 8192)["max_position_embeddings"] == 8192
    assert config_json(llama3_8b().model)["max_position_embeddings"] == 8 * 8192
    assert decoder_config(config_json(llama3_8b().model)).pattern == llama3_8b().model.pattern


def test_lengths_that_the_architecture_sets_are_not_the_callers() -> None:
    assert config_json(model(RopeConfig(scaling=DynamicScaling(2.0, 16))), 999)["max_position_embeddings"] == 16
    assert config_json(MODELS["gpt2"], 999)["n_positions"] == 30
    assert config_json(model(), None)["max_position_embeddings"] == 2048
    yarn = RopeConfig(scaling=YarnScaling(4.0, 64))
    assert config_json(model(yarn))["max_position_embeddings"] == 256


def test_the_same_layers_written_otherwise_are_the_same_model() -> None:
    block = model().pattern[0]
    window = replace(block, attention=replace(block.attention, window=3, qk_norm="head"))
    near = replace(block, attention=replace(block.attention, qk_norm="head"))
    config = replace(model(), prefix=(window,), pattern=(window, near), layers=3)
    assert config_json(config)["layer_types"] == ["sliding_attention"] * 2 + ["full_attention"]
    scale = replace(block, attention=replace(block.attention, scale=8**-0.5))
    assert config_json(replace(model(), pattern=(scale,))) == config_json(model())
    assert config_json(replace(model(), matmul_precision="int8", embed_grad=0.1)) == config_json(model()), (
        "of training alone"
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (model(norm="layer"), r"nearest is llama, which differs in:\n  norm: rms there, layer here"),
        (model(norms="post", qk_norm="head"), r"nearest is qwen3.*\n  pattern.0.norms: pre there, post here"),
        (model(RopeConfig(scaling=Llama3Scaling(), fraction=0.5)), r"rope.fraction: 1.0 there, 0.5 here"),
        (
            replace(model(), layers=4, pattern=(model().pattern[0], replace(model().pattern[0], mlp=MlpConfig(7)))),
            r"pattern.1.mlp.hidden: 12 there, 7 here$",
        ),
    ],
)
def test_an_architecture_of_no_family_names_the_nearest(config: DecoderConfig, message: str) -> None:
    with pytest.raises(HubError, match=message):
        config_json(config)


def test_a_mixture_of_no_family_is_refused_by_name():
    config = tiny.decoder(moe=(4, 2, 8, True), dtype="float32", norms="post")
    with pytest.raises(HubError, match=r"nearest is mixtral, which differs in:\n  pattern.0.norms: pre there"):
        config_json(config)
