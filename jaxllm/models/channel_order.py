"""Channel order: channels of keys and values are reordered in the weights, so that large ones share blocks of a format.

Block floating point gives a block of channels one exponent, so a large channel costs its neighbours their bits.
Sorted by size, few blocks have large channels (arXiv:2403.20137). Queries and keys are reordered alike, and values
with the rows of the output projection, so the model computes the same and nothing is reordered when it runs. Sizes
are those of the weights' columns. Values have an order for each layer and kv head. Keys are rotated in pairs after
their projection, so their order is one of pairs, with their frequencies (``RopeConfig.pair_order``), and the same in
all layers.

Legend: L layers, D embed, N query heads, K kv heads, H head dim, R rotated dims.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxllm.models.decoder import BlockConfig, DecoderConfig
from jaxllm.models.functional import Functional, Params, functional
from jaxllm.models.layers.attention import AttentionConfig
from jaxllm.models.layers.rope import OrderedRopeConfig, RopeConfig

_QUERIES_AND_KEYS = ("q", "k", "q_bias", "k_bias", "prefix_keys")
_NORMS = ("q_norm", "k_norm")


class ChannelOrder:
    """Order of the channels of a model's keys and values.

    Args:
        model: model, whose attention layers are grouped-query attention.
        params: its weights, stacked, in plain arrays.

    Attributes:
        model: the same model for reordered weights.

    Raises:
        ValueError: the weights are packed, adapted or not stacked, or a layer is of another kind; says what to use.
    """

    def __init__(self, model: Functional, params: Params):
        self._check(model, params)
        first = model.config.blocks[0].attention
        assert isinstance(first, AttentionConfig)
        self._sizes = [
            _key_sizes(group["attention"], block.attention, _gain(model.config, block, group))
            for block, group in weighted_blocks(model.config, params)
        ]
        self._pairs = tuple(int(i) for i in np.argsort(-np.sum(self._sizes, axis=0), kind="stable"))
        config = model.config
        pattern, prefix = (tuple(self._ordered(b) for b in blocks) for blocks in (config.pattern, config.prefix))
        ordered = functional(dataclasses.replace(config, pattern=pattern, prefix=prefix), model.rules)
        self.model = dataclasses.replace(
            ordered, training_context=model.training_context, text_context=model.text_context
        )

    def fold(self, params: Params) -> Params:
        """The weights with reordered channels; those of other layers are shared, not copied."""
        segments: dict[str, Any] = {name: dict(groups) for name, groups in params["segments"].items()}
        for (segment, number), (block, group) in zip(
            block_places(self.model.config), weighted_blocks(self.model.config, params), strict=True
        ):
            attention, config = dict(group["attention"]), block.attention
            keys = self._key_channels(config)
            for name in _QUERIES_AND_KEYS:
                if name in attention:
                    attention[name] = attention[name][..., keys]
            for name in _NORMS:
                if name in attention:
                    attention[name] = {part: x[..., keys] for part, x in attention[name].items()}
            gain = _gain(self.model.config, block, group)
            sizes = _sizes(attention["v"], attention.get("v_bias"), gain)
            order = np.argsort(-sizes, axis=-1, kind="stable")  # L K H
            attention["v"] = jnp.take_along_axis(attention["v"], jnp.asarray(order)[:, None], axis=-1)
            if "v_bias" in attention:
                attention["v_bias"] = jnp.take_along_axis(attention["v_bias"], jnp.asarray(order), axis=-1)
            if "prefix_values" in attention:
                values = jnp.asarray(order)[:, None]
                attention["prefix_values"] = jnp.take_along_axis(attention["prefix_values"], values, axis=-1)
            rows = jnp.asarray(np.repeat(order, config.heads // config.kv_heads, axis=1))[..., None]  # L N H 1
            attention["o"] = jnp.take_along_axis(attention["o"], rows, axis=2)
            segments[segment][number] = {**group, "attention": attention}
        return {**params, "segments": segments}

    def _ordered(self, block: BlockConfig) -> BlockConfig:
        """Block whose rotary frequencies are in the order of the pairs."""
        rope = block.attention.rope
        if rope is None:
            return block
        fields = {f.name: getattr(rope, f.name) for f in dataclasses.fields(RopeConfig)}
        attention = dataclasses.replace(
            block.attention,  # pyright: ignore[reportArgumentType]
            rope=OrderedRopeConfig(**fields, pair_order=self._pairs),
        )
        return dataclasses.replace(block, attention=attention)

    def _key_channels(self, config: AttentionConfig) -> np.ndarray:
        """Channel of the model that each channel of the reordered one is."""
        pairs = np.asarray(self._pairs)
        if (rope := config.rope) is None:
            return pairs
        dims = rope.dims(config.head_dim)
        turned = np.stack([2 * pairs, 2 * pairs + 1], 1).ravel() if rope.interleaved else [*pairs, *(pairs + dims // 2)]
        return np.concatenate([turned, np.arange(dims, config.head_dim)]).astype(int)

    @staticmethod
    def _check(model: Functional, params: Params) -> None:
        kinds = {(type(b.attention), b.attention.head_dim, b.attention.rope and b.attention.rope.fraction,
                  b.attention.rope and b.attention.rope.interleaved)
                 for b in model.config.blocks if isinstance(b.attention, AttentionConfig)}  # fmt: skip
        plain = all(type(b.attention) is AttentionConfig for b in model.config.blocks)
        apart = any(isinstance(segment, tuple) for segment in params["segments"].values())
        arrays = (
            [g["attention"][n] for _, g in weighted_blocks(model.config, params) for n in "qkvo"]
            if plain > apart
            else []
        )
        wrong = {
            "a layer that is not plain grouped-query attention": not plain,
            "layers of different head dims or rotations": len(kinds) > 1,
            "adapted or packed weights (packed ones are unpacked with --weights plain)": model.adapt is not None
            or not all(hasattr(x, "at") for x in arrays),
            "layers apart": apart,
        }
        for what in (what for what, is_so in wrong.items() if is_so):
            raise ValueError(
                f"engine: kv_dtype = 'bfp4' reorders channels, and the model has {what}: use kivi4 or int4."
            )


def block_places(config: DecoderConfig) -> list[tuple[str, str]]:
    """(segment, number) of every block in a tree of weights."""
    return [(str(s), str(n)) for s, (group, _) in enumerate(config.segments) for n in range(len(group))]


def weighted_blocks(config: DecoderConfig, params: Params) -> Sequence[tuple[Any, Any]]:
    """(configuration, weights stacked over the repeats) of every block."""
    configs = [block for group, _ in config.segments for block in group]
    return [(c, params["segments"][s][n]) for c, (s, n) in zip(configs, block_places(config), strict=True)]


def _gain(config: DecoderConfig, block: BlockConfig, group: Any) -> Float[np.ndarray, "L D"]:
    """Gain of the norm before a layer's projections; 1 where there is none."""
    if block.norms == "post":
        return np.ones((1, config.embed_dim))
    gain = np.asarray(group["attention_norm"]["gain"], np.float64)
    return gain + 1 if config.norm == "rms_plus_one" else gain


