"""Block sizes of the Pallas kernels, by kind of device.

``pallas_kernels.tuned``, where the kind was measured, overrides the defaults.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pallas_kernels.tuned import by_kind as tuned


@dataclass(frozen=True)
class TpuBlocks:
    """Sizes of one step of the grid on a TPU, at most; what is chosen are powers of two.

    Attributes:
        rows: tokens of a block times query heads.
        slots: of pages fetched at once.
        scores: query rows of a kv head times slots.
        buffer_bytes: of one of the two buffers that pages are fetched into.
        cores: that share a chip's memory and divide the kv heads among them.
        vmem_bytes: what the kernel may take of a core's VMEM; None for the compiler's default.
    """

    rows: int = 2048
    slots: int = 512
    scores: int = 2**17
    buffer_bytes: int = 4 * 2**20
    cores: int = 1
    vmem_bytes: int | None = None


@dataclass(frozen=True)
class GpuBlocks:
    """Sizes of one program on a GPU; powers of two, at least 16.

    Attributes:
        rows: tokens of a block times query heads, at most.
        slots: read at once.
        programs: into which the slots of few requests are split, at least.
        warps: of a program.
        stages: of the software pipeline.
    """

    rows: int = 64
    slots: int = 64
    programs: int = 512
    warps: int = 4
    stages: int = 2


_TPU = {
    "TPU v4": TpuBlocks(rows=1024, scores=2**16, buffer_bytes=2**20, cores=2),
    "TPU v5 lite": TpuBlocks(vmem_bytes=64 * 2**20),
    "TPU v5": TpuBlocks(cores=2, vmem_bytes=64 * 2**20),
    "TPU v6 lite": TpuBlocks(vmem_bytes=64 * 2**20),
    "TPU7x": TpuBlocks(vmem_bytes=48 * 2**20),
}


def tpu_blocks(kind: str, item_bytes: int) -> TpuBlocks:
    """Block sizes for a TPU's ``device_kind`` and elements of 2 or 4 bytes."""
    blocks = _TPU.get(kind, TpuBlocks())
    if item_bytes > 2:
        blocks = dataclasses.replace(blocks, rows=blocks.rows // 2, scores=blocks.scores // 2)
    return dataclasses.replace(blocks, **tuned("paged_attention").get(kind, {}))


def gpu_blocks(kind: str, head_dim: int, item_bytes: int) -> GpuBlocks:
    """Block sizes for a GPU's ``device_kind``, the larger of the head dims, and elements of 2 or 4 bytes."""
    blocks = GpuBlocks()
    if head_dim > 256:  # what a program holds must fit into its registers and shared memory
        blocks = GpuBlocks(rows=32, slots=32, warps=8)
    elif head_dim > 128 or item_bytes > 2:
        blocks = GpuBlocks(rows=32, slots=32)
    return dataclasses.replace(blocks, **tuned("paged_attention").get(kind, {}))


def block_tokens(tokens: int, requests: int, most: int) -> int:
    """Tokens of a block: a power of two, few enough that unfilled blocks do not make a batch many times larger."""
    return power_of_two(min(most, 2 * tokens - 1, max(8, 2 * tokens // requests)))


def power_of_two(n: int) -> int:
    """The greatest that is not more than ``n``; at least 1."""
    return 1 << max(n, 1).bit_length() - 1
