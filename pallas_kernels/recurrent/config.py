"""Block sizes of the recurrent kernels, by the VMEM of a TPU and the registers of a GPU.

Measured fields in ``pallas_kernels.tuned`` override those of a TPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels._compat import target_device
from pallas_kernels._pallas import round_up
from pallas_kernels.recurrent.cells import CELLS
from pallas_kernels.tuned import tuned

LANES = 128
VMEM_BYTES = 40 * 2**20
"""VMEM that blocks may take: the smallest generation has 64 MiB in a core, or the compiler's limit can be set to it."""
LEAST = {"rows": 16, "tokens": 1}
"""Smallest legal sizes of blocks."""


@dataclass(frozen=True)
class RecurrentTpuBlocks:
    """Block of one grid step on a TPU.

    Attributes:
        rows: rows of the batch; at most those that there are.
        tokens: tokens of a chunk.
    """

    rows: int = 128
    tokens: int = 32


def vmem_terms(cell: str, head_dim: int, itemsize: int) -> tuple[int, int]:
    """Bytes of VMEM that the backward pass takes: (for each row and token of a block, for the matrices).

    Gate inputs, the gradients of hidden states and of gates, and the float32 states before each token; whether a token
    keeps its states takes a whole row of lanes. The next block is fetched meanwhile.
    """
    kind, wide = CELLS[cell], round_up(head_dim, LANES)
    gates, extra = len(kind.gates), int(cell == "gru")
    one = itemsize * (2 * gates + extra + 1) + 4 * len(kind.states)
    return 2 * (wide * one + 4 * LANES), 2 * gates * head_dim * wide * itemsize


def tpu_case(cell: str, head_dim: int, itemsize: int) -> str:
    """Case of ``pallas_kernels.tuned``."""
    return f"{cell}, {head_dim}, {itemsize} bytes"


def tpu_blocks(cell: str, rows: int, tokens: int, head_dim: int, itemsize: int) -> RecurrentTpuBlocks:
    """Block of rows and tokens: the measured one, else the most tokens, a power of two, that fit with up to 128 rows.

    Args:
        rows, tokens: of the batch.

    Raises:
        NotImplementedError: no block fits into VMEM.
    """
    each, matrices = vmem_terms(cell, head_dim, itemsize)
    block = RecurrentTpuBlocks()
    block = tuned("recurrent", target_device().kind, tpu_case(cell, head_dim, itemsize), block, LEAST)
    own = min(block.rows, rows if rows < 16 else rows // 16 * 16)
    size = min(block.tokens, 1 << max(0, tokens - 1).bit_length())
    while size > 1 and each * round_up(own, 16) * size + matrices > VMEM_BYTES:
        size //= 2
    if each * round_up(own, 16) * size + matrices > VMEM_BYTES:
        raise NotImplementedError(
            f"pallas_tpu holds the {len(CELLS[cell].gates)} recurrent matrices of a head in VMEM, and those of "
            f"{head_dim} x {head_dim} with {own} rows of one token take "
            f"{(each * own + matrices) / 2**20:.0f} MiB of {VMEM_BYTES >> 20}."
        )
    return RecurrentTpuBlocks(own, size)
