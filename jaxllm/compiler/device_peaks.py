"""What a device can do at most, by its maker's data sheet: what figures are shares of.

Sources: cloud.google.com/tpu/docs/system-architecture-tpu-vm; NVIDIA H100, H200 and B200 data sheets (no sparsity).
"""

from __future__ import annotations

from typing import NamedTuple


class Peak(NamedTuple):
    """Of one jax device, which on a TPU7x is half a chip.

    Attributes:
        flops: dense bfloat16, FLOP/s.
        bandwidth: of its memory, bytes/s.
    """

    flops: float
    bandwidth: float


PEAKS = {
    "TPU v4": Peak(275e12, 1.228e12),
    "TPU v5 lite": Peak(197e12, 0.819e12),
    "TPU v5": Peak(459e12, 2.765e12),  # v5p
    "TPU v6 lite": Peak(918e12, 1.640e12),
    "TPU7x": Peak(1153.5e12, 3.690e12),
    "NVIDIA H100": Peak(989e12, 3.352e12),
    "NVIDIA H200": Peak(989e12, 4.800e12),
    "NVIDIA B200": Peak(2250e12, 7.672e12),
}
"""By the beginning of jax's ``device_kind``; of several the longest."""


def peak_of(device_kind: str) -> Peak | None:
    """Of a kind of device; None where unknown (a CPU's is on no data sheet)."""
    names = [name for name in PEAKS if device_kind.startswith(name)]
    return PEAKS[max(names, key=len)] if names else None


CLOCKS = {"TPU v4": 1.05e9, "TPU v5 lite": 1.5e9, "TPU v5": 1.75e9, "TPU v6 lite": 1.75e9, "TPU7x": 2.2e9}
"""Cycles/s of TPUs, with which the compiler's estimates become seconds: the peak over the FLOPs of a cycle. That is 2 x
128 x 128 for each matrix unit of the generations to v5 (8, 4 and 8 of them), four times 2 x 256 x 256 since v6e."""


def clock_of(device_kind: str) -> float | None:
    """Of a kind of TPU; None for what has no estimates."""
    names = [name for name in CLOCKS if device_kind.startswith(name)]
    return CLOCKS[max(names, key=len)] if names else None
