"""Sliced layers: a dense feed-forward layer as a mixture of its slices, of which each token takes all.

HeteGen (arXiv:2403.01164) divides each matrix by columns between the host's processor, which has the weights, and the
device, to which they are copied, in the ratio by which both end at the same time. Here the hidden units of a layer are
cut into equal slices: a slice has the columns of the gate and up projections of its units, and their rows of the down
projection, and the layer's output is the sum over its slices. So a slice is an expert that every token takes with
weight 1, and what mixtures have serves dense models too: slots on the device, files, and the schedule that divides a
layer between the processor, the link and the device by measured costs (``expert_schedule``).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxllm.infer.streaming.layer_store import LayerStore, Unit
from jaxllm.models import BlockConfig, DecoderConfig, Functional, MoeConfig, RouterConfig, functional
from jaxllm.models.packed_weight import is_packed

EVERY = RouterConfig("sigmoid", normalize=False, scale=2.0)
"""Router whose scores are 1 for weights of zeros: 2 x sigmoid(0)."""


def sliced_model(model: Functional, slices: int) -> Functional:
    """The model with its dense feed-forward layers as mixtures of so many slices; mixtures stay what they are.

    Raises:
        ValueError: a layer cannot be cut so; says why.
    """
    config = model.config
    layers = [block.mlp for block in config.blocks if block.mlp.mixture is None]
    if not layers:
        raise ValueError(f"slices = {slices}: all layers are mixtures, whose experts are apart already; leave it out.")
    if config.pre_gated:
        raise ValueError(
            f"slices = {slices}: a router reads the input of the mixture before, which a sliced layer would be; leave "
            "it out."
        )
    for layer in layers:
        if not layer.gated or layer.bias:
            raise ValueError(f"slices = {slices} are for gated feed-forward layers without biases; leave it out.")
        if slices < 2:
            raise ValueError(f"slices = {slices}; give 2 or more, or leave it out.")
        if layer.hidden % slices:
            legal = [n for n in range(2, layer.hidden + 1) if layer.hidden % n == 0]
            raise ValueError(f"slices = {slices} do not divide the {layer.hidden} hidden units; legal: {legal[:16]}.")

    def sliced(block: BlockConfig) -> BlockConfig:
        if block.mlp.mixture is not None:
            return block
        hidden, activation = block.mlp.hidden // slices, block.mlp.activation
        return dataclasses.replace(block, mlp=MoeConfig(slices, slices, hidden, activation, router=EVERY))

    pattern, prefix = tuple(map(sliced, config.pattern)), tuple(map(sliced, config.prefix))
    return functional(dataclasses.replace(config, pattern=pattern, prefix=prefix), model.rules)


class SlicedLayers:
    """Store of units whose dense feed-forward layers are cut into slices.

    Args:
        store: the store of the whole layers.
        config: architecture of the whole model.
        slices: slices of a layer.

    Attributes:
        tier: that of the store.
    """

    def __init__(self, store: LayerStore, config: DecoderConfig, slices: int):
        self.store, self.tier, self._slices = store, store.tier, slices
        self._dense = [[block.mlp.mixture is None for block in group] for group, _ in config.segments]

    def read(self, unit: Unit, device: jax.Device) -> Any:
        """See ``LayerStore``; the slices are cut in the host's memory.

        Raises:
            ValueError: the weights of a layer are packed.
        """
        blocks = dict(self.store.read(unit, jax.devices("cpu")[0]))
        for b, block in blocks.items():
            if self._dense[unit.segment][int(b)]:
                blocks[b] = block | {"mlp": cut(block["mlp"], self._slices)}
        return jax.device_put(blocks, device)


def cut(layer: dict[str, Any], slices: int) -> dict[str, Any]:
    """Weights of a layer's slices, and of the router that chooses all.

    Args:
        layer: "gate" and "up" [D F], "down" [F D].
        slices: N.

    Returns:
        "experts" with "gate" and "up" [N D F/N] and "down" [N F/N D], and "router" [D N].

    Raises:
        ValueError: the weights are packed.
    """
    if any(map(is_packed, layer.values())):
        raise ValueError("slices are cut of plain weights, and these are packed; give --weights plain, or no slices.")
    gate, up, down = (np.asarray(layer[name]) for name in ("gate", "up", "down"))
    inwards = {
        name: np.ascontiguousarray(x.reshape(len(x), slices, -1).swapaxes(0, 1))
        for name, x in (("gate", gate), ("up", up))
    }
    router = np.zeros((len(gate), slices), gate.dtype)
    return {"experts": inwards | {"down": down.reshape(slices, -1, down.shape[-1])}, "router": router}
