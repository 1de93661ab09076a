"""Unit pools: the page pools of one unit of layers, whose rows are those of its layers alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from jaxtyping import Array, Int

from jaxllm.infer.runner.paged_cache import LayerGroup, PagedCache
from jaxllm.infer.runner.step.step_shape import StepShape
from jaxllm.models.attention_context import LayerIndex


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class UnitCache(PagedCache):
    """Paged KV cache of a step in one unit of layers.

    Attributes:
        pools: of the unit's layers in each group, of which there may be none.
        rows: of each layer of the model: its row in the pools of its unit.
    """

    rows: tuple[int, ...] = field(default=(), metadata={"static": True})

    @classmethod
    def of(cls, cache: PagedCache, rows: tuple[int, ...]) -> UnitCache:
        """A cache whose pools are those of a unit."""
        return cls(**{one.name: getattr(cache, one.name) for one in dataclasses.fields(cache)}, rows=rows)

    def _place(self, group: LayerGroup, layer: LayerIndex) -> Int[Array, ""]:
        return jax.numpy.asarray(np.asarray(self.rows, np.int32))[layer]


def unit_groups(groups: Sequence[LayerGroup], first: int, layers: int) -> tuple[LayerGroup, ...]:
    """Layer groups with those of their layers that are in a unit.

    Args:
        groups: of the model.
        first, layers: first layer of the unit, and how many it has.
    """
    own = range(first, first + layers)
    return tuple(dataclasses.replace(g, layers=tuple(n for n in g.layers if n in own)) for g in groups)


def rows_in_units(groups: Sequence[LayerGroup], units: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Row of each layer in the pools of its unit.

    Args:
        groups: of the model.
        units: first layer and number of layers of each unit.
    """
    rows = dict[int, int]()
    for first, layers in units:
        for group in unit_groups(groups, first, layers):
            rows |= {layer: row for row, layer in enumerate(group.layers)}
    return tuple(rows[layer] for layer in range(len(rows)))


def written_pages(
    shape: StepShape, packed: Int[np.ndarray, " elements"], page_size: int
) -> list[Int[np.ndarray, " M"]]:
    """Pages of each page table that a step writes to: those of its tokens, and those that it copies to.

    Args:
        shape, packed: of the step, and its inputs.
        page_size: positions of a page.
    """
    x = shape.inputs.views(packed)
    found = list[Int[np.ndarray, " M"]]()
    for group in range(shape.groups):
        pages = x["copies"][group, : int(x["copied"][group]), 1].tolist()
        for request, kv_len in enumerate(x["kv_lens"].tolist()):
            rows = int(x["starts"][request + 1] - x["starts"][request])
            if rows:
                columns = slice((kv_len - rows) // page_size, (kv_len - 1) // page_size + 1)
                pages += x["tables"][group, request, columns].tolist()
        found.append(np.unique(np.asarray(pages, np.int32)))
    return found


def most_written(shape: StepShape, page_size: int, pages: int) -> int:
    """Most pages of a pool that a step of a shape writes to, see ``written_pages``.

    n rows of a request are on no more than n pages, and on no more than n / C + 2 pages of C positions; a request has
    no more than one copy.
    """
    return min(pages, min(shape.tokens, shape.tokens // page_size + 2 * shape.requests) + shape.requests)
