"""Tile schedule of the grouped low-rank matmul: which pages of factors each tile of rows is multiplied with.

The factors of all adapters are in pages of ``PAGE_RANKS`` ranks (the unified paging of S-LoRA, arXiv:2311.03285), so an
adapter of rank r takes ceil(r / PAGE_RANKS) pages and no row is multiplied with the padding of a larger rank. A step is
one tile of rows with one page that some of its rows use. The schedule depends on the rows' adapters alone: all matmuls
of a forward pass share it.

Legend: M rows, S slots (adapters on the device), J pages of the largest adapter, T tiles, W = S * J + 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

PAGE_RANKS = 16
"""Ranks of a page: the shortest side that matrix units of TPUs (bfloat16) and GPUs multiply."""
TILE_ROWS = 64
"""Rows of a tile, at most."""


class AdapterTiles(NamedTuple):
    """Adapter of each row of a batch, and the steps in which the rows are multiplied; see ``schedule_tiles``.

    Attributes:
        slots: slot of each row's adapter; -1 for none.
        tables: pages of each slot's adapter in the order of its ranks; -1 after the last.
        scales: factor on each adapter's result.
        steps: tile, slot and column of each step, as an index into [T, W]; the last of a tile's W is the one step of a
            tile none of whose rows has an adapter. In order; those after the last are out of range.
        first: number of the first step of each tile, and of all steps.
    """

    slots: Int[Array, " M"]
    tables: Int[Array, "S J"]
    scales: Float[Array, " S"]
    steps: Int[Array, " steps"]
    first: Int[Array, " T+1"]


def tile_rows(rows: int) -> int:
    """Rows of a tile of a batch: a multiple of 16, at most ``TILE_ROWS``."""
    return min(TILE_ROWS, -(-rows // 16) * 16)


def schedule_tiles(slots: Int[Array, " M"], tables: Int[Array, "S J"], scales: Float[Array, " S"]) -> AdapterTiles:
    """Tile schedule of rows whose adapters are in these slots.

    Args:
        slots: slot of each row's adapter; -1 for none.
        tables: pages of each slot; -1 after the last.
        scales: factor on each slot's result.
    """
    size, (count, columns) = tile_rows(slots.shape[0]), tables.shape
    tiles = -(-slots.shape[0] // size)
    padded = jnp.pad(slots, (0, tiles * size - slots.shape[0]), constant_values=-1).reshape(tiles, size)
    used = jnp.any(padded[:, :, None] == jnp.arange(count, dtype=slots.dtype), axis=1)  # T S
    needed = (used[:, :, None] & (tables >= 0)).reshape(tiles, count * columns)
    needed = jnp.concatenate([needed, ~jnp.any(needed, axis=1, keepdims=True)], axis=1)  # T W
    most = tiles * max(1, min(size, count) * columns)
    (steps,) = jnp.nonzero(needed.reshape(-1), size=most, fill_value=needed.size)
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(jnp.sum(needed, axis=1, dtype=jnp.int32))])
    return AdapterTiles(slots, tables, scales, steps.astype(jnp.int32), first.astype(jnp.int32))


def parts_of_step(step: Any, slots: int, columns: int) -> tuple[Any, Any, Any]:
    """Tile, slot and column of a step; the slot is ``slots`` where no row of the tile has an adapter."""
    width = slots * columns + 1
    rest = step % width
    return step // width, rest // columns, rest % columns
