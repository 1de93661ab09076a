"""Block sizes of the Pallas kernels, by kind of device; where they were measured, those of ``pallas_kernels.tuned``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pallas_kernels.tuned import tuned


@dataclass(frozen=True)
class TpuBlocks:
    """Sizes of one step of the grid on a TPU.

    Attributes:
        rows: queries times the query heads that are folded into one product; at most, and a power of two.
        kv: keys.
        vmem_bytes: what a kernel may take of a core's VMEM; None for the compiler's default.
    """

    rows: int = 1024
    kv: int = 512
    vmem_bytes: int | None = None


@dataclass(frozen=True)
class GpuBlocks:
    """Sizes of one program on a GPU; powers of two, at least 16.

    Attributes:
        q, kv: queries and keys of a block, forward.
        q_back, kv_back: backward.
        warps, warps_back: of a program.
        stages: of the software pipeline.
    """

    q: int = 128
    kv: int = 64
    q_back: int = 64
    kv_back: int = 64
    warps: int = 8
    warps_back: int = 8
    stages: int = 2


_TPU = {
    "TPU v4": TpuBlocks(rows=512),
    "TPU v5 lite": TpuBlocks(vmem_bytes=64 * 2**20),
    "TPU v5": TpuBlocks(vmem_bytes=64 * 2**20),
    "TPU v6 lite": TpuBlocks(vmem_bytes=64 * 2**20),
    "TPU7x": TpuBlocks(vmem_bytes=48 * 2**20),
}
_TPU_LEAST = {"rows": 128, "kv": 128}
_GPU_LEAST = {"q": 16, "kv": 16, "q_back": 16, "kv_back": 16, "warps": 1, "warps_back": 1}


def tpu_blocks(kind: str, item_bytes: int) -> TpuBlocks:
    """Block sizes for a TPU's ``device_kind`` and elements of 2 or 4 bytes."""
    blocks = _TPU.get(kind, TpuBlocks())
    if item_bytes > 2:  # a product of float32 is six of bfloat16: programs grow, and compile for minutes
        blocks = dataclasses.replace(blocks, rows=blocks.rows // 2, kv=blocks.kv // 2)
    return tuned("flash_attention", kind, tpu_case(item_bytes), blocks, _TPU_LEAST)


def gpu_blocks(kind: str, head_dim: int, item_bytes: int) -> GpuBlocks:
    """Block sizes for a GPU's ``device_kind``, the larger of the head dims, and elements of 2 or 4 bytes."""
    blocks = GpuBlocks(warps=4) if head_dim <= 64 else GpuBlocks()
    if head_dim > 128 or item_bytes > 2:  # what a block holds must fit into shared memory
        blocks = GpuBlocks(q=64, kv=32, q_back=32, kv_back=32)
    return tuned("flash_attention", kind, gpu_case(head_dim, item_bytes), blocks, _GPU_LEAST)


def tpu_case(item_bytes: int) -> str:
    """What block sizes are tuned for apart."""
    return f"{item_bytes} bytes"


def gpu_case(head_dim: int, item_bytes: int) -> str:
    """Likewise; a head dim stands for those up to the next one."""
    return f"head dim {64 if head_dim <= 64 else 128 if head_dim <= 128 else 256}, {item_bytes} bytes"
