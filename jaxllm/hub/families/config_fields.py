"""Fields that the ``config.json`` of many families share, converted to our configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from jaxllm.hub.errors import HubError
from jaxllm.hub.families.field_reader import FieldReader
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig

ACTIVATIONS: dict[str, Literal["silu", "relu", "gelu", "gelu_tanh"]] = {
    "silu": "silu",
    "relu": "relu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Activations by transformers' names."""

MOST_LAYERS = 10_000
FULL, SLIDING = "full_attention", "sliding_attention"


def read_attention(fields: FieldReader, head_dim: int | None = None, *, kv_heads: bool = False) -> AttentionConfig:
    """Attention of the Llama line: numbers of heads and head dimension.

    Args:
        head_dim: used if the config gives none; None: hidden_size / heads.
        kv_heads: whether their number must be present (null for as many as query heads), since for this family
            transformers
            replaces a missing one by a number of its own.
    """
    heads = fields.need("num_attention_heads", int)
    if kv_heads and "num_key_value_heads" not in fields.given:
        fields.need("num_key_value_heads", int)
    return AttentionConfig(
        heads=heads,
        kv_heads=fields.get("num_key_value_heads", int, heads),
        head_dim=fields.get("head_dim", int, head_dim) or fields.need("hidden_size", int) // heads,
    )


def read_layers(fields: FieldReader, name: str = "num_hidden_layers") -> int:
    """Number of blocks; a number larger than any model has is refused before anything is built."""
    layers = fields.need(name, int)
    if layers > MOST_LAYERS:
        raise HubError(f"config.json: {name} = {layers}; legal: 1 to {MOST_LAYERS}.")
    return layers


def read_mlp(fields: FieldReader) -> MlpConfig:
    """Gated feed-forward layer."""
    act = fields.need("hidden_act", str)
    return MlpConfig(fields.need("intermediate_size", int), activation("hidden_act", act))


def activation(field: str, name: str) -> Literal["silu", "relu", "gelu", "gelu_tanh"]:
    """Our name of an activation."""
    if name not in ACTIVATIONS:
        raise HubError(f"config.json: {field} is {name!r}; known: {', '.join(sorted(ACTIVATIONS))}.")
    return ACTIVATIONS[name]


def make_decoder(fields: FieldReader, blocks: BlockConfig | Sequence[BlockConfig], **more: Any) -> DecoderConfig:
    """``DecoderConfig`` from the fields that the Llama line shares."""
    layers = read_layers(fields)
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
    """(prefix, shortest pattern) whose repetition, perhaps cut short at the end, gives these layers."""

    def period(layers: Sequence[BlockConfig]) -> int:
        # Knuth, Morris and Pratt's prefix function: linear, since a config.json may say ten thousand layers.
        matched = [0] * len(layers)
        for i in range(1, len(layers)):
            length = matched[i - 1]
            while length and layers[i] != layers[length]:
                length = matched[length - 1]
            matched[i] = length + (layers[i] == layers[length])
        return len(layers) - matched[-1]

    # Layers of one kind, then a pattern: either may be all there is.
    alike = next((i for i, b in enumerate(blocks) if b != blocks[0]), len(blocks))
    whole = period(blocks)
    if alike < len(blocks) and (rest := period(blocks[alike:])) < whole:
        return tuple(blocks[:alike]), tuple(blocks[alike : alike + rest])
    return (), tuple(blocks[:whole])


def read_windows(fields: FieldReader, default: Callable[[int], bool]) -> list[bool]:
    """Layers with a sliding window: from ``layer_types``, or without it, by the number of the layer."""
    layers = read_layers(fields)
    kinds = fields.get("layer_types", list, None)
    if kinds is None:
        return [default(i) for i in range(layers)]
    if len(kinds) != layers or (wrong := set(kinds) - {FULL, SLIDING}):
        what = f"{len(kinds)} entries for {layers} layers" if len(kinds) != layers else f"{sorted(wrong)}"
        raise HubError(f"config.json: layer_types has {what}; legal: {FULL!r} or {SLIDING!r} for each layer.")
    return [kind == SLIDING for kind in kinds]
