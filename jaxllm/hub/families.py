"""Configurations of other libraries' model families, both ways.

A family is a function from the fields of its ``config.json`` to our configuration, and a table of weights. What a
missing field means is what transformers takes it for; sizes are never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxllm.config import closest
from jaxllm.hub.errors import HubError
from jaxllm.hub.fields import Fields
from jaxllm.hub.mapping import GEMMA, GPT2, LLAMA, OLMO2, PHI3, Table
from jaxllm.hub.rotary import read_rope, rope_config
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig

ACTIVATIONS: dict[str, Literal["silu", "gelu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""transformers' names of activations."""

MOST_LAYERS = 10_000
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Family:
    """One family: its configuration in our terms, and where its weights are."""

    config: Callable[[Fields], DecoderConfig]
    table: Table


def decoder_config(given: Mapping[str, Any]) -> DecoderConfig:
    """Our configuration of a model whose ``config.json`` is ``given``.

    Raises:
        HubError: an unknown family (names the known), a field that is missing, not understood, or at a value that the
            model cannot do.
    """
    fields = Fields(given)
    fields.get("max_position_embeddings", int, None)  # says nothing by itself; what reads it wants a number
    try:
        config = family(given).config(fields)
    except HubError:
        raise
    except (ValueError, ArithmeticError) as error:  # sizes that do not go together
        raise HubError(f"config.json: {error}") from None
    fields.finish()
    return config


def family(given: Mapping[str, Any]) -> Family:
    """The family that a ``config.json`` names.

    Raises:
        HubError: not one of the known.
    """
    kind = given.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise HubError(f"model_type is {kind!r}.{closest(str(kind), FAMILIES)} Known: {', '.join(sorted(FAMILIES))}.")
    return FAMILIES[kind]


def _attention(fields: Fields, head_dim: int | None = None, *, kv_heads: bool = False) -> AttentionConfig:
    """Heads as the Llama line names them.

    Args:
        head_dim: where the config gives none; None: hidden_size / heads.
        kv_heads: their number must be there (null for as many as query heads), since in this family transformers takes
            a missing one for a number of its own.
    """
    heads = fields.need("num_attention_heads", int)
    if kv_heads and "num_key_value_heads" not in fields.given:
        fields.need("num_key_value_heads", int)
    return AttentionConfig(
        heads=heads,
        kv_heads=fields.get("num_key_value_heads", int, heads),
        head_dim=fields.get("head_dim", int, head_dim) or fields.need("hidden_size", int) // heads,
    )


def _layers(fields: Fields, name: str = "num_hidden_layers") -> int:
    """How many blocks; nothing is made for each of more than any model has."""
    layers = fields.need(name, int)
    if layers > MOST_LAYERS:
        raise HubError(f"config.json: {name} = {layers}; legal: 1 to {MOST_LAYERS}.")
    return layers


def _mlp(fields: Fields) -> MlpConfig:
    """A gated layer."""
    act = fields.need("hidden_act", str)
    return MlpConfig(fields.need("intermediate_size", int), activation("hidden_act", act))


def activation(field: str, name: str) -> Literal["silu", "gelu", "gelu_tanh"]:
    """Our name of an activation."""
    if name not in ACTIVATIONS:
        raise HubError(f"config.json: {field} is {name!r}; known: {', '.join(sorted(ACTIVATIONS))}.")
    return ACTIVATIONS[name]


def _decoder(fields: Fields, blocks: BlockConfig | Sequence[BlockConfig], **more: Any) -> DecoderConfig:
    """What the Llama line's configs have in common."""
    layers = _layers(fields)
    every = [blocks] * layers if isinstance(blocks, BlockConfig) else blocks
    prefix, pattern = repeating(every)
    return DecoderConfig(
        vocab_size=fields.need("vocab_size", int),
        embed_dim=fields.need("hidden_size", int),
        layers=layers,
        prefix=prefix,
        pattern=pattern,
        norm_eps=fields.need("rms_norm_eps", float),
        **more,
    )


def repeating(blocks: Sequence[BlockConfig]) -> tuple[tuple[BlockConfig, ...], tuple[BlockConfig, ...]]:
    """(prefix, shortest pattern) whose repetition, its last one perhaps cut short, gives these layers."""

    def period(layers: Sequence[BlockConfig]) -> int:
        return next(p for p in range(1, len(layers) + 1) if all(b == layers[i % p] for i, b in enumerate(layers)))

    # Layers of one kind, then a pattern: either may be all there is.
    alike = next((i for i, b in enumerate(blocks) if b != blocks[0]), len(blocks))
    whole = period(blocks)
    if alike < len(blocks) and (rest := period(blocks[alike:])) < whole:
        return tuple(blocks[:alike]), tuple(blocks[alike : alike + rest])
    return (), tuple(blocks[:whole])


