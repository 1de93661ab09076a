"""Formats of experts alone (MoQE): everything else stays, on load and in files; and they are served in slots."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxllm.convert import quantise as quantising
from jaxllm.convert.load import load_model
from jaxllm.convert.quantise import QuantiseConfig, quantise
from jaxllm.convert.source_layers import SourceLayers
from jaxllm.hub import HubError, load_hf, open_source
from jaxllm.hub.huggingface import load_tensors, read_model
from jaxllm.infer.streaming.layer_store import units_of
from jaxllm.models import functional
from jaxllm.models.packed_weight import is_packed
from jaxllm.quant import pack_params
from tests import quick, tiny
from tests.quant.test_quantise import IDS, LENGTH, ROWS, logits

CONFIG = tiny.decoder(embed_dim=32, heads=4, head_dim=8, layers=2, moe=(4, 2, 64, True))
EXPERTS = {f"segments/0/0/mlp/experts/{name}" for name in ("gate", "up", "down")}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small mixture as transformers writes it."""
    torch.manual_seed(3)
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        tie_word_embeddings=False,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model") / "mixture"
    transformers.MixtralForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def without_tokenizer(monkeypatch):
    monkeypatch.setattr(quantising, "copy_tokenizer_files", lambda folder, out: None)


def by_path(params: Any) -> dict[str, Any]:
    """Leaves by path, packed ones as one."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_packed)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


@pytest.mark.parametrize(("name", "bits", "group"), [("int4", 4, 32), ("int3", 3, 64), ("int2", 2, 64)])
def test_experts_alone_are_packed(name, bits, group):
    """Codes and a float32 scale for each group of inputs, in the experts; other leaves are those that were given."""
    params = jax.tree.map(jnp.asarray, quick.params(CONFIG))
    packed = by_path(pack_params(functional(CONFIG), params, f"experts_{name}"))
    for path, whole in by_path(params).items():
        if path not in EXPERTS:
            assert packed[path] is whole
            continue
        groups = -(-whole.shape[-2] // group)
        assert packed[path].nbytes == whole.size * bits // 8 + 4 * groups * whole.size // whole.shape[-2]
        error = np.abs(np.asarray(packed[path].dense(jnp.float32)) - whole)
        assert 0.02 * np.abs(whole).max() / 2**bits < error.max() <= 1.01 * np.abs(whole).max() / (2**bits - 1)


def test_a_model_without_experts_is_refused():
    with pytest.raises(ValueError, match=r"'experts_int2' is of experts, and the model has none; give 'int2'"):
        pack_params(functional(tiny.decoder()), quick.params(tiny.decoder()), "experts_int2")
    with pytest.raises(ValueError, match=r"weight format 'experts_int9': give one of .*int2.*Did you mean"):
        pack_params(functional(CONFIG), quick.params(CONFIG), "experts_int9")


@pytest.mark.parametrize("name", ["experts_int2", "experts_int4"])
def test_layers_read_one_by_one_are_those_of_the_whole_model(name, mixture):
    """What ``--offload`` reads, layer by layer, beside what is loaded whole."""
    whole = load_tensors(*read_model(mixture))
    packed = pack_params(functional(whole.config), whole.params, name)
    layers = SourceLayers(mixture, weights=name)
    for unit in units_of(whole.config.segments):
        want = jax.tree.map(lambda x, row=unit.repeat: np.asarray(x[row]), packed["segments"][str(unit.segment)])
        jax.tree.map(np.testing.assert_array_equal, layers.read(unit, jax.devices()[0]), want)
    ends = layers.ends(jax.devices()[0])
    jax.tree.map(np.testing.assert_array_equal, ends, {part: packed[part] for part in ends})


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("method", "bits"), [("gptq", 2), ("rtn", 4)])
def test_files_with_experts_alone_quantised(method, bits, mixture, tmp_path):
    """Plain and packed give the same logits, and everything but the experts has the bits that it had."""
    config = QuantiseConfig(method, bits, 16, None, ROWS, LENGTH, only="experts")
    report = quantise(open_source(mixture), tmp_path / "out", config, IDS)
    assert {one.name.partition("[")[0] for one in report.matrices} == EXPERTS
    before, after = by_path(load_hf(mixture).params), by_path(load_hf(tmp_path / "out").params)
    assert {path for path in before if not np.array_equal(before[path], after[path])} == EXPERTS
    packed = load_tensors(*read_model(tmp_path / "out"), weights="packed")
    assert {path for path, leaf in by_path(packed.params).items() if is_packed(leaf)} == EXPERTS
    np.testing.assert_allclose(logits(packed), logits(load_hf(tmp_path / "out")), rtol=0, atol=1e-5)
    given = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert "model.layers.1.self_attn.q_proj" in given["ignore"]
    assert not any("experts" in name for name in given["ignore"])


def test_what_experts_alone_do_not_go_with(mixture, tmp_path):
    given = QuantiseConfig("rtn", only="experts")
    for refused in ({"layout": "awq"}, {"codebook": "lut4"}, {"method": "awq"}):
        with pytest.raises(HubError, match="experts alone: legal are integer codes"):
            dataclasses.replace(given, **refused)
    with pytest.raises(HubError, match="give experts, or nothing"):
        QuantiseConfig("rtn", only="attention")
    with pytest.raises(HubError, match=r"give one of .*experts_FORMAT.*Did you mean 'experts_int"):
        load_model(mixture, weights="experts_int9")
