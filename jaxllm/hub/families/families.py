"""Model families: converts each family's ``config.json`` to a ``DecoderConfig`` and names its weight table.

A missing field means what transformers takes it for; sizes are never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxllm.config import closest
from jaxllm.hub.errors import HubError
from jaxllm.hub.families.config_fields import (
    FULL,
    SLIDING,
    activation,
    make_decoder,
    read_attention,
    read_layers,
    read_mlp,
    read_windows,
)
from jaxllm.hub.families.field_reader import FieldReader
from jaxllm.hub.families.moe_families import deepseek_v2, deepseek_v3, glm4_moe, gpt_oss, mixtral, olmoe, qwen3_moe
from jaxllm.hub.families.rope_fields import read_rope, rope_config
from jaxllm.hub.weight_mapping import (
    DEEPSEEK,
    GEMMA,
    GLM4_MOE,
    GPT2,
    GPT_OSS,
    LLAMA,
    MIXTRAL,
    OLMO2,
    OLMOE,
    PHI3,
    QWEN3_MOE,
    WeightTable,
)
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig


@dataclass(frozen=True)
class Family:
    """One model family: its conversion to our configuration, and its weight table."""

    config: Callable[[FieldReader], DecoderConfig]
    table: WeightTable


def decoder_config(given: Mapping[str, Any]) -> DecoderConfig:
    """``DecoderConfig`` of a model whose ``config.json`` is ``given``.

    Raises:
        HubError: an unknown family (names the known ones), or a field that is missing, unknown, or at an unsupported
            value.
    """
    fields = FieldReader(given)
    fields.get("max_position_embeddings", int, None)  # has no effect by itself, but its readers need a number
    try:
        config = family(given).config(fields)
    except HubError:
        raise
    except (ValueError, ArithmeticError) as error:  # inconsistent sizes
        raise HubError(f"config.json: {error}") from None
    fields.finish()
    return config


def family(given: Mapping[str, Any]) -> Family:
    """The family that a ``config.json`` names.

    Raises:
        HubError: an unknown family.
    """
    kind = given.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise HubError(f"model_type is {kind!r}.{closest(str(kind), FAMILIES)} Known: {', '.join(sorted(FAMILIES))}.")
    return FAMILIES[kind]


def _llama(fields: FieldReader) -> DecoderConfig:
    fields.only("pretraining_tp", 1)
    fields.only("rope_interleaved", False)
    bias = fields.get("attention_bias", bool, False)
    attention = replace(read_attention(fields), rope=rope_config(fields), bias="all" if bias else "none")
    mlp = replace(read_mlp(fields), bias=fields.get("mlp_bias", bool, False))
    return make_decoder(fields, BlockConfig(attention, mlp), tied=fields.get("tie_word_embeddings", bool, False))


def _mistral(fields: FieldReader) -> DecoderConfig:
    window = fields.given_or("sliding_window", int, 4096)
    attention = replace(read_attention(fields, kv_heads=True), rope=rope_config(fields), window=window)
    block = BlockConfig(attention, read_mlp(fields))
    return make_decoder(fields, block, tied=fields.get("tie_word_embeddings", bool, False))


def _qwen(fields: FieldReader, attention: AttentionConfig) -> DecoderConfig:
    fields.only("use_mrope", False)
    attention = replace(attention, rope=rope_config(fields))
    window = fields.given_or("sliding_window", int, 4096) if fields.get("use_sliding_window", bool, False) else None
    first = fields.get("max_window_layers", int, 28, least=0)
    # With use_sliding_window false, transformers ignores the size of the window.
    fields.skip("sliding_window")
    local = read_windows(fields, lambda layer: window is not None and layer >= first)
    if window is None and any(local):
        raise HubError(
            "config.json: layer_types names sliding layers, but use_sliding_window and sliding_window do not."
        )
    mlp = read_mlp(fields)
    blocks = [BlockConfig(replace(attention, window=window if here else None), mlp) for here in local]
    return make_decoder(fields, blocks, tied=fields.get("tie_word_embeddings", bool, False))


def _qwen2(fields: FieldReader) -> DecoderConfig:
    fields.skip("attention_bias")  # transformers ignores it: there are always biases
    return _qwen(fields, replace(read_attention(fields, kv_heads=True), bias="qkv"))


def _qwen3(fields: FieldReader) -> DecoderConfig:
    bias = fields.get("attention_bias", bool, False)
    attention = read_attention(fields, head_dim=128, kv_heads=True)
    return _qwen(fields, replace(attention, qk_norm="head", bias="all" if bias else "none"))


def _gemma(fields: FieldReader, blocks: Sequence[BlockConfig], softcap: float | None) -> DecoderConfig:
    """Gemma 2 or 3; ``softcap`` is the soft cap of the logits where the config does not state one."""
    fields.only("use_bidirectional_attention", False, None)
    return make_decoder(
        fields,
        blocks,
        tied=fields.get("tie_word_embeddings", bool, True),
        embed_scale=math.sqrt(fields.need("hidden_size", int)),
        logit_softcap=fields.given_or("final_logit_softcapping", float, softcap),
        norm="rms_plus_one",
    )


def _gemma_mlp(fields: FieldReader) -> MlpConfig:
    fields.skip("hidden_act")  # transformers ignores it
    act = fields.get("hidden_activation", str, "gelu_pytorch_tanh")
    return MlpConfig(fields.need("intermediate_size", int), activation("hidden_activation", act))


def _gemma_attention(fields: FieldReader) -> AttentionConfig:
    bias = fields.get("attention_bias", bool, False)
    width = fields.need("query_pre_attn_scalar", float)
    if width <= 0:
        raise HubError(f"config.json: query_pre_attn_scalar = {width}; legal: positive numbers.")
    return replace(
        read_attention(fields, head_dim=256, kv_heads=True), scale=width**-0.5, bias="all" if bias else "none"
    )


def _gemma2(fields: FieldReader) -> DecoderConfig:
    fields.skip("sliding_window_size")  # an earlier name, beside the one that is read
    attention = replace(
        _gemma_attention(fields),
        rope=rope_config(fields),
        softcap=fields.given_or("attn_logit_softcapping", float, 50.0),
    )
    window = fields.need("sliding_window", int)
    mlp = _gemma_mlp(fields)
    local = read_windows(fields, lambda layer: layer % 2 == 0)
    blocks = [BlockConfig(replace(attention, window=window if here else None), mlp, "sandwich") for here in local]
    return _gemma(fields, blocks, 30.0)


def _gemma3(fields: FieldReader) -> DecoderConfig:
    # transformers has the field but ignores it.
    fields.only("attn_logit_softcapping", None)
    attention = replace(_gemma_attention(fields), qk_norm="head")
    window = fields.need("sliding_window", int)
    period = fields.get("sliding_window_pattern", int, fields.get("_sliding_window_pattern", int, 6))
    fields.skip("_sliding_window_pattern")
    full_theta = fields.get("rope_theta", float, 1_000_000.0)
    local_theta = fields.get("rope_local_base_freq", float, 10_000.0)
    both = FieldReader(fields.get("rope_parameters", Mapping, {}), "config.json: rope_parameters")
    scaling = fields.get("rope_scaling", Mapping, {})
    full_rope = read_rope(both.get(FULL, Mapping, None) or scaling, fields, full_theta)
    local_rope = read_rope(both.get(SLIDING, Mapping, {}), fields, local_theta)
    if extra := sorted(set(both.given) - {FULL, SLIDING}):
        raise HubError(f"config.json: rope_parameters has {', '.join(extra)}; legal: {FULL}, {SLIDING}.")
    mlp = _gemma_mlp(fields)
    full = BlockConfig(replace(attention, rope=full_rope), mlp, "sandwich")
    near = BlockConfig(replace(attention, rope=local_rope, window=window), mlp, "sandwich")
    local = read_windows(fields, lambda layer: (layer + 1) % period != 0)
    return _gemma(fields, [near if here else full for here in local], None)


def _phi3(fields: FieldReader) -> DecoderConfig:
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    fields.only("lm_head_bias", False)
    fields.only("full_attn_mod", 1)
    fields.only("interpolate_factor", 1)
    fields.skip("original_max_position_embeddings")  # read only by a rope scaling that needs it
    fields.given = {"original_max_position_embeddings": 4096, **fields.given}  # the default
    given = fields.given.get("rope_scaling") or fields.given.get("rope_parameters")
    if isinstance(given, Mapping) and given.get("rope_type", given.get("type")) in ("su", "yarn"):
        # Early names of LongRoPE in this family.
        renamed = {**given, "rope_type": "longrope"}
        fields.given = {**fields.given, "rope_parameters": renamed, "rope_scaling": None}
    window = fields.get("sliding_window", int, None)
    attention = replace(read_attention(fields), rope=rope_config(fields, partial=True), window=window)
    block = BlockConfig(attention, read_mlp(fields))
    return make_decoder(fields, block, tied=fields.get("tie_word_embeddings", bool, False))


def _olmo2(fields: FieldReader) -> DecoderConfig:
    bias = fields.get("attention_bias", bool, False)
    attention = replace(read_attention(fields), rope=rope_config(fields), qk_norm="all", bias="all" if bias else "none")
    block = BlockConfig(attention, read_mlp(fields), "post")
    return make_decoder(fields, block, tied=fields.get("tie_word_embeddings", bool, False))


def _gpt2(fields: FieldReader) -> DecoderConfig:
    fields.only("scale_attn_weights", True)
    fields.only("scale_attn_by_inverse_layer_idx", False)
    fields.only("reorder_and_upcast_attn", False)  # affects precision only; here it is always the higher one
    fields.only("add_cross_attention", False)
    embed, heads = fields.need("n_embd", int), fields.need("n_head", int)
    act = fields.need("activation_function", str)
    mlp = MlpConfig(
        fields.get("n_inner", int, 4 * embed), activation("activation_function", act), gated=False, bias=True
    )
    return DecoderConfig(
        vocab_size=fields.need("vocab_size", int),
        embed_dim=embed,
        layers=read_layers(fields, "n_layer"),
        pattern=(BlockConfig(AttentionConfig(heads, heads, embed // heads, None, bias="all"), mlp),),
        tied=fields.get("tie_word_embeddings", bool, True),
        learned_positions=fields.need("n_positions", int),
        norm="layer",
        norm_eps=fields.need("layer_norm_epsilon", float),
    )


FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(deepseek_v2, DEEPSEEK),
    "deepseek_v3": Family(deepseek_v3, DEEPSEEK),
    "gemma2": Family(_gemma2, GEMMA),
    "gemma3_text": Family(_gemma3, GEMMA),
    "glm4_moe": Family(glm4_moe, GLM4_MOE),
    "gpt2": Family(_gpt2, GPT2),
    "gpt_oss": Family(gpt_oss, GPT_OSS),
    "llama": Family(_llama, LLAMA),
    "mistral": Family(_mistral, LLAMA),
    "mixtral": Family(mixtral, MIXTRAL),
    "olmo2": Family(_olmo2, OLMO2),
    "olmoe": Family(olmoe, OLMOE),
    "phi3": Family(_phi3, PHI3),
    "qwen2": Family(_qwen2, LLAMA),
    "qwen3": Family(_qwen3, LLAMA),
    "qwen3_moe": Family(qwen3_moe, QWEN3_MOE),
}
