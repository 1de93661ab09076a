"""Host offload by formula: bytes in host memory, transfer time, and how much to offload.

Two choices follow a model of transfer and compute. MEMO's share of tokens (arXiv:2407.12117, section 4.1) is the
largest whose copies finish within the layer's forward pass. Deep Optimizer States' stride (arXiv:2410.21316, section
4.2) balances the link and the host's CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from jaxllm.models import BlockConfig
from jaxllm.models.remat import offloaded_share
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.hardware import Hardware
from jaxllm.train.host_offload import persistent_arrays

ROWS = 3
"""Layers whose offloaded state is on the device at a time: the one being updated, the next one, the previous one."""
HOST_WORDS = 7
"""Words of host memory that Adam moves per element: gradient, parameter, two moments; update, two moments."""


def block_bytes(work: DeviceWork, block: BlockConfig) -> tuple[float, float]:
    """Activation offload of a micro-batch in a block: (bytes offloaded for all tokens, bytes optional per share of
    tokens).
    """
    inner = work.inner_widths(block)
    of_some = sum(inner[name] for name in ("q", "k", "v", "up", "gate"))
    sums = 4 * work.tokens * block.attention.heads / work.tensor
    return 2 * work.stream_bytes() + inner["out"] * work.tokens * work.width + sums, of_some * work.tokens * work.width


def offloaded_bytes(work: DeviceWork) -> tuple[float, float]:
    """Activation offload of a micro-batch: (bytes of all layers, of the largest layer); (0, 0) without offload."""
    share = offloaded_share(work.run.model.remat)
    if share is None:
        return 0.0, 0.0
    layers = {block: of_all + share * some for block in work.blocks for of_all, some in [block_bytes(work, block)]}
    return sum(count * layers[block] for block, count in work.blocks.items()), max(layers.values())


def largest_share(of_all: float, of_some: float, seconds: float, host: float) -> float:
    """Largest share of tokens whose copies finish in time; 0 if the mandatory copies alone do not.

    Args:
        of_all, of_some: mandatory and optional bytes of a layer, see ``block_bytes``.
        seconds: time of the layer's forward pass.
        host: bandwidth to the host, bytes/s.
    """
    return min(1.0, max(0.0, (seconds * host - of_all) / of_some))


@dataclass(frozen=True)
class LayerUpdateTime:
    """Seconds of one layer's optimizer update with host offload.

    Attributes:
        state: transfer of its optimizer state over the link, one way.
        gradients: transfer of its gradients and parameters to the host; the update returns in half of that.
        host: update on the host's CPU.
    """

    state: float
    gradients: float
    host: float

    @classmethod
    def of(cls, numbers: float, hardware: Hardware) -> LayerUpdateTime | None:
        """Update time of float32 AdamW; None where the host's memory bandwidth is unknown.

        Args:
            numbers: elements of the layer's shard on the device.
            hardware: hardware of the device.
        """
        if hardware.host_memory is None:
            return None
        link = 4 * numbers / hardware.host
        return cls(2 * link, 2 * link, HOST_WORDS * 4 * numbers / hardware.host_memory)


def update_seconds(layer: LayerUpdateTime, layers: int, device_every: int) -> float:
    """Optimizer update time of all layers, one of every ``device_every`` on the device.

    Both directions of the link overlap each other and the host's CPU.
    """

    def group(on_host: int) -> float:
        there = layer.state + on_host * layer.gradients
        back = layer.state + on_host * layer.gradients / 2
        return max(there, back, on_host * layer.host)

    whole, rest = divmod(layers, device_every)
    return whole * group(device_every - 1) + rest * group(0)


def device_every(layer: LayerUpdateTime, layers: int) -> int:
    """Fastest stride: about where the link and the host are equally busy, ``1 + state / (host - gradients)``."""
    return min(range(1, layers + 1), key=lambda stride: update_seconds(layer, layers, stride))


def layer_share(work: DeviceWork) -> float:
    """Fraction of a device's parameters, and so of their optimizer state, that belongs to layers."""
    return layer_elements(work) / sum(w.stored * w.layers for w in work.weights)


def layer_elements(work: DeviceWork) -> float:
    """Parameter elements of all layers on a device."""
    return sum(w.stored * w.layers for w in work.weights if w.name.startswith("segments/"))


def streamed_share(work: DeviceWork) -> float:
    """Share of the layers' optimizer state that is in host memory and streamed: 0 without optimizer offload, else what
    is not persistent (``HostConfig.persistent``).

    Each of the optimizer's arrays is counted as large as the parameter that it is of.
    """
    host = work.run.host
    if not host.optimizer:
        return 0.0
    sizes = [w.stored * w.layers for w in work.weights if w.name.startswith("segments/")]
    sizes *= work.run.optim.spec.arrays or 1
    return 1 - sum(sizes[n] for n in persistent_arrays(sizes, host.persistent)) / sum(sizes)


def state_transfer_seconds(work: DeviceWork, hardware: Hardware, state: float) -> float:
    """Seconds that the streamed part of ``state`` bytes of optimizer state of layers travels for the update."""
    if not work.run.host.optimizer:
        return 0.0
    layers, every = work.run.model.layers, work.run.host.device_every
    layer = LayerUpdateTime.of(layer_elements(work) / layers, hardware)
    if every == 1 or layer is None:
        return streamed_share(work) * state / hardware.host
    return update_seconds(layer, layers, every)


def copy_seconds(work: DeviceWork, hardware: Hardware) -> float:
    """Seconds of copies that overlap the passes: activations out and back, parameters in twice and out once."""
    sent = 2 * work.micro_batches * offloaded_bytes(work)[0]
    if work.run.host.params:
        sent += 2 * layer_elements(work) * jnp.dtype(work.run.model.param_dtype).itemsize
    return sent / hardware.host


def describe(work: DeviceWork, hardware: Hardware, forward: float) -> list[str]:
    """Summary lines of what is offloaded, with the choices that the transfer models would make.

    Args:
        forward: seconds of a micro-batch's forward pass.
    """
    run, lines = work.run, []
    if (share := offloaded_share(run.model.remat)) is not None:
        layers = run.model.layers
        hidden = [largest_share(*block_bytes(work, block), forward / layers, hardware.host) for block in work.blocks]
        lines.append(
            f"activations: matmul outputs of {share:.0%} of the tokens; a forward pass hides {min(hidden):.0%}"
        )
    if run.host.optimizer:
        layer = LayerUpdateTime.of(layer_elements(work) / run.model.layers, hardware)
        best = "" if layer is None else f"; fastest by formula: {device_every(layer, run.model.layers)}"
        stays = 1 - streamed_share(work)
        kept = f"{stays:.0%} persistent on the device, the rest streamed; " if stays else ""
        lines.append(f"optimizer state of layers: {kept}one of {run.host.device_every} updated on the device{best}")
    if run.host.params:
        lines.append("parameters of layers")
    return lines