def _sizes(
    weight: Float[Array, "L D K H"], bias: Float[Array, "L K H"] | None, gain: Float[np.ndarray, "L2 D"]
) -> Float[np.ndarray, "L K H"]:
    """Mean square of what each channel is, for normed inputs of independent elements."""
    sizes = np.sum(np.square(np.asarray(weight, np.float64) * gain[:, :, None, None]), axis=1)
    return sizes if bias is None else sizes + np.square(np.asarray(bias, np.float64))


def _key_sizes(attention: Any, config: AttentionConfig, gain: Float[np.ndarray, "L D"]) -> Float[np.ndarray, " P"]:
    """Size of each pair of channels of keys, or of each channel without rotation, over all layers and heads."""
    sizes = _sizes(attention["k"], attention.get("k_bias"), gain)
    if config.qk_norm == "head":
        own = np.asarray(attention["k_norm"]["gain"], np.float64)[:, None]
        sizes = sizes / sizes.mean(-1, keepdims=True) * np.square(own)
    sizes = np.sum(sizes / sizes.mean(-1, keepdims=True), axis=(0, 1))
    if (rope := config.rope) is None:
        return sizes
    dims = rope.dims(config.head_dim)
    turned = sizes[:dims].reshape(-1, 2) if rope.interleaved else sizes[:dims].reshape(2, -1).T
    return turned.sum(axis=1)
