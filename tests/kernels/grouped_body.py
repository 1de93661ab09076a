"""Shared test body of every implementation of the grouped matmul: cases, a loop over groups in float64, one check.

Legend: M rows, E groups, K columns of a row, N columns of the result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import interpreting
from pallas_kernels.grouped_matmul import config, grouped_matmul

PACKAGE = "pallas_kernels.grouped_matmul"
PALLAS = ("pallas_tpu", "pallas_gpu")
PLAIN = ("xla", "ragged_dot", "reference")
"""Implementations that run on any device, in any precision."""


class Case(NamedTuple):
    sizes: tuple[int, ...]
    left: int = 0  # rows after the last group
    k: int = 6
    n: int = 5


CASES = {
    "one row": Case((1,), k=1, n=1),
    "one group": Case((37,)),
    "all groups but one empty": Case((0, 1, 0)),
    "empty first, last and between": Case((0, 5, 0, 0, 9, 0), 3, 11, 13),
    "no multiple of anything": Case((1, 9, 3, 14, 2, 11), 0, 11, 13),
    "one group has all": Case((0, 0, 129, 0)),
    "many small": Case((1, 2, 1, 1, 3, 1, 0, 1, 2, 1), 1),
    "no group has a row": Case((0, 0, 0), 4),
    "whole tiles": Case((8, 16, 0), 8, 16, 8),
    "rows left over": Case((3, 12), 14, 9, 7),
}
"""GroupedTiles are of 8 rows and columns in ``small_pieces``."""

KILLERS = ("rows left over", "empty first, last and between", "no multiple of anything")
"""Cases that a mutant is tried on, until one fails; see tests/proofs/kernels/mutants.py."""

_SHARED = {
    "groups begin a row late": ("steps", "jnp.zeros_like(inner[:1]), inner", "jnp.ones_like(inner[:1]), inner"),
    "last tile of a group skipped": ("steps", "(stop - 1) // rows", "(stop - 2) // rows"),
    "another tile": ("steps", "tile.astype(jnp.int32), ends", "tile[::-1].astype(jnp.int32), ends"),
    "lhs from another gradient": ("steps", "kernels.outer(lhs, d_out", "kernels.outer(lhs * 1.01, d_out"),
}
MUTATIONS: dict[tuple[str, str], tuple[str, str, str]] = {
    ("xla", "reads beyond the group"): ("xla", "jnp.arange(size) < end", "jnp.arange(size) <= end"),
    ("xla", "dropped block"): ("xla", "(count + size - 1) // size", "count // size"),
    ("xla", "overwritten sum"): ("xla", "total.at[group].add", "total.at[group].set"),
    ("reference", "mask off by one"): ("reference", "(rows < ends)", "(rows <= ends)"),
    **{(name, what): edit for name in PALLAS for what, edit in _SHARED.items()},
    ("pallas_tpu", "mask off by one"): ("pallas_tpu", "at < ends[group + 1]", "at <= ends[group + 1]"),
    ("pallas_tpu", "another group's matrix"): ("pallas_tpu", "jnp.minimum(groups[step], e - 1)", "0 * groups[step]"),
    ("pallas_tpu", "not begun at zero"): ("pallas_tpu", "@pl.when(k == 0)", "@pl.when((k == 0) & (step == 0))"),
    ("pallas_tpu", "not added up"): ("pallas_tpu", "acc[...] += dot(a, b,", "acc[...] = dot(a, b,"),
    ("pallas_tpu", "beyond the end"): ("pallas_tpu", "if inner % tiles.inner:", "if False:"),
    ("pallas_tpu", "a tile's first group lost"): (
        "pallas_tpu",
        "before = jnp.where(first,",
        "before = jnp.where(True,",
    ),
    ("pallas_tpu", "empty groups dropped"): ("steps", "jnp.maximum(needed[:-1], 1)", "needed[:-1]"),
    ("pallas_tpu", "another's rows summed"): ("pallas_tpu", "whole = (begin <= start) &", "whole ="),
    ("pallas_gpu", "mask off by one"): ("pallas_gpu", "(at < end)", "(at <= end)"),
    ("pallas_gpu", "another group's matrix"): ("pallas_gpu", "own = jnp.minimum(group, e - 1)", "own = 0 * group"),
    ("pallas_gpu", "not added up"): ("pallas_gpu", "return acc + dot(a, b, (1, 1 if", "return dot(a, b, (1, 1 if"),
    ("pallas_gpu", "tail not zero"): ("pallas_gpu", "(live & (group < e))", "(live)"),
    ("pallas_gpu", "dropped block"): ("pallas_gpu", "(end - begin + size - 1) // size", "(end - begin) // size"),
    ("pallas_gpu", "another's rows summed"): ("pallas_gpu", "_from(start, size) < end", "_from(start, size) < end + 1"),
}
"""(implementation, mistake) -> (module of the package, text, text with the mistake)."""


@contextlib.contextmanager
def small_pieces() -> Iterator[None]:
    """GroupedTiles so small that few rows cross many of them."""
    from pallas_kernels.grouped_matmul import xla

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "MIN_BLOCK", 4)
        patch.setattr(config, "matmul_tiles", lambda *_: config.GroupedTiles(8, 8, 8))
        patch.setattr(config, "outer_tiles", lambda *_: config.GroupedTiles(8, 0, 8, 8))
        patch.setattr(config, "gpu_tiles", lambda *_: config.GroupedGpuTiles(8, 4, 8, 8, 8, 4, 4, 1, 2))
        yield


def draw(rng, case: Case, dtype=np.float64, dirty: bool = False):
    """lhs, rhs, gradient of the result, group sizes; ``dirty``: nan after the last group."""
    m = sum(case.sizes) + case.left
    shapes = (m, case.k), (len(case.sizes), case.k, case.n), (m, case.n)
    lhs, rhs, d_out = (rng.normal(size=s) for s in shapes)
    if dirty:
        lhs[sum(case.sizes) :], d_out[sum(case.sizes) :] = np.nan, np.nan
    return *(jnp.asarray(x, dtype) for x in (lhs, rhs, d_out)), jnp.asarray(case.sizes, jnp.int32)


def oracle(lhs, rhs, d_out, sizes):
    """(out, d_lhs, d_rhs), a group at a time, in float64."""
    lhs, rhs, d_out = (np.asarray(x, np.float64) for x in (lhs, rhs, d_out))
    out, d_lhs, d_rhs, begin = np.zeros(d_out.shape), np.zeros(lhs.shape), np.zeros(rhs.shape), 0
    for e, size in enumerate(np.asarray(sizes)):
        rows = slice(begin, begin := begin + size)
        out[rows], d_lhs[rows], d_rhs[e] = lhs[rows] @ rhs[e], d_out[rows] @ rhs[e].T, lhs[rows].T @ d_out[rows]
    return out, d_lhs, d_rhs


def program(implementation: str):
    """Compiled: (lhs, rhs, d_out, sizes) -> (out, d_lhs, d_rhs)."""

    @jax.jit
    def run(lhs, rhs, d_out, sizes):
        out, pull = jax.vjp(lambda a, b: grouped_matmul(a, b, sizes, implementation=implementation), lhs, rhs)
        return out, *pull(d_out)

    return run


def error(got, want) -> float:
    """||got - want|| / ||want||, of what is worst; absolute where nothing is to be."""
    each = [
        np.linalg.norm(np.asarray(g, np.float64) - w) / (np.linalg.norm(w) or 1.0)
        for g, w in zip(got, want, strict=True)
    ]
    return float(np.max(each))  # nan, if there is one


def check(
    implementation: str, case: Case, rng: np.random.Generator, dtype=np.float32, bound: float = 1e-6
) -> dict[str, float]:
    """Outputs and gradients, twice, against float64; Pallas kernels are interpreted.

    What is after the last group is nan, which must go nowhere.
    """
    arguments = draw(rng, case, dtype, dirty=implementation not in ("ragged_dot", "reference"))
    with interpreting() if implementation.startswith("pallas") else contextlib.nullcontext():
        run = program(implementation)
        got, again = (run(*arguments) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, got, again)
    assert all(x.dtype == dtype for x in got)
    want = oracle(*arguments)
    errors = {name: error([got[i]], [want[i]]) for i, name in enumerate(("out", "d_lhs", "d_rhs"))}
    assert all(e <= bound for e in errors.values()), errors
    return errors
