"""Peak FLOP/s, memory bandwidth and clock of devices, by data sheet: the base of MFU and roofline figures.

Sources: cloud.google.com/tpu/docs/system-architecture-tpu-vm; NVIDIA data sheets of A100, A10G, L4, H100, H200 and
B200; the GA102 and Ada architecture whitepapers of NVIDIA for RTX 3090 and 4090. No sparsity; float32 accumulation.
"""

from __future__ import annotations

from typing import NamedTuple


class Peak(NamedTuple):
    """Peak rates of one jax device, which on a TPU7x is half a chip.

    Attributes:
        flops: dense bfloat16 FLOP/s.
        bandwidth: bytes/s of its memory.
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
"""Peak rates by the prefix of jax's ``device_kind``; the longest prefix wins."""
EXACT_PEAKS = {
    "NVIDIA A100-SXM4-80GB": Peak(312e12, 2.039e12),
    "NVIDIA GeForce RTX 3090": Peak(71e12, 0.936e12),
    "NVIDIA GeForce RTX 4090": Peak(165.2e12, 1.008e12),
    "NVIDIA A10G": Peak(70e12, 0.600e12),
    "NVIDIA L4": Peak(121e12, 0.300e12),
}
"""Peak rates by the whole ``device_kind``: other devices have names that begin with it (L40, RTX 3090 Ti)."""


def peak_of(device_kind: str) -> Peak | None:
    """Peak rates of a kind of device; None if unknown (CPUs have no data sheet here)."""
    if device_kind in EXACT_PEAKS:
        return EXACT_PEAKS[device_kind]
    names = [name for name in PEAKS if device_kind.startswith(name)]
    return PEAKS[max(names, key=len)] if names else None


CLOCKS = {"TPU v4": 1.05e9, "TPU v5 lite": 1.5e9, "TPU v5": 1.75e9, "TPU v6 lite": 1.75e9, "TPU7x": 2.2e9}
"""Cycles/s of TPUs, which turn the compiler's estimates into seconds: the peak over the FLOPs of a cycle, which are 2 x
128 x 128 for each matrix unit of the generations to v5 (8, 4 and 8 of them), and four times 2 x 256 x 256 since v6e.
"""


def clock_of(device_kind: str) -> float | None:
    """Clock of a kind of TPU in cycles/s; None for devices whose compiler gives no estimates."""
    names = [name for name in CLOCKS if device_kind.startswith(name)]
    return CLOCKS[max(names, key=len)] if names else None
