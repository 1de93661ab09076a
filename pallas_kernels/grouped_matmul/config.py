"""Tile sizes of the grouped matmul kernels by device kind and shape.

On a TPU they are the fastest by a roofline estimate among those that fit into VMEM: a wide tile reads an operand less
often, a low one wastes less where groups end inside a tile. Measured fields in ``pallas_kernels.tuned`` override those
of the result.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from pallas_kernels._pallas import round_up
from pallas_kernels.tuned import measured

LANES = 128
MAX_STEP_MACS = 2**29
"""Most multiply-accumulates of one grid step on a TPU: programs are unrolled, and larger steps compile for minutes."""
STEP_SECONDS = 0.35e-6
"""Overhead of one grid step on a TPU, in seconds."""


@dataclass(frozen=True)
class GroupedTiles:
    """Tile sizes of one grid step on a TPU.

    Attributes:
        rows: rows of the grouped operand.
        inner: contracted dimension; unused where the rows are contracted.
        columns: columns of the result.
        left: the result's first dimension, where that is not the rows.
    """

    rows: int
    inner: int
    columns: int
    left: int = 0


@dataclass(frozen=True)
class TpuLimits:
    """Hardware limits of a TPU core.

    Attributes:
        flops: bfloat16 FLOP/s.
        bandwidth: HBM bandwidth, bytes/s.
        tiles_bytes: VMEM bytes that tiles may take.
        vmem_bytes: VMEM limit of a kernel; None for the compiler's default.
    """

    flops: float
    bandwidth: float
    tiles_bytes: int = 40 * 2**20
    vmem_bytes: int | None = 64 * 2**20


_TPU = {
    "TPU v4": TpuLimits(275e12, 1.23e12, 11 * 2**20, None),
    "TPU v5 lite": TpuLimits(197e12, 0.82e12),
    "TPU v5": TpuLimits(459e12, 2.77e12),
    "TPU v6 lite": TpuLimits(918e12, 1.64e12),
    "TPU7x": TpuLimits(1154e12, 3.69e12, 32 * 2**20, 48 * 2**20),
}


@dataclass(frozen=True)
class GroupedGpuTiles:
    """Tile sizes of one program on a GPU; powers of two, at least 16.

    Attributes:
        rows, inner, columns: tile of the matmul of rows with their groups' matrices.
        rows_back, left_back, columns_back: tile of the weight gradient, which contracts a group's rows.
        warps, stages: warps of a program and stages of its software pipeline.
        together: tiles of rows that share a group's columns while these are in the L2 cache.
    """

    rows: int = 128
    inner: int = 64
    columns: int = 128
    rows_back: int = 64
    left_back: int = 128
    columns_back: int = 128
    warps: int = 8
    stages: int = 3
    together: int = 8


def tpu_limits(kind: str) -> TpuLimits:
    """Limits of a TPU's ``device_kind``; an unknown kind gets those of the smallest."""
    return _TPU.get(kind, _TPU["TPU v4"])


def matmul_tiles(kind: str, m: int, e: int, inner: int, columns: int, item_bytes: int) -> GroupedTiles:
    """Tiles for M rows in E groups, each multiplied by its group's [inner, columns] matrix."""
    found = measured("grouped_matmul", kind, shape_case(m, e, inner, columns, item_bytes))
    found = found or measured("grouped_matmul", kind)
    return dataclasses.replace(_matmul_tiles(kind, m, e, inner, columns, item_bytes), **found)


def shape_case(m: int, e: int, inner: int, columns: int, item_bytes: int) -> str:
    """Case by which TPU tiles are tuned: the shape of the matmul, and bytes of an element."""
    return f"{m} rows, {e} groups, {inner} x {columns}, {item_bytes} bytes"


