"""Block sizes of the Pallas kernels, by kind of device.

``pallas_kernels/tuned/flash_attention.json``, where it exists, overrides the defaults: it maps a ``device_kind`` to the
fields it changes, and ``"command"`` to what measured them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path

TUNED = Path(__file__).parents[1] / "tuned" / "flash_attention.json"


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


def tpu_blocks(kind: str, item_bytes: int) -> TpuBlocks:
    """Block sizes for a TPU's ``device_kind`` and elements of 2 or 4 bytes."""
    blocks = _TPU.get(kind, TpuBlocks())
    if item_bytes > 2:  # a product of float32 is six of bfloat16: programs grow, and compile for minutes
        blocks = dataclasses.replace(blocks, rows=blocks.rows // 2, kv=blocks.kv // 2)
    return dataclasses.replace(blocks, **_tuned().get(kind, {}))


def gpu_blocks(kind: str, head_dim: int, item_bytes: int) -> GpuBlocks:
    """Block sizes for a GPU's ``device_kind``, the larger of the head dims, and elements of 2 or 4 bytes."""
    blocks = GpuBlocks(warps=4) if head_dim <= 64 else GpuBlocks()
    if head_dim > 128 or item_bytes > 2:  # what a block holds must fit into shared memory
        blocks = GpuBlocks(q=64, kv=32, q_back=32, kv_back=32)
    return dataclasses.replace(blocks, **_tuned().get(kind, {}))


@functools.cache
def _tuned() -> dict[str, dict[str, int]]:
    if not TUNED.exists():
        return {}
    return {kind: fields for kind, fields in json.loads(TUNED.read_text()).items() if kind != "command"}
