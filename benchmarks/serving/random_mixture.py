"""Random mixture: a mixture of random weights that is served with streamed weights, for benchmarks."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxllm.convert.load import LoadedModel
from jaxllm.infer import EngineConfig
from jaxllm.infer.engine.engine import Engine
from jaxllm.infer.streaming.layer_store import LoadedLayers, units_of
from jaxllm.infer.streaming.offload_budget import OffloadBudget
from jaxllm.infer.streaming.open_streamed import UnitBytes, mixture_bytes, model_bytes
from jaxllm.infer.streaming.placement_fit import ModelBytes
from jaxllm.infer.streaming.streamed_weights import StreamedWeights
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MoeConfig, functional
from jaxllm.text import ByteTokenizer


def mixture_of(layers: int, heads: int, hidden: int) -> DecoderConfig:
    """Mixture of 8 experts, of which a token has 2, with heads of 64 numbers."""
    block = BlockConfig(AttentionConfig(heads, heads // 2, 64), MoeConfig(experts=8, top_k=2, hidden=hidden))
    return DecoderConfig(2048, 64 * heads, layers, pattern=(block,))


class RandomMixture:
    """A model of random weights.

    Args:
        config: the model.

    Attributes:
        layers: its layers.
        loaded: the model with its parameters outside of blocks.
        bytes: what a placement is solved with.
        units: bytes of each layer: whole, and without its experts.
    """

    def __init__(self, config: DecoderConfig):
        self.config, model = config, functional(config)
        params: Any = model.init(jax.random.key(0))
        self.layers = LoadedLayers(params)
        ends = {name: value for name, value in params.items() if name != "segments"}
        mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        self.loaded = LoadedModel(model, ends, ByteTokenizer(), None, mesh, 0, {}, None)
        units = [UnitBytes.of(self.layers, unit) for unit in units_of(config.segments)]
        self.units = [one.whole for one in units], [one.rest for one in units]
        self.bytes: ModelBytes = model_bytes(model, self.units[0], ends, mixture_bytes(model, units))

    def engine(self, budget: OffloadBudget, **config: Any) -> Engine:
        """An engine with its weights placed by a budget.

        Args:
            budget: the placement.
            config: fields of ``EngineConfig``.
        """
        placement = budget.placement(self.units[1 if budget.experts else 0])
        weights = StreamedWeights.of(self.loaded.model, self.loaded.params, self.layers, placement, ["random mixture"])
        own = EngineConfig(samplers=("plain",), prefix_cache=False, layer_window=budget.window)
        return Engine.of(self.loaded.model, weights, dataclasses.replace(own, **config), strict=True)
