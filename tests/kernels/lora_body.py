"""Shared test body of every implementation of the grouped low-rank matmul: cases, a loop over rows in float64, a check.

Legend: M rows, S slots, J pages of the largest adapter, P pages, R ranks of a page, K and N columns.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import interpreting
from pallas_kernels.grouped_lora import PAGE_RANKS, AdapterTiles, grouped_lora

PACKAGE = "pallas_kernels.grouped_lora"
PALLAS = ("pallas_tpu", "pallas_gpu")
PLAIN = ("xla", "reference")
"""Implementations that run on any device, in any precision."""


class Case(NamedTuple):
    ranks: tuple[int, ...]  # of each slot's adapter; 0: the slot is free
    rows: tuple[int, ...]  # slot of each row; -1: none
    k: int = 24
    n: int = 20


def _drawn(seed: int, slots: int, rows: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(-1, slots, rows).tolist())


CASES = {
    "one row": Case((4,), (0,), 1, 1),
    "no row has an adapter": Case((4, 0), (-1,) * 5),
    "one adapter": Case((33,), (0,) * 19, 40, 136),
    "mixed ranks": Case((4, 64, 16, 0, 17), (0, 1, -1, 2, 4, 4, -1, 0, 1, 1, 2), 70, 150),
    "a tile without adapters between two": Case((8, 20), (*_drawn(1, 2, 64), *(-1,) * 64, *_drawn(2, 2, 30))),
    "a row for each adapter": Case((4, 33, 8, 20, 5, 16, 17, 3, 9, 12, 40, 6), (7, 3, *range(12), -1, 5), 30, 50),
    "largest rank": Case((256, 4), _drawn(3, 2, 70)),
    "no multiple of anything": Case((5, 31, 48), _drawn(4, 3, 131), 67, 201),
}
KILLERS = (
    "no multiple of anything", "a tile without adapters between two", "mixed ranks", "a row for each adapter"
)  # fmt: skip
_SHARED = {
    "another tile": ("adapter_tiles", "return step // width,", "return 0 * step,"),
    "pages of the first rank only": ("adapter_tiles", "rest // columns, rest % columns", "rest // columns, 0 * rest"),
    "a slot unused where its first row is elsewhere": ("adapter_tiles", "axis=1)  # T S", "axis=1) & False  # T S"),
}
MUTATIONS: dict[tuple[str, str], tuple[str, str, str]] = {
    **{(name, what): edit for name in ("xla", *PALLAS) for what, edit in _SHARED.items() if what != "another tile"},
    ("xla", "not added up"): ("xla", "before + more", "more"),
    ("xla", "rows of others"): ("xla", "jnp.where(own[:, None], more *", "jnp.where(True, more *"),
    ("xla", "scale of another"): ("xla", "more * rows.scales[slot]", "more * rows.scales[0]"),
    ("xla", "row by row, not added up"): ("xla", "return out + jnp.where((page", "return jnp.where((page"),
    ("xla", "row by row, last column dropped"): (
        "xla",
        "jnp.max(jnp.sum(pages >= 0, axis=1)), one",
        "jnp.max(jnp.sum(pages >= 0, axis=1)) - 1, one",
    ),
    ("xla", "row by row, pages of no adapter"): ("xla", "jnp.where((page >= 0)[:, None], more, 0)", "more"),
    ("xla", "row by row, one row's scale"): ("xla", "rows.scales[rows.slots].astype(dtype)[:, None]", "rows.scales[0]"),
    ("xla", "last step dropped"): ("xla", "0, rows.first[-1], one", "0, rows.first[-1] - 1, one"),
    ("reference", "scale of another"): ("reference", "rows.scales[slot]", "rows.scales[0 * slot]"),
    ("reference", "pages of no adapter"): ("reference", "jnp.where(own, factor", "jnp.where(True, factor"),
    ("pallas_tpu", "rows of others"): ("pallas_tpu", "jnp.where(own[...] == slot, inner, 0.0)", "inner"),
    ("pallas_tpu", "not begun at zero"): ("pallas_tpu", "@pl.when((i == 0) |", "@pl.when((i == 0) & "),
    ("pallas_tpu", "not added up"): ("pallas_tpu", "acc[...] += dot(inner", "acc[...] = dot(inner"),
    ("pallas_tpu", "scale of another"): ("pallas_tpu", "* scales[jnp.minimum(slot, slots - 1)]", "* scales[0]"),
    ("pallas_tpu", "another page"): ("pallas_tpu", "slots - 1) * columns + column]", "slots - 1) * columns]"),
    ("pallas_tpu", "grid ends early"): ("pallas_tpu", "grid=(rows.first[-1],)", "grid=(rows.first[-1] - 1,)"),
    ("pallas_gpu", "scale of another"): ("pallas_gpu", "acc * scales[slot]", "acc * scales[0]"),
    ("pallas_gpu", "another page"): ("pallas_gpu", "tables[slot * columns + column]", "tables[slot * columns]"),
    ("pallas_gpu", "rows of others"): ("pallas_gpu", "== slot) & some)[:, None]", "> -2) & some)[:, None]"),
    ("pallas_gpu", "not added up"): ("pallas_gpu", "return acc + dot(left", "return dot(left"),
    ("pallas_gpu", "last page dropped"): (
        "pallas_gpu",
        "first[tile], first[tile + 1],",
        "first[tile], first[tile + 1] - 1,",
    ),
    ("pallas_gpu", "tail of the inner dimension"): ("pallas_gpu", "* -(-k // INNER)", "* (k // INNER)"),
}
"""(implementation, mistake) -> (module of the package, text, text with the mistake)."""
for _name in PALLAS:
    MUTATIONS[_name, "another tile"] = _SHARED["another tile"]
MUTATIONS["xla", "another tile"] = _SHARED["another tile"]


@contextlib.contextmanager
def small_pieces() -> Iterator[None]:
    """Tiles of 16 rows, so that few rows cross many of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module(f"{PACKAGE}.adapter_tiles"), "TILE_ROWS", 16)
        yield


