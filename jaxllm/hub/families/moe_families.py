"""Model families with mixture-of-experts layers; see ``jaxllm.hub.families.families``."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from jaxllm.hub.errors import HubError
from jaxllm.hub.families.config_fields import (
    activation,
    make_decoder,
    read_attention,
    read_layers,
    read_mlp,
    read_windows,
)
from jaxllm.hub.families.field_reader import FieldReader
from jaxllm.hub.families.rope_fields import rope_config
from jaxllm.models import BlockConfig, DecoderConfig, MLAConfig, MlpConfig, MoeConfig, RouterConfig

TRAINING = (
    "output_router_logits",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "aux_loss_alpha",
    "seq_aux",
    "ep_size",
)
"""Fields that matter in training alone."""


def read_moe(fields: FieldReader, width: str, router: RouterConfig, **more: Any) -> MoeConfig:
    """Mixture-of-experts layer.

    Args:
        width: name of the field that has the width of one expert.
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


def _experts(fields: FieldReader) -> int:
    """Number of experts, from a field of which transformers writes one of several names."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    found = {name: fields.get(name, int, None) for name in names if fields.given.get(name) is not None}
    if len(set(found.values())) > 1:
        raise HubError(f"{fields.where}: {found} disagree about the number of experts.")
    return next(iter(found.values())) if found else fields.need(names[0], int)


def mixtral(fields: FieldReader) -> DecoderConfig:
    """Mixtral."""
    window = fields.get("sliding_window", int, None)
    attention = read_attention(fields, kv_heads=True)
    attention = replace(attention, rope=rope_config(fields, theta=1_000_000.0), window=window)
    moe = read_moe(fields, "intermediate_size", RouterConfig(normalize=True))
    return make_decoder(fields, BlockConfig(attention, moe), tied=fields.get("tie_word_embeddings", bool, False))


def qwen3_moe(fields: FieldReader) -> DecoderConfig:
    """Qwen3-MoE."""
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


def olmoe(fields: FieldReader) -> DecoderConfig:
    """OLMoE."""
    bias = "all" if fields.get("attention_bias", bool, False) else "none"
    attention = replace(
        read_attention(fields),
        rope=rope_config(fields),
        qk_norm="all",
        bias=bias,
        clip=fields.get("clip_qkv", float, None),
    )
    moe = read_moe(fields, "intermediate_size", RouterConfig(normalize=fields.get("norm_topk_prob", bool, False)))
    return make_decoder(fields, BlockConfig(attention, moe), tied=fields.get("tie_word_embeddings", bool, False))


def _latent(fields: FieldReader, *, interleaved: bool) -> MLAConfig:
    """Multi-head latent attention, with YaRN's correction of its scores."""
    heads, rope_dim = fields.need("num_attention_heads", int), fields.need("qk_rope_head_dim", int)
    if (kv_heads := fields.get("num_key_value_heads", int, heads)) != heads:
        raise HubError(f"{fields.where}: num_key_value_heads = {kv_heads}; latent attention has all {heads}.")
    fields.skip("head_dim", "qk_head_dim")  # transformers derives them from the other fields
    nope_dim = fields.need("qk_nope_head_dim", int)
    return MLAConfig(
        heads=heads,
        latent=fields.need("kv_lora_rank", int),
        q_latent=_q_latent(fields),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=fields.need("v_head_dim", int),
        rope=replace(rope_config(fields), interleaved=interleaved),
        bias=fields.get("attention_bias", bool, False),
        scale=(nope_dim + rope_dim) ** -0.5 * score_growth(fields) ** 2,
    )


def _q_latent(fields: FieldReader) -> int | None:
    """Dimension of the query latent: null means uncompressed queries, a missing field transformers' own default."""
    if "q_lora_rank" not in fields.given:
        raise HubError(f"{fields.where} lacks 'q_lora_rank'; give its size, or null for none.")
    return fields.get("q_lora_rank", int, None)


def score_growth(fields: FieldReader) -> float:
    """Factor of queries and of keys for longer sequences, beside the magnitude of the rotation."""
    given = fields.given.get("rope_scaling") or fields.given.get("rope_parameters") or {}
    if given.get("rope_type", given.get("type", "default")) == "default":
        return 1.0
    inner = FieldReader(given, f"{fields.where}: the rotary embedding")
    growth, factor = inner.get("mscale_all_dim", float, None), inner.get("factor", float, 1.0)
    return 0.1 * growth * math.log(factor) + 1.0 if growth and factor > 1 else 1.0


