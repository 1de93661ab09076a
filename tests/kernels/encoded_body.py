"""Test body of kernels over pages that are encoded as a whole (KIVI): histories of steps, against the reference.

Legend: N query heads, K kv heads, H head dim of keys, V of values, T tokens.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._compat import interpreting
from pallas_kernels.paged_attention import PageFormat, PagePool, paged_attention
from pallas_kernels.paged_attention.residual_window import Residual
from tests.kernels import paged_body, races

LAYERS, LAYER, PAGE, REQUESTS, ROWS = 2, 1, 32, 3, 48


class History(NamedTuple):
    """What requests bring, step by step.

    Attributes:
        encoding: name of a row of ``KV_FORMATS`` with a residual window.
        n, k, h, v: N, K, H, V.
        steps: tokens of each request in each step; the last steps have no more than one of each.
        window, softcap, sinks: see ``paged_attention``.
    """

    encoding: str
    n: int = 4
    k: int = 2
    h: int = 8
    v: int = 8
    steps: tuple[tuple[int, ...], ...] = ((40, 3, 0), (35, 1, 0), (1, 40, 7), (20, 20, 1), (1, 1, 1), (1, 0, 1))
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


def drawn(rng: np.random.Generator, encoding: str, per: int) -> History:
    """Any history; ``per`` divides the head dims."""
    k = int(rng.integers(1, 3))
    steps = [tuple(int(x) for x in rng.choice([0, 1, 3, 13, 40], 3, p=[0.2, 0.2, 0.1, 0.2, 0.3])) for _ in range(5)]
    steps = [tuple(min(x, ROWS - sum(own[:i])) for i, x in enumerate(own)) for own in steps]
    return History(
        encoding, k * int(rng.integers(1, 4)), k, per * int(rng.integers(1, 5)), per * int(rng.integers(1, 5)),
        (*steps, (1, 1, 0), (1, 1, 1)), None if rng.random() < 0.6 else int(rng.integers(1, 90)),
        None if rng.random() < 0.6 else 0.7, bool(rng.random() < 0.4),
    )  # fmt: skip


def check(implementation: str, history: History, rng: np.random.Generator) -> float:
    """Each step by the kernel, interpreted, and by the reference: values, and every bit of pages and ring buffers.

    Returns the largest error.
    """
    form = PageFormat(history.k, history.h, history.v, encoding=history.encoding, multiple=4)
    lengths, columns = np.zeros(REQUESTS, np.int32), 6
    pages = rng.permutation(REQUESTS * columns + 2)
    table = pages[: REQUESTS * columns].reshape(REQUESTS, columns).astype(np.int32)
    pool = PagePool.zeros(
        form, layers=LAYERS, pages=len(pages), page_size=PAGE, dtype=np.float32, sequences=REQUESTS
    )  # fmt: skip
    garbage = pool.slots._replace(
        data=jnp.full_like(pool.rows, 255), scales=jnp.full_like(pool.scales, -1),
        channels=jnp.full_like(pool.channels, -1), recent=jnp.full_like(pool.recent, np.nan),
    )  # fmt: skip
    pool = PagePool(garbage.data, form, *garbage[1:])
    rings = Residual(jnp.asarray([2, 0, 1], jnp.int32), jnp.zeros(REQUESTS, jnp.int32))
    sinks = jnp.asarray(rng.normal(size=history.n), jnp.float32) if history.sinks else None

    def program(name: str, decode_only: bool) -> Any:
        def run(pool: PagePool, q: Any, k: Any, v: Any, table: Any, starts: Any, lens: Any) -> Any:
            return paged_attention(
                q, k, v, pool, LAYER, table, starts, lens, sinks=sinks, window=history.window,
                softcap=history.softcap, residual=rings, decode_only=decode_only, implementation=name,
            )  # fmt: skip

        return jax.jit(run)

    programs = {(name, way): program(name, way) for name in ("reference", implementation) for way in (False, True)}
    worst = 0.0
    for step in history.steps:
        counts, decode = np.asarray(step, np.int32), max(step) <= 1
        lengths = np.minimum(lengths + counts, PAGE * columns)
        rows, starts = REQUESTS if decode else ROWS, np.append(0, np.cumsum(counts)).astype(np.int32)
        q, k, v = (
            np.where(np.arange(rows)[:, None, None] < starts[-1], rng.normal(size=(rows, *x)), np.nan)
            for x in ((history.n, history.h), (history.k, history.h), (history.k, history.v))
        )
        given = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
        want, after = jax.device_get(programs["reference", decode](pool, *given, table, starts, lengths))
        raced = races.none_found() if implementation == "pallas_tpu" else contextlib.nullcontext()
        with interpreting(), raced:
            found, pool = programs[implementation, decode](pool, *given, table, starts, lengths)
            got, held = jax.device_get((found, pool))
        np.testing.assert_array_equal(got[starts[-1] :], 0)
        worst = max(worst, paged_body.error(got, want))
        for one, other in zip(jax.tree.leaves(held), jax.tree.leaves(after), strict=True):
            np.testing.assert_array_equal(paged_body.bits(one), paged_body.bits(other))
    return worst
