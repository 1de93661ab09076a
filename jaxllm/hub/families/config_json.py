"""``config.json`` for a model that did not come with one, derived from its architecture.

A family's fields are written and read back by ``jaxllm.hub.families``: the family fits if, and only if, the
architecture read back equals the original. Nothing is written that would be another model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jaxllm.config import Difference, differences
from jaxllm.hub.errors import HubError
from jaxllm.hub.families.config_fields import FULL, SLIDING
from jaxllm.hub.families.families import decoder_config
from jaxllm.models import (
    BlockConfig,
    DecoderConfig,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
)
from jaxllm.models.layers.rope_scaling import magnitude

Fields = dict[str, Any]
HIDDEN_ACT = {
    "silu": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "quick_gelu": "quick_gelu",
}
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
SHOWN = 6


def config_json(
    config: DecoderConfig, length: int | None = None, tokens: Mapping[str, int | None] | None = None
) -> Fields:
    """The ``config.json`` of the transformers family that has this architecture.

    Args:
        config: the architecture.
        length: length of the longest sequence, unless the architecture sets it (learned positions and dynamic scaling
            do);
            by default the length that a rotary scaling reaches, else 2048.
        tokens: ids by ``bos_token_id``, ``eos_token_id``, ``pad_token_id``; None or missing: there is none.

    Raises:
        HubError: no family has this architecture; names the nearest one and its differences.
    """
    ids = dict.fromkeys(TOKENS) | dict(tokens or {})  # families have different defaults for these
    if not all(block.attention.has_keys for block in config.blocks):
        raise HubError(
            "no family of transformers has recurrent layers, so the model cannot be exported: keep it as a checkpoint "
            "of jaxllm, or choose attention layers."
        )
    latent = any(block.attention.kv_spec.latent for block in config.blocks)
    length = _length(config, length)
    apart: dict[str, list[Difference]] = {}
    for family, fields_of in CANDIDATES.items():
        if (family in MLA_FAMILIES) != latent or (fields := fields_of(config, length)) is None:
            continue
        given = fields | {"model_type": family, "architectures": [CLASSES[family]], "dtype": config.param_dtype} | ids
        try:
            apart[family] = _differences(config, decoder_config(given))
        except HubError:  # this family cannot represent the architecture
            continue
        if not apart[family]:
            return given
    if not apart:
        raise HubError("no family of transformers has layers of these kinds, so the model cannot be exported.")
    nearest = min(apart, key=lambda family: len(apart[family]))
    listed = "\n  ".join(f"{d.path}: {d.new} there, {d.old} here" for d in apart[nearest][:SHOWN])
    more = f"\n  and {len(apart[nearest]) - SHOWN} more" if len(apart[nearest]) > SHOWN else ""
    raise HubError(
        f"no family of transformers has this architecture, so it cannot be exported. The nearest is {nearest}, "
        f"which differs in:\n  {listed}{more}"
    )


def _differences(own: DecoderConfig, exported: DecoderConfig) -> list[Difference]:
    """Architecture fields that differ, layer by layer; equal layers are listed once."""
    found = differences(_plain(own), _plain(exported))
    once: dict[tuple[str, str, str], Difference] = {}
    for one in found:
        words = one.path.split(".")
        where = ".".join(w for w in words if not w.isdigit())
        once.setdefault((where, str(one.old), str(one.new)), one)
    return list(once.values())


def _plain(config: DecoderConfig) -> DecoderConfig:
    """The architecture in canonical form: every layer by itself, every default as its value."""

    def block(one: BlockConfig) -> BlockConfig:
        attention, rope = one.attention, one.attention.rope
        if rope is not None and isinstance(rope.scaling, YarnScaling):
            rope = replace(rope, scaling=replace(rope.scaling, magnitude=magnitude(rope.scaling)))
        # A family may define it by the logarithm of another number.
        scale = float(f"{attention.attention_params.scale:.12g}")
        return replace(one, attention=replace(attention, rope=rope, scale=scale))

    blocks = tuple(block(one) for one in config.blocks)
    numbers = {"param_dtype": "float32", "dtype": "float32", "matmul_precision": "plain", "embed_grad": 1.0}
    return replace(config, prefix=(), pattern=blocks, remat="none", unroll=1, **numbers)


def _length(config: DecoderConfig, given: int | None) -> int:
    """Length of the longest sequence: the architecture's own, the given one, or a usual one."""
    if config.learned_positions is not None:
        return config.learned_positions
    scalings = (b.attention.rope.scaling for b in config.blocks if b.attention.rope is not None)
    scaling = next((s for s in scalings if s is not None), None)
    if isinstance(scaling, DynamicScaling):
        return scaling.original_length
    reach = getattr(scaling, "original_length", 2048) * getattr(scaling, "factor", 1)
    return given or int(reach)