def _deepseek(fields: FieldReader, router: RouterConfig, latent: MLAConfig, mlp: MlpConfig) -> DecoderConfig:
    fields.only("pretraining_tp", 1)
    fields.only("moe_layer_freq", 1)
    # Layers after the last one, for multi-token prediction (MTP), are not loaded, as in transformers.
    fields.skip("num_nextn_predict_layers", "num_mtp_layers")
    shared = fields.need("n_shared_experts", int) * fields.need("moe_intermediate_size", int)
    moe = read_moe(fields, "moe_intermediate_size", router, shared=shared)
    layers, dense = read_layers(fields), fields.get("first_k_dense_replace", int, 0, least=0)
    blocks = [BlockConfig(latent, mlp if layer < dense else moe) for layer in range(layers)]
    return make_decoder(fields, blocks, tied=fields.get("tie_word_embeddings", bool, False))


def deepseek_v2(fields: FieldReader) -> DecoderConfig:
    """DeepSeek-V2."""
    fields.only("scoring_func", "softmax")
    fields.only("norm_topk_prob", False, None)  # transformers has the field but ignores it
    fields.only("mlp_bias", False)
    method = fields.get("topk_method", str, "greedy")
    fields.only("topk_method", "greedy", "group_limited_greedy", None)
    groups, top = fields.get("n_group", int, 1), fields.get("topk_group", int, 1)
    router = RouterConfig(normalize=False, scale=fields.get("routed_scaling_factor", float, 1.0))
    if method == "group_limited_greedy":
        router = replace(router, groups=groups, top_groups=top)
    return _deepseek(fields, router, _latent(fields, interleaved=True), read_mlp(fields))


def _sigmoid_router(fields: FieldReader, scale: float, groups: int, top_groups: int) -> RouterConfig:
    """DeepSeek-V3's router; the defaults are those of missing fields."""
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    return RouterConfig(
        scoring="sigmoid",
        normalize=fields.get("norm_topk_prob", bool, True),
        scale=fields.get("routed_scaling_factor", float, scale),
        groups=fields.get("n_group", int, groups),
        top_groups=fields.get("topk_group", int, top_groups),
        group_score="best two",
        balance_bias=True,
    )


def deepseek_v3(fields: FieldReader) -> DecoderConfig:
    """DeepSeek-V3."""
    if "first_k_dense_replace" not in fields.given:
        raise HubError(f"{fields.where} lacks 'first_k_dense_replace'; give how many of the first layers are dense.")
    router = _sigmoid_router(fields, 2.5, 8, 4)
    latent = _latent(fields, interleaved=fields.get("rope_interleave", bool, True))
    return _deepseek(fields, router, latent, read_mlp(fields))


def glm4_moe(fields: FieldReader) -> DecoderConfig:
    # The default.
    """GLM-4-MoE."""
    fields.given = {"partial_rotary_factor": 0.5, **fields.given}
    bias = fields.get("attention_bias", bool, False)
    attention = replace(
        read_attention(fields, kv_heads=True),
        rope=rope_config(fields, partial=True),
        qk_norm="head" if fields.get("use_qk_norm", bool, False) else "none",
        bias="qkv" if bias else "none",
    )
    mlp, router = read_mlp(fields), _sigmoid_router(fields, 1.0, 1, 1)
    fields.skip("num_nextn_predict_layers", "num_mtp_layers")
    shared = fields.need("n_shared_experts", int) * fields.need("moe_intermediate_size", int)
    moe = read_moe(fields, "moe_intermediate_size", router, shared=shared)
    dense = fields.get("first_k_dense_replace", int, 1, least=0)
    blocks = [BlockConfig(attention, mlp if layer < dense else moe) for layer in range(read_layers(fields))]
    return make_decoder(fields, blocks, tied=fields.get("tie_word_embeddings", bool, False))


GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Default of a missing rotary embedding in this family."""


def gpt_oss(fields: FieldReader) -> DecoderConfig:
    """gpt-oss."""
    if not (fields.given.get("rope_parameters") or fields.given.get("rope_scaling")):
        fields.given = {**fields.given, "rope_parameters": GPT_OSS_ROPE}
    fields.skip("experts_per_token", "initial_context_length")  # other names of fields that are read
    fields.skip("hidden_act")  # transformers ignores it
    fields.only("swiglu_alpha", 1.702)
    attention = replace(
        read_attention(fields, head_dim=64, kv_heads=True),
        rope=rope_config(fields, theta=150_000.0),
        bias="all" if fields.get("attention_bias", bool, True) else "none",
        sinks=True,
    )
    window = fields.given_or("sliding_window", int, 128)
    fields.skip(*TRAINING)
    moe = MoeConfig(
        experts=_experts(fields),
        top_k=fields.need("num_experts_per_tok", int),
        hidden=fields.need("intermediate_size", int),
        activation="quick_gelu",
        router=RouterConfig(normalize=True, bias=True),
        bias=True,
        clamp=fields.get("swiglu_limit", float, 7.0),
        up_offset=1.0,
    )
    local = read_windows(fields, lambda layer: layer % 2 == 0)
    blocks = [BlockConfig(replace(attention, window=window if here else None), moe) for here in local]
    return make_decoder(fields, blocks, tied=fields.get("tie_word_embeddings", bool, False))
