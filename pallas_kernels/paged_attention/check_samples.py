"""Samples on which the kernels of paged attention are compared with the reference before their first use."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels._self_check import Sample, normal
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.pages import PageFormat, PagePool
from pallas_kernels.paged_attention.tree_mask import TreeMask

MIXED = ((0, 70), (130, 1), (90, 33), (16, 0), (47, 1))
DECODE = ((0, 1), (130, 1), (15, 1), (300, 1))
TREES = ((60, 12), (90, 5), (33, 1))
"""Tokens that each request holds, and brings."""
COMMON = 5
"""Pages that requests of a sample have in common."""


def samples(dtype: DTypeLike) -> list[Sample]:
    """Prompts and single tokens in one step, with a window and a soft cap; then trees of draft tokens; then single
    tokens alone, with sinks, whose slots are read in parts; then some whose first pages are shared, in two phases.
    """
    return [
        _sample("mixed, window, soft cap", MIXED, dtype, window=60, softcap=20.0),
        _sample("trees", TREES, dtype, tree=True),
        _sample("one token each, sinks", DECODE, dtype, sinks=True, decode_only=True),
        _sample("shared pages", DECODE, dtype, common=(1, 3), sinks=True, decode_only=True),
    ]


def _sample(
    label: str,
    requests: tuple[tuple[int, int], ...],
    dtype: DTypeLike,
    sinks: bool = False,
    tree: bool = False,
    common: tuple[int, ...] = (),
    **options: Any,
) -> Sample:
    heads, kv_heads, dim, page = 8, 2, 64, 16
    held, new = (np.array(x, np.int32) for x in zip(*requests, strict=True))
    lengths, starts = held + new, np.append(0, np.cumsum(new)).astype(np.int32)
    needed = -(-lengths // page)
    pages = np.random.default_rng(0).permutation(int(needed.sum())).astype(np.int32)
    table = np.zeros((len(requests), int(needed.max())), np.int32)
    for r, end in enumerate(np.cumsum(needed)):
        table[r, : needed[r]] = pages[end - needed[r] : end]
    shared = np.isin(np.arange(len(requests)), common) * COMMON if common else None
    for r in common:
        table[r, :COMMON] = table[common[0], :COMMON]
    format = PageFormat(kv_heads, dim, dim, multiple=128)
    pool = PagePool.zeros(format, layers=1, pages=len(pages), page_size=page, dtype=dtype)
    slots = normal(1, *pool.rows.shape, dtype=dtype)
    tokens = int(starts[-1])
    q, k, v = (normal(2 + i, tokens, n, dim, dtype=dtype) for i, n in enumerate((heads, kv_heads, kv_heads)))

    def run(name: str, q: Any, k: Any, v: Any, rows: Any, sinks: Any, hidden: Any, *ints: Any, **options: Any) -> Any:
        pool = PagePool(rows, format)
        if hidden is not None:
            options["tree"] = TreeMask(hidden, ints[2] - (ints[1][1:] - ints[1][:-1]))
        table, starts, lens, shared = ints
        out, after = paged_attention(
            q, k, v, pool, 0, table, starts, lens, sinks=sinks, shared=shared, implementation=name, **options
        )
        return out, after.rows

    ints = (None if x is None else jnp.asarray(x, jnp.int32) for x in (table, starts, lengths, shared))
    sink = normal(5, heads, dtype=dtype) if sinks else None
    return Sample(
        label, functools.partial(run, **options), (q, k, v, slots, sink, _two_branches(starts) if tree else None, *ints)
    )


def _two_branches(starts: np.ndarray) -> Any:
    """Words of a tree mask: the even tokens of a request's step are a branch, and so are the odd ones."""
    row = np.concatenate([np.arange(end - start) for start, end in itertools.pairwise(starts)])
    return jnp.asarray([[sum(1 << j for j in range(int(i)) if (i - j) % 2)] for i in row], jnp.int32)
