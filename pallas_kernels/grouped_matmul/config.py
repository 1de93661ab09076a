"""Tile sizes of the Pallas kernels, by kind of device and shape.

On a TPU they are those that a roofline takes to be fastest of those that fit into fast memory: a wide tile reads an
operand less often, a low one wastes less where groups end inside a tile.
``pallas_kernels.tuned``, where the kind was measured, overrides fields of the result.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from pallas_kernels._pallas import round_up
from pallas_kernels.tuned import by_kind as tuned

LANES = 128
MOST_PRODUCTS = 2**29
"""Of numbers in a step on a TPU: programs are unrolled, and larger ones compile for minutes."""
STEP_SECONDS = 0.35e-6
"""What a step of a TPU's grid costs besides its work."""


@dataclass(frozen=True)
class Tiles:
    """Sizes of one step.

    Attributes:
        rows: of the rows in groups.
        inner: of what is summed over; unused where that is the rows.
        columns: of the result.
        left: of the result's other dimension, where that is not the rows.
    """

    rows: int
    inner: int
    columns: int
    left: int = 0


@dataclass(frozen=True)
class TpuLimits:
    """What a TPU core can do.

    Attributes:
        flops: bfloat16 operations a second.
        bandwidth: bytes of HBM a second.
        tiles_bytes: of fast memory that tiles may take.
        vmem_bytes: what a kernel may take in all; None for the compiler's default.
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
class GpuTiles:
    """Sizes of one program on a GPU; powers of two, at least 16.

    Attributes:
        rows, inner, columns: of a product of rows with their groups' matrices.
        rows_back, left_back, columns_back: of the sum over a group's rows.
        warps, stages: of a program and of its software pipeline.
        together: tiles of rows that share a group's columns while they are in the cache.
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
    """Of a TPU's ``device_kind``; an unknown one is taken for the smallest."""
    return _TPU.get(kind, _TPU["TPU v4"])


@functools.cache
def product_tiles(kind: str, m: int, e: int, inner: int, columns: int, item_bytes: int) -> Tiles:
    """For M rows in E groups, each by its group's [inner, columns]."""
    limits = tpu_limits(kind)

    def fits(t: Tiles) -> bool:
        twice = t.rows * t.inner + t.inner * t.columns + t.rows * t.columns  # two buffers of each operand
        return 2 * item_bytes * twice + 4 * t.rows * t.columns <= limits.tiles_bytes

    def seconds(t: Tiles) -> float:
        steps, across, deep = _steps(m, e, t.rows), -(-columns // t.columns), -(-inner // t.inner)
        work = 2 * steps * t.rows * round_up(inner, t.inner) * round_up(columns, t.columns)
        matrices = (min(e, m) if deep == 1 else steps) * inner * columns
        return _seconds(limits, item_bytes, work, steps * t.rows * inner * across + matrices, steps * across * deep)

    return _best(kind, m, item_bytes, _sizes(inner), _sizes(columns), (0,), fits, seconds)


@functools.cache
def outer_tiles(kind: str, m: int, e: int, left: int, columns: int, item_bytes: int) -> Tiles:
    """For the sum over each group's rows of [left] by [columns]."""
    limits = tpu_limits(kind)

    def fits(t: Tiles) -> bool:
        twice = t.rows * (t.left + t.columns) + t.left * t.columns
        return 2 * item_bytes * twice + 4 * t.left * t.columns <= limits.tiles_bytes

    def seconds(t: Tiles) -> float:
        steps, down, across = _steps(m, e, t.rows), -(-left // t.left), -(-columns // t.columns)
        work = 2 * steps * t.rows * round_up(left, t.left) * round_up(columns, t.columns)
        read = steps * t.rows * (left * across + columns * down)
        return _seconds(limits, item_bytes, work, read + e * left * columns, steps * across * down)

    return _best(kind, m, item_bytes, (0,), _sizes(columns), _sizes(left), fits, seconds)


def gpu_tiles(kind: str, m: int, e: int, item_bytes: int) -> GpuTiles:
    """For M rows in E groups: few rows a group get low tiles."""
    tiles = GpuTiles()
    if item_bytes > 2:
        tiles = GpuTiles(inner=32, columns=64, rows_back=32, left_back=64, columns_back=64, stages=2)
    rows = tiles.rows
    while rows > 16 and rows // 2 >= m // e:
        rows //= 2
    tiles = dataclasses.replace(tiles, rows=rows, warps=4 if rows < 64 else tiles.warps)
    return dataclasses.replace(tiles, **tuned("grouped_matmul").get(kind, {}))


def _best(
    kind: str,
    m: int,
    item_bytes: int,
    inner: tuple[int, ...],
    columns: tuple[int, ...],
    left: tuple[int, ...],
    fits: Callable[[Tiles], bool],
    seconds: Callable[[Tiles], float],
) -> Tiles:
    most = MOST_PRODUCTS if item_bytes == 2 else MOST_PRODUCTS // 6  # a product of float32 is six of bfloat16
    rows = [r for r in (128, 256, 512, 1024) if r <= round_up(m, LANES)]
    options = [Tiles(*sizes) for sizes in itertools.product(rows, inner, columns, left)]
    options = [t for t in options if t.rows * max(t.inner, t.left) * t.columns <= most]
    best = min(filter(fits, options), key=seconds)
    return dataclasses.replace(best, **tuned("grouped_matmul").get(kind, {}))


def _sizes(n: int) -> tuple[int, ...]:
    """All of a dimension, or whole lanes of it."""
    return (*(size for size in (128, 256, 512, 1024, 2048, 4096) if size < n), n)


def _steps(m: int, e: int, rows: int) -> int:
    """Where groups end anywhere, each begins a tile more."""
    return -(-m // rows) + min(e, m)


def _seconds(limits: TpuLimits, item_bytes: int, work: float, items: float, steps: int) -> float:
    rate = limits.flops if item_bytes == 2 else limits.flops / 6
    return max(work / rate, items * item_bytes / limits.bandwidth) + steps * STEP_SECONDS
