"""Tile sizes of the packed matmul's kernels by shape; measured fields in ``pallas_kernels.tuned`` override them.

Legend: M rows, B bytes of an output, N outputs, G groups of inputs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pallas_kernels._pallas import round_up
from pallas_kernels.tuned import measured

SUBLANES = 32
"""Rows of bytes that a TPU's tile has."""

LANES = 128
"""Columns that a TPU's tile has."""
MOST_WHOLE = 2048
"""Most tuples of an output that are one tile where none divides them."""


@dataclass(frozen=True)
class PackedTiles:
    """Tile sizes of one grid step.

    Attributes:
        rows: rows of the activations, at most.
        inner: tuples of an output, at most.
        columns: outputs, at most.
    """

    rows: int = 256
    inner: int = 512
    columns: int = 512


@dataclass(frozen=True)
class PackedGpuTiles:
    """Tile sizes of one program on a GPU; powers of two, at least 16.

    Attributes:
        rows, inner, columns: tile of the matmul.
        warps, stages: warps of a program and stages of its software pipeline.
    """

    rows: int = 64
    inner: int = 64
    columns: int = 64
    warps: int = 4
    stages: int = 4


def tpu_tiles(kind: str, m: int, size: int, rows: int, n: int, item_bytes: int) -> PackedTiles | None:
    """Tiles for M rows and a matrix of ``rows`` tuples of codes an output, in groups of ``size`` tuples.

    None where no tile of tuples divides the rows and goes with the groups.
    """
    most = dataclasses.replace(PackedTiles(), **measured("packed_matmul", kind))
    tall = round_up(min(m, most.rows), 32 // item_bytes)
    # A tile of activations has whole registers of 128 tuples, or all.
    legal = [i for i in range(LANES, most.inner + 1, LANES) if rows % i == 0 and (i % size == 0 or size % i == 0)]
    if rows <= most.inner or (not legal and rows <= MOST_WHOLE):
        legal.append(rows)
    # Within a tile the scales of several groups are spread over whole registers of 8 rows.
    legal = [i for i in legal if size % i == 0 or size % 8 == 0]
    return PackedTiles(tall, max(legal), min(round_up(n, 128), most.columns)) if legal else None


def gpu_tiles(kind: str, m: int, size: int, groups: int) -> PackedGpuTiles:
    """Tiles for M rows and groups of ``size`` tuples, within a group where it has a multiple of 16."""
    found = dataclasses.replace(PackedGpuTiles(), **measured("packed_matmul", kind))
    inner = found.inner
    while groups > 1 and size % inner and inner > 1:
        inner //= 2
    rows = found.rows
    while rows > 16 and rows >= 2 * m:
        rows //= 2
    return dataclasses.replace(found, inner=inner if inner >= 16 else found.inner, rows=rows)
