"""Block sizes of the paged attention kernels by device kind; measured ones in ``pallas_kernels.tuned`` win."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pallas_kernels.tuned import measured


@dataclass(frozen=True)
class PagedTpuBlocks:
    """Upper bounds of the block sizes of one grid step on a TPU; the chosen sizes are powers of two.

    Attributes:
        rows: tokens of a block times query heads.
        slots: slots of the pages fetched at once.
        scores: query rows of a kv head times slots.
        buffer_bytes: bytes of one of the two page buffers (double buffering).
        cores: cores that share a chip's memory and divide the kv heads among them.
        vmem_bytes: VMEM limit of the kernel; None for the compiler's default.
    """

    rows: int = 2048
    slots: int = 512
    scores: int = 2**17
    buffer_bytes: int = 4 * 2**20
    cores: int = 1
    vmem_bytes: int | None = None


@dataclass(frozen=True)
class PagedGpuBlocks:
    """Block sizes of one program on a GPU; powers of two, at least 16.

    Attributes:
        rows: tokens of a block times query heads, at most.
        slots: slots read at once.
        programs: least number of programs into which the slots of few requests are split.
        warps: warps of a program.
        stages: stages of the software pipeline.
    """

    rows: int = 64
    slots: int = 64
    programs: int = 512
    warps: int = 4
    stages: int = 2


_TPU = {
    "TPU v4": PagedTpuBlocks(rows=1024, scores=2**16, buffer_bytes=2**20, cores=2),
    "TPU v5 lite": PagedTpuBlocks(vmem_bytes=64 * 2**20),
    "TPU v5": PagedTpuBlocks(cores=2, vmem_bytes=64 * 2**20),
    "TPU v6 lite": PagedTpuBlocks(vmem_bytes=64 * 2**20),
    "TPU7x": PagedTpuBlocks(vmem_bytes=48 * 2**20),
}


def tpu_blocks(kind: str, item_bytes: int) -> PagedTpuBlocks:
    """Block sizes for a TPU's ``device_kind`` and elements of 2 or 4 bytes."""
    blocks = _TPU.get(kind, PagedTpuBlocks())
    if item_bytes > 2:
        blocks = dataclasses.replace(blocks, rows=blocks.rows // 2, scores=blocks.scores // 2)
    return dataclasses.replace(blocks, **measured("paged_attention", kind))


def gpu_blocks(kind: str, head_dim: int, item_bytes: int) -> PagedGpuBlocks:
    """Block sizes for a GPU's ``device_kind``, the larger of the head dims, and elements of 2 or 4 bytes."""
    blocks = PagedGpuBlocks()
    if head_dim > 256:  # a program's tiles must fit into registers and shared memory
        blocks = PagedGpuBlocks(rows=32, slots=32, warps=8)
    elif head_dim > 128 or item_bytes > 2:
        blocks = PagedGpuBlocks(rows=32, slots=32)
    return dataclasses.replace(blocks, **measured("paged_attention", kind))


def block_tokens(tokens: int, requests: int, most: int) -> int:
    """Tokens of a block: a power of two, small enough that partly filled blocks do not inflate the batch much."""
    return power_of_two(min(most, 2 * tokens - 1, max(8, 2 * tokens // requests)))


def power_of_two(n: int) -> int:
    """Largest power of two that is at most ``n``; at least 1."""
    return 1 << max(n, 1).bit_length() - 1
