"""What waits in the host's memory, how long it travels, and how much of it can: by formula.

Two choices are made here by a model of transfer and computing. MEMO's share of tokens (arXiv:2407.12117, section 4.1)
is the largest whose copies are over when the layer's forward pass is. Deep Optimizer States' stride (arXiv:2410.21316,
section 4.2) is the one with which the link and the host's processor are busy equally long.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from jaxllm.models import BlockConfig
from jaxllm.models.remat import offloaded_share
from jaxllm.plan.formulas.device_work import Work, gated
from jaxllm.plan.hardware import Hardware

ROWS = 3
"""Layers whose state is on the device at a time: one that is updated, the next one, the last one."""
HOST_WORDS = 7
"""What Adam reads and writes of the host's memory for a number: gradient, parameter, two moments; update, moments."""


def block_bytes(work: Work, block: BlockConfig) -> tuple[float, float]:
    """Of a micro-batch: what "offload" sends to the host of all tokens, and what it can send of a share of them."""
    inner = work.inner_widths(block)
    of_some = sum(inner[name] for name in ("q", "k", "v", "up", *(["gate"] if gated(block) else [])))
    sums = 4 * work.tokens * block.attention.heads / work.tensor
    return 2 * work.stream_bytes() + inner["out"] * work.tokens * work.width + sums, of_some * work.tokens * work.width


def sent_bytes(work: Work) -> tuple[float, float]:
    """Of a micro-batch: what all layers send to the host, and the largest of them; (0, 0) where remat offloads none."""
    share = offloaded_share(work.run.model.remat)
    if share is None:
        return 0.0, 0.0
    layers = {block: of_all + share * some for block in work.blocks for of_all, some in [block_bytes(work, block)]}
    return sum(count * layers[block] for block, count in work.blocks.items()), max(layers.values())


def largest_share(of_all: float, of_some: float, seconds: float, host: float) -> float:
    """The share of tokens whose copies are over in time; 0 if those of all tokens are not.

    Args:
        of_all, of_some: bytes of a layer, see ``block_bytes``.
        seconds: that its forward pass takes.
        host: bytes/s to the host.
    """
    return min(1.0, max(0.0, (seconds * host - of_all) / of_some))


@dataclass(frozen=True)
class Layer:
    """Seconds that one layer's update takes.

    Attributes:
        state: of its state on the link, one way.
        gradients: of its gradients and parameters on the link, to the host; its update comes back in half of that.
        host: of the update by the host's processor.
    """

    state: float
    gradients: float
    host: float

    @classmethod
    def of(cls, numbers: float, hardware: Hardware) -> Layer | None:
        """Of AdamW in float32; None where the bandwidth of the host's memory is not known.

        Args:
            numbers: of a device's part of the layer.
        """
        if hardware.host_memory is None:
            return None
        link = 4 * numbers / hardware.host
        return cls(2 * link, 2 * link, HOST_WORDS * 4 * numbers / hardware.host_memory)


def update_seconds(layer: Layer, layers: int, device_every: int) -> float:
    """Of all layers, of each so many the first on the device, both ways of the link at once beside the host."""

    def group(on_host: int) -> float:
        there = layer.state + on_host * layer.gradients
        back = layer.state + on_host * layer.gradients / 2
        return max(there, back, on_host * layer.host)

    whole, rest = divmod(layers, device_every)
    return whole * group(device_every - 1) + rest * group(0)


def device_every(layer: Layer, layers: int) -> int:
    """The fastest stride: about where the link has as long to do as the host, ``1 + state / (host - gradients)``."""
    return min(range(1, layers + 1), key=lambda stride: update_seconds(layer, layers, stride))


def of_layers(work: Work) -> float:
    """Which share of a device's parameters, and so of their optimizer state, is of layers."""
    return layer_numbers(work) / sum(w.stored * w.layers for w in work.weights)


def layer_numbers(work: Work) -> float:
    """Numbers of a device's part of all layers' parameters."""
    return sum(w.stored * w.layers for w in work.weights if w.name.startswith("segments/"))


def update_of(work: Work, hardware: Hardware, state: float) -> float:
    """Seconds that optimizer state of so many bytes travels for the update; 0 where it does not."""
    if not work.run.host.optimizer:
        return 0.0
    layers, every = work.run.model.layers, work.run.host.device_every
    layer = Layer.of(layer_numbers(work) / layers, hardware)
    if every == 1 or layer is None:
        return state / hardware.host
    return update_seconds(layer, layers, every)


def passes_of(work: Work, hardware: Hardware) -> float:
    """Seconds of copies beside the passes: activations there and back, parameters twice here and once there."""
    sent = 2 * work.micro_batches * sent_bytes(work)[0]
    if work.run.host.params:
        sent += 2 * layer_numbers(work) * jnp.dtype(work.run.model.param_dtype).itemsize
    return sent / hardware.host


def said(work: Work, hardware: Hardware, forward: float) -> list[str]:
    """What waits on the host, line by line, with what the models of transfer would choose.

    Args:
        forward: seconds of a micro-batch's forward pass.
    """
    run, lines = work.run, []
    if (share := offloaded_share(run.model.remat)) is not None:
        layers = run.model.layers
        hidden = [largest_share(*block_bytes(work, block), forward / layers, hardware.host) for block in work.blocks]
        lines.append(f"activations: products of {share:.0%} of the tokens; a forward pass hides {min(hidden):.0%}")
    if run.host.optimizer:
        layer = Layer.of(layer_numbers(work) / run.model.layers, hardware)
        best = "" if layer is None else f"; fastest by formula: {device_every(layer, run.model.layers)}"
        lines.append(f"optimizer state of layers: one of {run.host.device_every} updated on the device{best}")
    if run.host.params:
        lines.append("parameters of layers")
    return lines