def _rope(rope: RopeConfig | None) -> Fields:
    """Rotary embedding parameters, without the fraction of a head that is rotated."""
    if rope is None:
        return {}
    scaling, fields = rope.scaling, {"rope_theta": rope.theta}
    if scaling is None:
        return fields | {"rope_type": "default"}
    if isinstance(scaling, LinearScaling):
        return fields | {"rope_type": "linear", "factor": scaling.factor}
    if isinstance(scaling, DynamicScaling):
        return fields | {"rope_type": "dynamic", "factor": scaling.factor}
    fields["original_max_position_embeddings"] = scaling.original_length
    if isinstance(scaling, LongRopeScaling):
        factors = {"short_factor": list(scaling.short), "long_factor": list(scaling.long)}
        return fields | factors | {"rope_type": "longrope", "attention_factor": scaling.magnitude}
    fields["factor"] = scaling.factor
    if isinstance(scaling, Llama3Scaling):
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        return fields | {"rope_type": "llama3", "low_freq_factor": low, "high_freq_factor": high}
    fields |= {"rope_type": "yarn", "beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    attention = {} if scaling.magnitude is None else {"attention_factor": scaling.magnitude}
    return fields | attention | {"truncate": scaling.truncate}


def _llama(config: DecoderConfig, length: int) -> Fields:
    """Fields that the Llama line shares."""
    block = config.blocks[0]
    attention: Any = block.attention
    mlp = block.mlp
    return {
        "attention_bias": attention.bias == "all",
        "head_dim": attention.head_dim,
        "hidden_act": HIDDEN_ACT[mlp.activation],
        "hidden_size": config.embed_dim,
        "intermediate_size": mlp.hidden,
        "max_position_embeddings": length,
        "mlp_bias": mlp.bias,
        "num_attention_heads": attention.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": attention.kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": _rope(attention.rope),
        "tie_word_embeddings": config.tied,
        "vocab_size": config.vocab_size,
    }


def _without(fields: Fields, *names: str) -> Fields:
    return {name: value for name, value in fields.items() if name not in names}


def _mistral(config: DecoderConfig, length: int) -> Fields:
    fields = _without(_llama(config, length), "attention_bias", "mlp_bias")
    return fields | {"sliding_window": config.blocks[0].attention.window}


def _layer_types(config: DecoderConfig) -> Fields:
    windows = [block.attention.window for block in config.blocks]
    size = next((window for window in windows if window is not None), None)
    kinds = [FULL if window is None else SLIDING for window in windows]
    return {"layer_types": kinds, "sliding_window": size}


def _qwen2(config: DecoderConfig, length: int) -> Fields:
    fields, kinds = _without(_llama(config, length), "attention_bias", "mlp_bias"), _layer_types(config)
    return fields | kinds | {"use_sliding_window": SLIDING in kinds["layer_types"]}


def _qwen3(config: DecoderConfig, length: int) -> Fields:
    return _qwen2(config, length) | {"attention_bias": config.blocks[0].attention.bias == "all"}


def _olmo2(config: DecoderConfig, length: int) -> Fields:
    return _without(_llama(config, length), "mlp_bias")


def _gemma(config: DecoderConfig, length: int) -> Fields:
    attention: Any = config.blocks[0].attention
    fields, kinds = _without(_llama(config, length), "hidden_act", "mlp_bias"), _layer_types(config)
    width = attention.head_dim if attention.scale is None else attention.scale**-2
    whole = round(width)
    return fields | {
        "final_logit_softcapping": config.logit_softcap,
        "hidden_activation": HIDDEN_ACT[config.blocks[0].mlp.activation],
        "layer_types": kinds["layer_types"],
        "query_pre_attn_scalar": whole if abs(width - whole) < 1e-9 * width else width,
        "sliding_window": kinds["sliding_window"] or length,  # the field is required even if no layer has a window
    }


def _gemma2(config: DecoderConfig, length: int) -> Fields:
    return _gemma(config, length) | {"attn_logit_softcapping": config.blocks[0].attention.attention_params.softcap}


def _gemma3(config: DecoderConfig, length: int) -> Fields:
    fields = _gemma(config, length)
    ropes = {kind: RopeConfig() for kind in (FULL, SLIDING)}
    ropes |= {kind: b.attention.rope for kind, b in zip(fields["layer_types"], config.blocks, strict=True)}
    return fields | {"rope_parameters": {kind: _rope(rope) for kind, rope in ropes.items()}}


def _phi3(config: DecoderConfig, length: int) -> Fields | None:
    attention: Any = config.blocks[0].attention
    if attention.rope is None or not isinstance(attention.rope.scaling, LongRopeScaling | None):
        return None  # this class supports no other scaling
    fields = _mistral(config, length)
    if attention.heads * attention.head_dim == config.embed_dim:
        del fields["head_dim"]
    elif attention.rope.scaling is not None:
        return None  # it sizes the factors by embed_dim / heads, not by head_dim
    # This class has different defaults for missing fields.
    fields["rope_parameters"] = rope = _rope(attention.rope) | {"partial_rotary_factor": attention.rope.fraction}
    return fields | {"original_max_position_embeddings": rope.get("original_max_position_embeddings", length)}


def _moe(config: DecoderConfig, fields: Fields, width: str = "intermediate_size") -> Fields | None:
    """Fields that mixture-of-experts families share, beside the Llama line's; ``width`` is that of an expert."""
    moe = next(iter(config.mixtures.values()), None)
    if moe is None:
        return None
    fields = _without(fields, "mlp_bias") | {"num_experts_per_tok": moe.top_k, width: moe.hidden}
    return fields | {"num_experts": moe.experts, "norm_topk_prob": moe.router.normalize}


def _mixtral(config: DecoderConfig, length: int) -> Fields | None:
    fields = _moe(config, _mistral(config, length))
    return fields and _without(fields, "norm_topk_prob", "num_experts") | {"num_local_experts": fields["num_experts"]}


def _qwen3_moe(config: DecoderConfig, length: int) -> Fields | None:
    window = config.blocks[0].attention.window
    dense = [layer for layer in range(config.layers) if layer not in config.mixtures]
    fields = _llama(config, length) | {"use_sliding_window": window is not None, "sliding_window": window}
    if dense:
        fields["intermediate_size"] = config.blocks[dense[0]].mlp.hidden
    return _moe(config, fields | {"mlp_only_layers": dense}, "moe_intermediate_size")


def _olmoe(config: DecoderConfig, length: int) -> Fields | None:
    clip = {"clip_qkv": getattr(config.blocks[0].attention, "clip", None)}
    return _moe(config, _without(_llama(config, length), "head_dim") | clip)


def _gpt2(config: DecoderConfig, length: int) -> Fields:
    block = config.blocks[0]
    return {
        "activation_function": {"gelu_tanh": "gelu_new"}.get(block.mlp.activation, block.mlp.activation),
        "layer_norm_epsilon": config.norm_eps,
        "n_embd": config.embed_dim,
        "n_head": block.attention.heads,
        "n_inner": block.mlp.hidden,
        "n_layer": config.layers,
        "n_positions": length,
        "tie_word_embeddings": config.tied,
        "vocab_size": config.vocab_size,
    }


def _deepseek(config: DecoderConfig, length: int) -> Fields | None:
    """Fields that DeepSeek-V2 and V3 share."""
    attention = config.blocks[0].attention
    moe = next(iter(config.mixtures.values()), None)
    if not attention.kv_spec.latent or moe is None or moe.shared % moe.hidden:
        return None
    dense = [block.mlp for block in config.blocks if block.mlp.mixture is None]
    rope, scaling = _rope(attention.rope), attention.rope.scaling
    growth = math.sqrt(attention.attention_params.scale * math.sqrt(attention.nope_dim + attention.rope_dim))
    if isinstance(scaling, YarnScaling) and scaling.factor > 1:
        # The magnitude of the rotation is unchanged; this factor scales the attention scores only.
        rope |= {
            "attention_factor": magnitude(scaling),
            "mscale_all_dim": (growth - 1) / (0.1 * math.log(scaling.factor)),
        }
    return {
        "attention_bias": attention.bias,
        "first_k_dense_replace": len(dense),
        "hidden_act": HIDDEN_ACT[moe.activation],
        "hidden_size": config.embed_dim,
        "intermediate_size": dense[0].hidden if dense else moe.hidden,
        "kv_lora_rank": attention.latent,
        "max_position_embeddings": length,
        "moe_intermediate_size": moe.hidden,
        "n_group": moe.router.groups,
        "n_routed_experts": moe.experts,
        "n_shared_experts": moe.shared // moe.hidden,
        "norm_topk_prob": moe.router.normalize,
        "num_attention_heads": attention.heads,
        "num_experts_per_tok": moe.top_k,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": attention.heads,
        "q_lora_rank": attention.q_latent,
        "qk_nope_head_dim": attention.nope_dim,
        "qk_rope_head_dim": attention.rope_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "routed_scaling_factor": moe.router.scale,
        "tie_word_embeddings": config.tied,
        "topk_group": moe.router.top_groups,
        "v_head_dim": attention.value_dim,
        "vocab_size": config.vocab_size,
    }


def _deepseek_v2(config: DecoderConfig, length: int) -> Fields | None:
    fields = _deepseek(config, length)
    return fields and fields | {"topk_method": "group_limited_greedy" if fields["n_group"] > 1 else "greedy"}


def _deepseek_v3(config: DecoderConfig, length: int) -> Fields | None:
    fields = _deepseek(config, length)
    return fields and fields | {"rope_interleave": config.blocks[0].attention.rope.interleaved}  # type: ignore[union-attr]


def _glm4_moe(config: DecoderConfig, length: int) -> Fields | None:
    attention: Any = config.blocks[0].attention
    fields = _moe(config, _llama(config, length), "moe_intermediate_size")
    moe = next(iter(config.mixtures.values()), None)
    if fields is None or moe is None or moe.shared % moe.hidden or attention.rope is None:
        return None
    dense = [block.mlp for block in config.blocks if block.mlp.mixture is None]
    return _without(fields, "num_experts") | {
        "attention_bias": attention.bias == "qkv",
        "first_k_dense_replace": len(dense),
        "intermediate_size": dense[0].hidden if dense else moe.hidden,
        "n_group": moe.router.groups,
        "n_routed_experts": moe.experts,
        "n_shared_experts": moe.shared // moe.hidden,
        "rope_parameters": _rope(attention.rope) | {"partial_rotary_factor": attention.rope.fraction},
        "routed_scaling_factor": moe.router.scale,
        "topk_group": moe.router.top_groups,
        "use_qk_norm": attention.qk_norm == "head",
    }


def _gpt_oss(config: DecoderConfig, length: int) -> Fields | None:
    fields = _moe(config, _llama(config, length) | {"hidden_act": "silu"})
    if fields is None:
        return None
    moe = next(iter(config.mixtures.values()))
    named = {"num_local_experts": moe.experts, "swiglu_limit": moe.clamp}
    return _without(fields, "num_experts", "norm_topk_prob") | _layer_types(config) | named


MLA_FAMILIES = ("deepseek_v2", "deepseek_v3")
"""Families with multi-head latent attention."""

CANDIDATES: dict[str, Callable[[DecoderConfig, int], Fields | None]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "olmo2": _olmo2,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
}
"""Families in the order in which they are tried: the plainest first."""

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
"""Model classes of transformers."""