def _windows(fields: Fields, default: Callable[[int], bool]) -> list[bool]:
    """Which layers have a sliding window: ``layer_types``, or where there is none, by layer."""
    layers = _layers(fields)
    kinds = fields.get("layer_types", list, None)
    if kinds is None:
        return [default(i) for i in range(layers)]
    if len(kinds) != layers or (wrong := set(kinds) - {FULL, SLIDING}):
        what = f"{len(kinds)} entries for {layers} layers" if len(kinds) != layers else f"{sorted(wrong)}"
        raise HubError(f"config.json: layer_types has {what}; legal: {FULL!r} or {SLIDING!r} for each layer.")
    return [kind == SLIDING for kind in kinds]


def _llama(fields: Fields) -> DecoderConfig:
    fields.only("pretraining_tp", 1)
    fields.only("rope_interleaved", False)
    bias = fields.get("attention_bias", bool, False)
    attention = replace(_attention(fields), rope=rope_config(fields), bias="all" if bias else "none")
    mlp = replace(_mlp(fields), bias=fields.get("mlp_bias", bool, False))
    return _decoder(fields, BlockConfig(attention, mlp), tied=fields.get("tie_word_embeddings", bool, False))


def _mistral(fields: Fields) -> DecoderConfig:
    window = fields.given_or("sliding_window", int, 4096)
    attention = replace(_attention(fields, kv_heads=True), rope=rope_config(fields), window=window)
    block = BlockConfig(attention, _mlp(fields))
    return _decoder(fields, block, tied=fields.get("tie_word_embeddings", bool, False))


def _qwen(fields: Fields, attention: AttentionConfig) -> DecoderConfig:
    fields.only("use_mrope", False)
    attention = replace(attention, rope=rope_config(fields))
    window = fields.given_or("sliding_window", int, 4096) if fields.get("use_sliding_window", bool, False) else None
    first = fields.get("max_window_layers", int, 28, least=0)
    # With use_sliding_window false, transformers takes no notice of the window's size.
    fields.skip("sliding_window")
    local = _windows(fields, lambda layer: window is not None and layer >= first)
    if window is None and any(local):
        raise HubError(
            "config.json: layer_types names sliding layers, but use_sliding_window and sliding_window do not."
        )
    mlp = _mlp(fields)
    blocks = [BlockConfig(replace(attention, window=window if here else None), mlp) for here in local]
    return _decoder(fields, blocks, tied=fields.get("tie_word_embeddings", bool, False))


def _qwen2(fields: Fields) -> DecoderConfig:
    fields.skip("attention_bias")  # transformers does not look at it: there are biases
    return _qwen(fields, replace(_attention(fields, kv_heads=True), bias="qkv"))


def _qwen3(fields: Fields) -> DecoderConfig:
    bias = fields.get("attention_bias", bool, False)
    attention = _attention(fields, head_dim=128, kv_heads=True)
    return _qwen(fields, replace(attention, qk_norm="head", bias="all" if bias else "none"))


def _gemma(fields: Fields, blocks: Sequence[BlockConfig], softcap: float | None) -> DecoderConfig:
    """``softcap``: of the logits, where the config does not say."""
    fields.only("use_bidirectional_attention", False, None)
    return _decoder(
        fields,
        blocks,
        tied=fields.get("tie_word_embeddings", bool, True),
        embed_scale=math.sqrt(fields.need("hidden_size", int)),
        logit_softcap=fields.given_or("final_logit_softcapping", float, softcap),
        norm="rms_plus_one",
    )


def _gemma_mlp(fields: Fields) -> MlpConfig:
    fields.skip("hidden_act")  # transformers does not look at it
    act = fields.get("hidden_activation", str, "gelu_pytorch_tanh")
    return MlpConfig(fields.need("intermediate_size", int), activation("hidden_activation", act))


def _gemma_attention(fields: Fields) -> AttentionConfig:
    bias = fields.get("attention_bias", bool, False)
    width = fields.need("query_pre_attn_scalar", float)
    if width <= 0:
        raise HubError(f"config.json: query_pre_attn_scalar = {width}; legal: positive numbers.")
    return replace(_attention(fields, head_dim=256, kv_heads=True), scale=width**-0.5, bias="all" if bias else "none")


def _gemma2(fields: Fields) -> DecoderConfig:
    fields.skip("sliding_window_size")  # an earlier name, beside the one that is read
    attention = replace(
        _gemma_attention(fields),
        rope=rope_config(fields),
        softcap=fields.given_or("attn_logit_softcapping", float, 50.0),
    )
    window = fields.need("sliding_window", int)
    mlp = _gemma_mlp(fields)
    local = _windows(fields, lambda layer: layer % 2 == 0)
    blocks = [BlockConfig(replace(attention, window=window if here else None), mlp, "sandwich") for here in local]
    return _gemma(fields, blocks, 30.0)


