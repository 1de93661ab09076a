"""Bytes of a training step by memory tier: on a device, in its host's memory and on disk; and whether they fit.

Model states and working memory of a transformer by the formulas of ZeRO-Infinity (arXiv:2104.07857, section 3), and its
placements (table 2). All bytes are those of one device: of a host and of a disk, a device's share. The same comparison
decides for runs of this repository, whose bytes ``jaxllm.plan.capacity_table`` takes from the planner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Tier = Literal["device", "host", "disk"]
Kind = Literal["parameters", "gradients", "optimizer", "activations"]
KINDS: tuple[Kind, ...] = ("parameters", "gradients", "optimizer", "activations")


class TierBytes(NamedTuple):
    """Bytes by tier, needed or available.

    Attributes:
        device: of a device.
        host: of a device's share of its host's memory.
        disk: of a device's share of its host's disks.
    """

    device: float
    host: float = 0.0
    disk: float = 0.0

    def lacking(self, available: TierBytes) -> dict[str, float]:
        """Bytes that are missing, by tier; empty: it fits."""
        return {
            tier: need - there for tier, need, there in zip(self._fields, self, available, strict=True) if need > there
        }


class TrainingBytes(NamedTuple):
    """Bytes of a model in training.

    Attributes:
        parameters, gradients, optimizer: of the whole model.
        activations: saved activations of one device's rows.
        working: working memory of a device, whatever is placed elsewhere.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    working: float


def transformer_bytes(
    layers: int, width: int, heads: int, rows: float, length: int, *, interval: int = 1, parts: int = 1
) -> TrainingBytes:
    """Bytes of a GPT-like transformer in mixed-precision training with Adam (arXiv:2104.07857, section 3).

    A layer has 12 width^2 parameters. Each has 2 bytes of parameter, 2 of gradient and 16 of optimizer state: float32
    parameter, gradient and two moments. Working memory: parameter and gradient of the largest matrix, [width, 4 width],
    and the activations between two checkpoints.

    Args:
        layers, width, heads: of the model.
        rows, length: rows of a device's batch, and their tokens.
        interval: layers between two activation checkpoints.
        parts: parts that a layer is split into, over devices or one after the other (tiling, section 5.1.3).
    """
    parameters, tokens = 12 * layers * width**2, rows * length
    largest = 2 * 2 * width * 4 * width
    between = tokens * interval * (16 * width + 2 * heads * length)
    return TrainingBytes(
        2 * parameters,
        2 * parameters,
        16 * parameters,
        2 * tokens * width * layers / interval,
        (largest + between) / parts,
    )


@dataclass(frozen=True)
class TierPlacement:
    """TierPlacement of each kind of bytes in a tier.

    Attributes:
        parameters, gradients, optimizer, activations: tier of each.
        whole: kinds that every device has whole; the others are split over all devices.
    """

    parameters: Tier = "device"
    gradients: Tier = "device"
    optimizer: Tier = "device"
    activations: Tier = "device"
    whole: tuple[Kind, ...] = ()


ZERO_PLACEMENTS = {
    "data parallelism": TierPlacement(whole=("parameters", "gradients", "optimizer")),
    "ZeRO-2": TierPlacement(whole=("parameters",)),
    "ZeRO-3, 3D parallelism": TierPlacement(),
    "ZeRO-Offload": TierPlacement("device", "host", "host", whole=("parameters",)),
    "ZeRO-Offload, model parallel": TierPlacement("device", "host", "host"),
    "ZeRO-Infinity, CPU": TierPlacement("host", "host", "host", "host"),
    "ZeRO-Infinity, CPU and NVMe": TierPlacement("host", "disk", "disk", "host"),
    "ZeRO-Infinity, NVMe": TierPlacement("disk", "disk", "disk", "host"),
}
"""Placements by name (arXiv:2104.07857, table 2); those with model parallelism split parameters over all devices."""


def placed(model: TrainingBytes, placement: TierPlacement, devices: int) -> TierBytes:
    """Bytes of a device by tier, where a model in training is placed so on that many devices."""
    found = {"device": model.working, "host": 0.0, "disk": 0.0}
    for kind in KINDS:
        ways = 1 if kind in placement.whole or kind == "activations" else devices
        found[getattr(placement, kind)] += getattr(model, kind) / ways
    return TierBytes(**found)
