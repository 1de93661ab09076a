"""Sliced layers: a dense feed-forward layer as a mixture of its slices, of which each token takes all.

HeteGen (arXiv:2403.01164) divides each matrix by columns between the host's processor, which has the weights, and the
device, to which they are copied, in the ratio by which both end at the same time. Here the hidden units of a layer are
cut into equal slices: a slice has the columns of the gate and up projections of its units, and their rows of the down
projection, and the layer's output is the sum over its slices. So a slice is an expert that every token takes with
weight 1, and what mixtures have serves dense models too: slots on the device, files, and the schedule that divides a
layer between the processor, the link and the device by measured costs (``expert_schedule``).

With ReLU as the activation a slice none of whose units is active adds nothing. With ``ActiveSlices`` a router predicts
which slices are, for each token, and the others are neither loaded nor computed (LLM in a flash, arXiv:2312.11514).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxllm.infer.streaming.experts.active_slices import ActiveSlices
from jaxllm.infer.streaming.layer_store import LayerStore, Unit
from jaxllm.models import BlockConfig, DecoderConfig, Functional, MoeConfig, RouterConfig, functional
from jaxllm.models.packed_weight import is_packed

EVERY = RouterConfig("sigmoid", normalize=False, scale=2.0)
"""Router whose scores are 1 for weights of zeros: 2 x sigmoid(0)."""
ACTIVE = RouterConfig("step", normalize=False, bias=True)
"""Router of ``ActiveSlices``."""


def sliced_model(model: Functional, slices: int, *, active: bool = False) -> Functional:
    """The model with its dense feed-forward layers as mixtures of so many slices; mixtures stay what they are.

    Args:
        model: the model.
        slices: slices of a layer.
        active: a token takes the slices that are predicted to be active, instead of all.

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
        if active and layer.activation != "relu":
            raise ValueError(
                f"active slices are those that ReLU leaves something of, and a layer's activation is "
                f"{layer.activation!r}: leave active=FILE out."
            )
        if slices < 2:
            raise ValueError(f"slices = {slices}; give 2 or more, or leave it out.")
        if layer.hidden % slices:
            legal = [n for n in range(2, layer.hidden + 1) if layer.hidden % n == 0]
            raise ValueError(f"slices = {slices} do not divide the {layer.hidden} hidden units; legal: {legal[:16]}.")

    router = ACTIVE if active else EVERY

    def sliced(block: BlockConfig) -> BlockConfig:
        if block.mlp.mixture is not None:
            return block
        hidden, activation = block.mlp.hidden // slices, block.mlp.activation
        return dataclasses.replace(block, mlp=MoeConfig(slices, slices, hidden, activation, router=router))

    pattern, prefix = tuple(map(sliced, config.pattern)), tuple(map(sliced, config.prefix))
    return functional(dataclasses.replace(config, pattern=pattern, prefix=prefix), model.rules)


class SlicedLayers:
    """Store of units whose dense feed-forward layers are cut into slices.

    Args:
        store: the store of the whole layers.
        config: architecture of the whole model.
        slices: slices of a layer.
        active: predictors of active slices; None: every token takes all.

    Raises:
        ValueError: the predictors are of another model, or of other slices.

    Attributes:
        tier: that of the store.
    """

    def __init__(self, store: LayerStore, config: DecoderConfig, slices: int, active: ActiveSlices | None = None):
        self.store, self.tier, self._slices, self._active = store, store.tier, slices, active
        if active is not None:
            active.check([n for n, block in enumerate(config.blocks) if block.mlp.mixture is None], config, slices)
        self._dense = [[block.mlp.mixture is None for block in group] for group, _ in config.segments]

    def read(self, unit: Unit, device: jax.Device) -> Any:
        """See ``LayerStore``; the slices are cut in the host's memory.

        Raises:
            ValueError: the weights of a layer are packed.
        """
        blocks = dict(self.store.read(unit, jax.devices("cpu")[0]))
        for b, block in blocks.items():
            if self._dense[unit.segment][int(b)]:
                router = {}
                if self._active is not None and not any(map(is_packed, block["mlp"].values())):
                    router = self._active.weights(unit.first + int(b), np.asarray(block["mlp"]["gate"]))
                blocks[b] = block | {"mlp": cut(block["mlp"], self._slices, router)}
        return jax.device_put(blocks, device)


def cut(layer: dict[str, Any], slices: int, router: Mapping[str, np.ndarray] | None = None) -> dict[str, Any]:
    """Weights of a layer's slices, and of the router.

    Args:
        layer: "gate" and "up" [D F], "down" [F D].
        slices: N.
        router: weights of the router, which stay as exact as thresholds want; None or empty: the one that chooses all.

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
    own = router or {"router": np.zeros((len(gate), slices))}
    exact = np.float64 if gate.dtype == np.float64 else np.float32 if router else gate.dtype
    routing = {name: np.asarray(x, exact) for name, x in own.items()}
    return {"experts": inwards | {"down": down.reshape(slices, -1, down.shape[-1])}, **routing}