@functools.cache
def _matmul_tiles(kind: str, m: int, e: int, inner: int, columns: int, item_bytes: int) -> GroupedTiles:
    limits = tpu_limits(kind)

    def fits(t: GroupedTiles) -> bool:
        twice = t.rows * t.inner + t.inner * t.columns + t.rows * t.columns  # double buffering
        return 2 * item_bytes * twice + 4 * t.rows * t.columns <= limits.tiles_bytes

    def seconds(t: GroupedTiles) -> float:
        steps, across, deep = _steps(m, e, t.rows), -(-columns // t.columns), -(-inner // t.inner)
        work = 2 * steps * t.rows * round_up(inner, t.inner) * round_up(columns, t.columns)
        matrices = (min(e, m) if deep == 1 else steps) * inner * columns
        return _seconds(limits, item_bytes, work, steps * t.rows * inner * across + matrices, steps * across * deep)

    return _best(m, item_bytes, _sizes(inner), _sizes(columns), (0,), fits, seconds)


def outer_tiles(kind: str, m: int, e: int, left: int, columns: int, item_bytes: int) -> GroupedTiles:
    """Tiles for the weight gradient: for each group, the sum over its rows of [left] by [columns] outer products."""
    found = measured("grouped_matmul", kind)
    return dataclasses.replace(_outer_tiles(kind, m, e, left, columns, item_bytes), **found)


@functools.cache
def _outer_tiles(kind: str, m: int, e: int, left: int, columns: int, item_bytes: int) -> GroupedTiles:
    limits = tpu_limits(kind)

    def fits(t: GroupedTiles) -> bool:
        twice = t.rows * (t.left + t.columns) + t.left * t.columns
        return 2 * item_bytes * twice + 4 * t.left * t.columns <= limits.tiles_bytes

    def seconds(t: GroupedTiles) -> float:
        steps, down, across = _steps(m, e, t.rows), -(-left // t.left), -(-columns // t.columns)
        work = 2 * steps * t.rows * round_up(left, t.left) * round_up(columns, t.columns)
        read = steps * t.rows * (left * across + columns * down)
        return _seconds(limits, item_bytes, work, read + e * left * columns, steps * across * down)

    return _best(m, item_bytes, (0,), _sizes(columns), _sizes(left), fits, seconds)


def gpu_tiles(kind: str, m: int, e: int, item_bytes: int) -> GroupedGpuTiles:
    """Tiles for M rows in E groups; fewer rows per group get lower tiles."""
    tiles = GroupedGpuTiles()
    if item_bytes > 2:
        tiles = GroupedGpuTiles(inner=32, columns=64, rows_back=32, left_back=64, columns_back=64, stages=2)
    rows = tiles.rows
    while rows > 16 and rows // 2 >= m // e:
        rows //= 2
    tiles = dataclasses.replace(tiles, rows=rows, warps=4 if rows < 64 else tiles.warps)
    return dataclasses.replace(tiles, **measured("grouped_matmul", kind))


def _best(
    m: int,
    item_bytes: int,
    inner: tuple[int, ...],
    columns: tuple[int, ...],
    left: tuple[int, ...],
    fits: Callable[[GroupedTiles], bool],
    seconds: Callable[[GroupedTiles], float],
) -> GroupedTiles:
    most = MAX_STEP_MACS if item_bytes == 2 else MAX_STEP_MACS // 6  # a float32 matmul is six bfloat16 passes
    rows = [r for r in (128, 256, 512, 1024) if r <= round_up(m, LANES)]
    options = [GroupedTiles(*sizes) for sizes in itertools.product(rows, inner, columns, left)]
    options = [t for t in options if t.rows * max(t.inner, t.left) * t.columns <= most]
    return min(filter(fits, options), key=seconds)


def _sizes(n: int) -> tuple[int, ...]:
    """Candidate tile sizes of a dimension: whole lanes, or all of it."""
    return (*(size for size in (128, 256, 512, 1024, 2048, 4096) if size < n), n)


def _steps(m: int, e: int, rows: int) -> int:
    """Most tile steps of M rows: a group that begins inside a tile visits that tile once more."""
    return -(-m // rows) + min(e, m)


def _seconds(limits: TpuLimits, item_bytes: int, work: float, items: float, steps: int) -> float:
    rate = limits.flops if item_bytes == 2 else limits.flops / 6
    return max(work / rate, items * item_bytes / limits.bandwidth) + steps * STEP_SECONDS