def draw(rng: np.random.Generator, case: Case, dtype=np.float64, dirty: bool = False):
    """x, a, b, and the schedule; ``dirty``: nan in rows without adapter and in pages of none."""
    pages = [-(-rank // PAGE_RANKS) for rank in case.ranks]
    count = sum(pages) + 2
    order = iter(rng.permutation(count).tolist())
    tables = np.full((len(case.ranks), max(pages)), -1, np.int32)
    fill = np.nan if dirty else 0.0
    a, b = np.full((count, PAGE_RANKS, case.k), fill), np.full((count, PAGE_RANKS, case.n), fill)
    for slot, rank in enumerate(case.ranks):
        for column in range(pages[slot]):
            page, own = next(order), min(PAGE_RANKS, rank - column * PAGE_RANKS)
            tables[slot, column] = page
            for factor in (a, b):
                factor[page] = 0
                factor[page, :own] = rng.normal(size=(own, factor.shape[2]))
    x = rng.normal(size=(len(case.rows), case.k))
    if dirty:
        x[np.asarray(case.rows) < 0] = np.nan
    scales = jnp.asarray(rng.uniform(0.5, 4, len(case.ranks)), jnp.promote_types(dtype, jnp.float32))
    # Of the module as it is now, which may have a mistake.
    schedule = importlib.import_module(f"{PACKAGE}.adapter_tiles").schedule_tiles
    rows = AdapterTiles(*schedule(jnp.asarray(case.rows, jnp.int32), jnp.asarray(tables), scales))
    return *(jnp.asarray(value, dtype) for value in (x, a, b)), rows


def oracle(x, a, b, rows: AdapterTiles) -> np.ndarray:
    """Row by row with whole factors, in float64."""
    x, a, b, scales = (np.asarray(value, np.float64) for value in (x, a, b, rows.scales))
    out = np.zeros((x.shape[0], b.shape[2]))
    for m, slot in enumerate(np.asarray(rows.slots)):
        own = [page for page in np.asarray(rows.tables)[slot] if page >= 0] if slot >= 0 else []
        if own:
            left, right = (np.concatenate([factor[page] for page in own]) for factor in (a, b))
            out[m] = scales[slot] * (x[m] @ left.T) @ right
    return out


def program(implementation: str):
    """Compiled product."""
    return jax.jit(lambda x, a, b, rows: grouped_lora(x, a, b, rows, implementation=implementation))


def error(got, want) -> float:
    """||got - want|| / ||want||; absolute where nothing is to be."""
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / (np.linalg.norm(want) or 1.0))


def check(implementation: str, case: Case, rng: np.random.Generator, dtype=np.float32, bound: float = 1e-6) -> float:
    """Result, twice, against float64; Pallas kernels are interpreted. What no adapter has is nan and goes nowhere."""
    arguments = draw(rng, case, dtype, dirty=True)
    with interpreting() if implementation.startswith("pallas") else contextlib.nullcontext():
        run = program(implementation)
        got, again = (np.asarray(run(*arguments)) for _ in range(2))
    np.testing.assert_array_equal(got, again)
    assert got.dtype == dtype
    assert not np.any(got[np.asarray(case.rows) < 0])  # rows without adapter: exactly nothing
    worst = error(got, oracle(*arguments))
    assert worst <= bound, worst
    return worst
