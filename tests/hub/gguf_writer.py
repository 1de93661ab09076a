"""GGUF writer: writes a Hugging Face directory as llama.cpp's converter does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType as Ggml

from jaxllm.hub.families.families import decoder_config, family
from jaxllm.hub.huggingface import leaves_by_path
from jaxllm.hub.safetensors import open_model, write_model
from jaxllm.hub.weight_mapping import hf_layout
from jaxllm.models import functional

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


def save(config: dict[str, Any], directory: Path, seed: int = 0) -> Path:
    """A random model in Hugging Face's layout."""
    ours = decoder_config(config)
    tensors = hf_layout(family(config).table, ours, leaves_by_path(functional(ours).abstract()))
    rng = np.random.default_rng(seed)
    # Large enough that a wrong order of rows would change every logit.
    values = {n: rng.normal(0.0, 0.3, theirs.shape).astype(np.float32) for n, theirs in tensors.items()}
    write_model(directory, values, {"config.json": json.dumps(config)}, 2**30)
    return directory


def converted(directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors as llama.cpp's converter writes them, names and values."""
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
    """Llama 3's scaling of each pair's wavelength, in float32 as the converter has it."""
    low, high, original = (rope[n] for n in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
    out = []
    for freq in 1 / rope["rope_theta"] ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)):
        length = 2 * np.pi / freq
        smooth = min(1.0, max(0.0, (original / length - low) / (high - low)))
        out.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(out, np.float32)


def write(
    directory: Path,
    file: Path,
    kind: Ggml = Ggml.F32,
    change: Any = lambda writer: None,
    kinds: Mapping[str, Ggml] | None = None,
) -> Path:
    """A saved model as a GGUF file; matrices in the format ``kind``, or in their own of ``kinds``."""
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
        stored = (kinds or {}).get(name, kind) if values.ndim > 1 else Ggml.F32
        writer.add_tensor(name, gguf.quants.quantize(values.astype(np.float32), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
