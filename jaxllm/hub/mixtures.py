"""Configurations of families whose feed-forward layers are mixtures of experts; see ``jaxllm.hub.families``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxllm.hub.errors import HubError
from jaxllm.hub.fields import Fields
from jaxllm.hub.parts import activation, make_decoder, read_attention, read_layers, read_mlp
from jaxllm.hub.rotary import rope_config
from jaxllm.models import BlockConfig, DecoderConfig, MoeConfig, RouterConfig

TRAINING = (
    "output_router_logits",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "aux_loss_alpha",
    "seq_aux",
    "ep_size",
)
"""Fields that are for training alone."""


def read_moe(fields: Fields, width: str, router: RouterConfig, **more: Any) -> MoeConfig:
    """The experts.

    Args:
        width: the field that has the width of one.
    """
    fields.skip(*TRAINING)
    return MoeConfig(
        experts=_experts(fields),
        top_k=fields.need("num_experts_per_tok", int),
        hidden=fields.need(width, int),
        activation=activation("hidden_act", fields.need("hidden_act", str)),
        router=router,
        **more,
    )


def _experts(fields: Fields) -> int:
    """How many: a field of several names, of which transformers writes one or another."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    found = {name: fields.get(name, int, None) for name in names if fields.given.get(name) is not None}
    if len(set(found.values())) > 1:
        raise HubError(f"{fields.where}: {found} disagree about the number of experts.")
    return next(iter(found.values())) if found else fields.need(names[0], int)


def mixtral(fields: Fields) -> DecoderConfig:
    window = fields.get("sliding_window", int, None)
    attention = read_attention(fields, kv_heads=True)
    attention = replace(attention, rope=rope_config(fields, theta=1_000_000.0), window=window)
    moe = read_moe(fields, "intermediate_size", RouterConfig(normalize=True))
    return make_decoder(fields, BlockConfig(attention, moe), tied=fields.get("tie_word_embeddings", bool, False))


def qwen3_moe(fields: Fields) -> DecoderConfig:
    bias = fields.get("attention_bias", bool, False)
    windowed = fields.get("use_sliding_window", bool, False)
    window = fields.given_or("sliding_window", int, 4096) if windowed else None
    fields.skip("sliding_window", "max_window_layers")  # without use_sliding_window there is none; else all have it
    attention = replace(
        read_attention(fields, kv_heads=True),
        rope=rope_config(fields),
        qk_norm="head",
        bias="all" if bias else "none",
        window=window,
    )
    step = fields.get("decoder_sparse_step", int, 1)
    layers, dense = read_layers(fields), fields.get("mlp_only_layers", list, [])
    moe = read_moe(fields, "moe_intermediate_size", RouterConfig(normalize=fields.get("norm_topk_prob", bool, False)))
    mlp = read_mlp(fields)
    mixed = [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]
    blocks = [BlockConfig(attention, moe if here else mlp) for here in mixed]
    return make_decoder(fields, blocks, tied=fields.get("tie_word_embeddings", bool, False))


def olmoe(fields: Fields) -> DecoderConfig:
    fields.only("clip_qkv", None)
    bias = fields.get("attention_bias", bool, False)
    attention = read_attention(fields)
    attention = replace(attention, rope=rope_config(fields), qk_norm="all", bias="all" if bias else "none")
    moe = read_moe(fields, "intermediate_size", RouterConfig(normalize=fields.get("norm_topk_prob", bool, False)))
    return make_decoder(fields, BlockConfig(attention, moe), tied=fields.get("tie_word_embeddings", bool, False))
