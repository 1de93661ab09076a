"""Checkpoints as Megatron-Core and torchtitan write them, cut by hand from a model in Hugging Face's names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jaxllm.hub.families.config_json import config_json
from jaxllm.hub.huggingface import CarriedTensors, hf_tensors, leaves_by_path
from jaxllm.models import AttentionConfig, DecoderConfig
from tests import quick


def published(config: DecoderConfig, folder: Path, seed: int = 0) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(leaves by path, the same model's tensors by Hugging Face's names); writes its config.json into a folder."""
    source = config_json(config, 64, {})
    leaves = leaves_by_path(quick.params(config, seed))
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(source))
    tensors = hf_tensors(source, config, leaves, CarriedTensors())
    return leaves, {name: as_torch(np.asarray(one)) for name, one in tensors.items()}


def as_torch(array: np.ndarray) -> torch.Tensor:
    """An array's values as torch's, bfloat16 too."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def attention_of(config: DecoderConfig) -> AttentionConfig:
    """The attention of all its layers."""
    own = config.pattern[0].attention
    assert isinstance(own, AttentionConfig)
    return own


def write_megatron(
    folder: Path,
    config: DecoderConfig,
    tensors: dict[str, torch.Tensor],
    ranks: int,
    stages: int,
    padded: int,
    fused_norms: bool = True,
) -> None:
    """Writes a checkpoint of so many tensor ranks and stages of equal numbers of layers.

    Args:
        padded: rows of the vocabulary with padding.
        fused_norms: whether norms belong to the matmul that follows them, as with Transformer Engine.
    """
    heads, each = attention_of(config), config.layers // stages

    def rows(x: torch.Tensor, rank: int) -> torch.Tensor:
        return x.chunk(ranks, 0)[rank]

    def vocabulary(x: torch.Tensor, rank: int) -> torch.Tensor:
        return rows(torch.cat([x, torch.full((padded - len(x), x.shape[1]), 7.0, dtype=x.dtype)]), rank)

    def fused_qkv(kind: str, layer: int, rank: int) -> torch.Tensor:
        """For each key-value head its query heads, its key, its value."""
        q, k, v = (tensors[f"model.layers.{layer}.self_attn.{n}_proj.{kind}"] for n in "qkv")
        group, h = heads.heads // heads.kv_heads, heads.head_dim
        order = []
        for g in range(heads.kv_heads):
            order += [q[(g * group + i) * h : (g * group + i + 1) * h] for i in range(group)]
            order += [x[g * h : (g + 1) * h] for x in (k, v)]
        return rows(torch.cat(order), rank)

    for stage in range(stages):
        for rank in range(ranks):
            own: dict[str, torch.Tensor] = {}
            for i in range(each):
                layer = stage * each + i
                theirs, here = f"model.layers.{layer}.", f"decoder.layers.{i}."
                before = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
                names = before if fused_norms else ("input_layernorm.weight", "pre_mlp_layernorm.weight")
                own[here + names[0]] = tensors[theirs + "input_layernorm.weight"]
                own[here + names[1]] = tensors[theirs + "post_attention_layernorm.weight"]
                for kind in ("weight", "bias"):
                    if f"{theirs}self_attn.q_proj.{kind}" in tensors:
                        own[here + f"self_attention.linear_qkv.{kind}"] = fused_qkv(kind, layer, rank)
                for n in "qk":
                    if f"{theirs}self_attn.{n}_norm.weight" in tensors:
                        own[here + f"self_attention.{n}_layernorm.weight"] = tensors[
                            theirs + f"self_attn.{n}_norm.weight"
                        ]
                own[here + "self_attention.linear_proj.weight"] = tensors[theirs + "self_attn.o_proj.weight"].chunk(
                    ranks, 1
                )[rank]
                gate, up = (rows(tensors[theirs + f"mlp.{n}_proj.weight"], rank) for n in ("gate", "up"))
                own[here + "mlp.linear_fc1.weight"] = torch.cat([gate, up])
                own[here + "mlp.linear_fc2.weight"] = tensors[theirs + "mlp.down_proj.weight"].chunk(ranks, 1)[rank]
                own[here + "mlp.linear_fc1._extra_state"] = torch.zeros(3, dtype=torch.uint8)
            if stage == 0:
                own["embedding.word_embeddings.weight"] = vocabulary(tensors["model.embed_tokens.weight"], rank)
            if stage == stages - 1:
                own["decoder.final_layernorm.weight"] = tensors["model.norm.weight"]
                if "lm_head.weight" in tensors:
                    own["output_layer.weight"] = vocabulary(tensors["lm_head.weight"], rank)
            place = folder / (f"mp_rank_{rank:02}_{stage:03}" if stages > 1 else f"mp_rank_{rank:02}")
            place.mkdir(parents=True)
            # Contiguous: a part of a tensor would be saved with all of its storage.
            whole = {name: x.clone(memory_format=torch.contiguous_format) for name, x in own.items()}
            torch.save({"model": whole, "iteration": 7, "args": object}, place / "model_optim_rng.pt")


def torchtitan_state(config: DecoderConfig, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model in torchtitan's names; rows that its rotary embedding rotates together are neighbours."""
    half = attention_of(config).head_dim // 2

    def neighbours(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        for row in range(len(x)):
            head, i = divmod(row, 2 * half)
            out[head * 2 * half + (2 * i if i < half else 2 * (i - half) + 1)] = x[row]
        return out

    out = {
        "tok_embeddings.weight": tensors["model.embed_tokens.weight"],
        "output.weight": tensors["lm_head.weight"],
        "norm.weight": tensors["model.norm.weight"],
    }
    names = {
        "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj",
    }  # fmt: skip
    for layer in range(config.layers):
        for own, theirs in names.items():
            x = tensors[f"model.layers.{layer}.{theirs}.weight"]
            out[f"layers.{layer}.{own}.weight"] = neighbours(x) if own[-2:] in ("wq", "wk") else x
    return out
