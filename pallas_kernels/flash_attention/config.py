"""Block sizes of the flash attention kernels by device kind; measured ones come from ``pallas_kernels.tuned``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pallas_kernels.tuned import tuned


@dataclass(frozen=True)
class FlashTpuBlocks:
    """Block sizes of one grid step on a TPU.

    Attributes:
        rows: most rows of a block: queries times the query heads folded into one matmul; a power of two.
        kv: keys of a block.
        vmem_bytes: VMEM limit of a kernel; None for the compiler's default.
        cores: cores that share the kernel; a kernel that is one grid is split over them by the compiler.
    """

    rows: int = 1024
    kv: int = 512
    vmem_bytes: int | None = None
    cores: int = 1


@dataclass(frozen=True)
class FlashGpuBlocks:
    """Block sizes of one program on a GPU; powers of two, at least 16.

    Attributes:
        q, kv: queries and keys of a block, forward.
        own_back, inner_back: backward, rows of the block that a program owns, and of those that it loops over: queries
            and keys for the gradient of queries, keys and queries for that of keys and values.
        warps, warps_back: warps of a program.
        stages, stages_back: stages of the software pipeline.
    """

    q: int = 128
    kv: int = 64
    own_back: int = 64
    inner_back: int = 64
    warps: int = 8
    warps_back: int = 8
    stages: int = 2
    stages_back: int = 2


@dataclass(frozen=True)
class FlashHopperBlocks:
    """Block sizes of the Mosaic-GPU kernels.

    Attributes:
        rows: rows that one of a block's two multiplying warpgroups owns: 64 on a device.
        kv: keys of a block that passes by, forward; a multiple of 64, as wgmma's operands are laid out.
        inner_back: rows of a block that passes by, backward; a multiple of 64.
        stages, stages_back: buffers of each array that passes by.
    """

    rows: int = 64
    kv: int = 128
    inner_back: int = 64
    stages: int = 2
    stages_back: int = 2


_TPU = {
    "TPU v4": FlashTpuBlocks(rows=512, cores=2),
    "TPU v5 lite": FlashTpuBlocks(vmem_bytes=64 * 2**20),
    "TPU v5": FlashTpuBlocks(vmem_bytes=64 * 2**20, cores=2),
    "TPU v6 lite": FlashTpuBlocks(vmem_bytes=64 * 2**20),
    "TPU7x": FlashTpuBlocks(vmem_bytes=48 * 2**20),
}
_TPU_MIN = {"rows": 128, "kv": 128}
_GPU_MIN = {"q": 16, "kv": 16, "own_back": 16, "inner_back": 16, "warps": 1, "warps_back": 1}


def tpu_blocks(kind: str, item_bytes: int) -> FlashTpuBlocks:
    """Block sizes for a TPU's ``device_kind`` and elements of 2 or 4 bytes."""
    blocks = _TPU.get(kind, FlashTpuBlocks())
    if item_bytes > 2:  # a float32 matmul is six bfloat16 passes: programs grow, and compile for minutes
        blocks = dataclasses.replace(blocks, rows=blocks.rows // 2, kv=blocks.kv // 2)
    return tuned("flash_attention", kind, tpu_case(item_bytes), blocks, _TPU_MIN)


def gpu_blocks(kind: str, head_dim: int, item_bytes: int) -> FlashGpuBlocks:
    """Block sizes for a GPU's ``device_kind``, the larger of the head dims, and elements of 2 or 4 bytes."""
    blocks = FlashGpuBlocks(warps=4) if head_dim <= 64 else FlashGpuBlocks()
    if head_dim > 128 or item_bytes > 2:  # a block must fit into shared memory
        blocks = FlashGpuBlocks(q=64, kv=32, own_back=32, inner_back=32)
    return tuned("flash_attention", kind, gpu_case(head_dim, item_bytes), blocks, _GPU_MIN)


def hopper_blocks(head_dim: int) -> FlashHopperBlocks:
    """Block sizes for a Hopper GPU and the larger of the head dims."""
    return FlashHopperBlocks(stages=3, stages_back=3) if head_dim <= 64 else FlashHopperBlocks()


def tpu_case(item_bytes: int) -> str:
    """Case by which TPU block sizes are tuned: the bytes of an element."""
    return f"{item_bytes} bytes"


def gpu_case(head_dim: int, item_bytes: int) -> str:
    """Case by which GPU block sizes are tuned: head dim, rounded up to 64, 128 or 256, and bytes of an element."""
    return f"head dim {64 if head_dim <= 64 else 128 if head_dim <= 128 else 256}, {item_bytes} bytes"