def _gemma3(fields: Fields) -> DecoderConfig:
    # transformers has the field and does not look at it.
    fields.only("attn_logit_softcapping", None)
    attention = replace(_gemma_attention(fields), qk_norm="head")
    window = fields.need("sliding_window", int)
    period = fields.get("sliding_window_pattern", int, fields.get("_sliding_window_pattern", int, 6))
    fields.skip("_sliding_window_pattern")
    full_theta = fields.get("rope_theta", float, 1_000_000.0)
    local_theta = fields.get("rope_local_base_freq", float, 10_000.0)
    both = Fields(fields.get("rope_parameters", Mapping, {}), "config.json: rope_parameters")
    scaling = fields.get("rope_scaling", Mapping, {})
    full_rope = read_rope(both.get(FULL, Mapping, None) or scaling, fields, full_theta)
    local_rope = read_rope(both.get(SLIDING, Mapping, {}), fields, local_theta)
    if extra := sorted(set(both.given) - {FULL, SLIDING}):
        raise HubError(f"config.json: rope_parameters has {', '.join(extra)}; legal: {FULL}, {SLIDING}.")
    mlp = _gemma_mlp(fields)
    full = BlockConfig(replace(attention, rope=full_rope), mlp, "sandwich")
    near = BlockConfig(replace(attention, rope=local_rope, window=window), mlp, "sandwich")
    local = _windows(fields, lambda layer: (layer + 1) % period != 0)
    return _gemma(fields, [near if here else full for here in local], None)


def _phi3(fields: Fields) -> DecoderConfig:
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    fields.only("lm_head_bias", False)
    fields.only("full_attn_mod", 1)
    fields.only("interpolate_factor", 1)
    fields.skip("original_max_position_embeddings")  # read where a scaling asks for it
    fields.given = {"original_max_position_embeddings": 4096, **fields.given}  # what a missing one means
    given = fields.given.get("rope_scaling") or fields.given.get("rope_parameters")
    if isinstance(given, Mapping) and given.get("rope_type", given.get("type")) in ("su", "yarn"):
        # Early names of LongRoPE in this family.
        renamed = {**given, "rope_type": "longrope"}
        fields.given = {**fields.given, "rope_parameters": renamed, "rope_scaling": None}
    window = fields.get("sliding_window", int, None)
    attention = replace(_attention(fields), rope=rope_config(fields, partial=True), window=window)
    block = BlockConfig(attention, _mlp(fields))
    return _decoder(fields, block, tied=fields.get("tie_word_embeddings", bool, False))


def _olmo2(fields: Fields) -> DecoderConfig:
    bias = fields.get("attention_bias", bool, False)
    attention = replace(_attention(fields), rope=rope_config(fields), qk_norm="all", bias="all" if bias else "none")
    block = BlockConfig(attention, _mlp(fields), "post")
    return _decoder(fields, block, tied=fields.get("tie_word_embeddings", bool, False))


def _gpt2(fields: Fields) -> DecoderConfig:
    fields.only("scale_attn_weights", True)
    fields.only("scale_attn_by_inverse_layer_idx", False)
    fields.only("reorder_and_upcast_attn", False)  # a matter of precision, which here is always the higher
    fields.only("add_cross_attention", False)
    embed, heads = fields.need("n_embd", int), fields.need("n_head", int)
    act = fields.need("activation_function", str)
    mlp = MlpConfig(
        fields.get("n_inner", int, 4 * embed), activation("activation_function", act), gated=False, bias=True
    )
    return DecoderConfig(
        vocab_size=fields.need("vocab_size", int),
        embed_dim=embed,
        layers=_layers(fields, "n_layer"),
        pattern=(BlockConfig(AttentionConfig(heads, heads, embed // heads, None, bias="all"), mlp),),
        tied=fields.get("tie_word_embeddings", bool, True),
        learned_positions=fields.need("n_positions", int),
        norm="layer",
        norm_eps=fields.need("layer_norm_epsilon", float),
    )


FAMILIES: dict[str, Family] = {
    "gemma2": Family(_gemma2, GEMMA),
    "gemma3_text": Family(_gemma3, GEMMA),
    "gpt2": Family(_gpt2, GPT2),
    "llama": Family(_llama, LLAMA),
    "mistral": Family(_mistral, LLAMA),
    "olmo2": Family(_olmo2, OLMO2),
    "phi3": Family(_phi3, PHI3),
    "qwen2": Family(_qwen2, LLAMA),
    "qwen3": Family(_qwen3, LLAMA),
}
