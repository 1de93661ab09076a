"""Paged attention under a retention rule: entries leave and are moved, each kv head by itself.

Everything that must not be read is nan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import PageFormat, PagePool, paged_attention
from pallas_kernels.paged_attention.retention import Retention, RetentionRule
from tests.kernels import paged_body

LAYERS, LAYER, PAGE, COLUMNS, N, K, H = 2, 1, 4, 6, 4, 2, 4
implementations = pytest.mark.parametrize("implementation", paged_body.PLAIN)


@dataclass(frozen=True)
class SinksAndRecent:
    """Keeps the first tokens and the most recent ones."""

    sinks: int
    recent: int

    def keep(self, entries: Any, query: Any) -> Any:
        return (entries < self.sinks) | (entries > query - self.recent)

    def capacity(self, length: int) -> int:
        return min(length, self.sinks + self.recent - 1)


RULE = SinksAndRecent(2, 5)


def empty(pages: int, encoding: str = "plain") -> PagePool:
    """A pool of garbage without a token."""
    form = PageFormat(K, H, H, encoding=encoding)
    pool = PagePool.zeros(
        form, layers=LAYERS, pages=pages, page_size=PAGE, dtype=jnp.float64, positions=True
    )  # fmt: skip
    return PagePool(jnp.full_like(pool.rows, jnp.nan), form, None, pool.positions)


def program(implementation: str) -> Any:
    @jax.jit
    def run(pool, q, k, v, table, starts, lens, columns):
        retention = Retention(RULE, columns)
        return paged_attention(
            q, k, v, pool, LAYER, table, starts, lens, retention=retention, implementation=implementation
        )

    return run


def oracle(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """One query and head at a time over a whole sequence."""
    out = np.zeros((len(q), N, H))
    for t in range(len(q)):
        seen = [e for e in range(t + 1) if RULE.keep(np.array(e), t)]
        for n in range(N):
            scores = k[seen, n // (N // K)] @ q[t, n] / np.sqrt(H)
            weights = np.exp(scores - scores.max())
            out[t, n] = weights @ v[seen, n // (N // K)] / weights.sum()
    return out


def shuffled(pool: PagePool, pages: list[int], rng: np.random.Generator) -> PagePool:
    """The same entries in other slots of the same pages, in another order for each kv head."""
    rows, positions = np.array(pool.rows), np.array(pool.positions)
    for head in range(K):
        order = rng.permutation(len(pages) * PAGE)
        for array, axis in ((rows, 0), (positions, 1)):
            held = array[LAYER, pages, head]
            flat = np.moveaxis(held, 1 + axis, 1).reshape(len(pages) * PAGE, -1)[order]
            array[LAYER, pages, head] = np.moveaxis(
                flat.reshape(len(pages), PAGE, *np.delete(held.shape[1:], axis)), 1, 1 + axis
            )
    return PagePool(jnp.asarray(rows), pool.format, None, jnp.asarray(positions))


@pytest.mark.drawn(0.3)
@implementations
def test_entries_leave_and_move(implementation, rng, float64):
    """Two requests in chunks of any lengths: as the rule says, in few pages, wherever their entries have been moved."""
    assert isinstance(RULE, RetentionRule)
    run, length = program(implementation), 23
    q, k, v = (rng.normal(size=(2, length, heads, H)) for heads in (N, K, K))
    want = [oracle(*(x[r] for x in (q, k, v))) for r in range(2)]
    pool, done, columns = empty(9), [0, 0], [0, 0]
    pages = rng.permutation(9)
    own = [list(pages[:4]), list(pages[4:8])]
    most = 0
    while min(done) < length:
        counts = [int(min(rng.integers(0, 6), length - at)) for at in done]
        most = max(most, *(RULE.capacity(at) + n for at, n in zip(done, counts, strict=True)))
        columns = [max(c, -(-(RULE.capacity(at) + n) // PAGE)) for c, at, n in zip(columns, done, counts, strict=True)]
        table = np.full((2, COLUMNS), 99, np.int32)
        for r in range(2):
            table[r, : columns[r]] = own[r][: columns[r]]
        rows = [slice(at, at + n) for at, n in zip(done, counts, strict=True)]
        flat = [np.concatenate([x[0, rows[0]], x[1, rows[1]], np.full((1, *x.shape[2:]), np.nan)]) for x in (q, k, v)]
        padding = 11 - len(flat[0])
        flat = [np.pad(x, ((0, padding), (0, 0), (0, 0)), constant_values=np.nan) for x in flat]
        starts = np.cumsum([0, *counts]).astype(np.int32)
        lens = np.asarray([at + n for at, n in zip(done, counts, strict=True)], np.int32)
        out, pool = run(pool, *map(jnp.asarray, flat), table, starts, lens, np.asarray(columns, np.int32))
        for r in range(2):
            np.testing.assert_allclose(out[starts[r] : starts[r + 1]], want[r][rows[r]], atol=1e-12)
        np.testing.assert_array_equal(out[starts[2] :], 0)
        done = [at + n for at, n in zip(done, counts, strict=True)]
        for r in range(2):
            held = np.asarray(pool.positions)[LAYER][own[r][: columns[r]]]
            for head in range(K):
                there = held[:, head].reshape(-1)
                there = sorted(there[there >= 0])
                assert len(set(there)) == len(there) <= columns[r] * PAGE
                assert set(there) >= {e for e in range(done[r]) if RULE.keep(np.array(e), done[r])}
        for r in filter(lambda r: columns[r], range(2)):
            pool = shuffled(pool, own[r][: columns[r]], rng)
    assert most <= 12
    assert max(columns) <= 3, "pages of 4 for the 6 tokens that are kept and those of a chunk"
    # The other layer, and the page of nobody, are as they were.
    assert (np.asarray(pool.positions)[1 - LAYER] == -1).all()
    assert (np.asarray(pool.positions)[:, pages[8]] == -1).all()


@pytest.mark.drawn(0.3)
@implementations
def test_refused_tokens_leave(implementation, rng, float64):
    """A chunk that begins before the last one ended: what was written from there on is not seen again."""
    run = program(implementation)
    q, k, v = (rng.normal(size=(6, heads, H)) for heads in (N, K, K))
    table, columns = np.arange(2, dtype=np.int32)[None], np.asarray([2], np.int32)

    def step(pool, rows: slice, values: np.ndarray, length: int):
        padded = [np.pad(x[rows], ((0, 6 - len(x[rows])), (0, 0), (0, 0))) for x in (q, k, values)]
        starts = np.asarray([0, rows.stop - rows.start], np.int32)
        return run(pool, *map(jnp.asarray, padded), table, starts, np.asarray([length], np.int32), columns)

    _, pool = step(empty(2), slice(0, 5), np.where(np.arange(6)[:, None, None] < 3, v, 1e6), 5)
    out, pool = step(pool, slice(3, 6), v, 6)
    np.testing.assert_allclose(out[:3], oracle(q, k, v)[3:], atol=1e-12)


def test_a_rule_and_positions_belong_together(rng, float64):
    pool = empty(2)
    q, k, v = (jnp.asarray(rng.normal(size=(1, heads, H))) for heads in (N, K, K))
    ints = [jnp.asarray(x, jnp.int32) for x in ([[0]], [0, 1], [1])]
    with pytest.raises(ValueError, match="a retention rule and a pool with positions belong together"):
        paged_attention(q, k, v, pool, LAYER, *ints)
    retention, plain = Retention(RULE, jnp.ones(1, jnp.int32)), PagePool(pool.rows, pool.format)
    with pytest.raises(ValueError, match="belong together"):
        paged_attention(q, k, v, plain, LAYER, *ints, retention=retention)
    for kernel in ("pallas_tpu", "pallas_gpu"):
        with pytest.raises(NotImplementedError, match="not under a retention rule; implementation 'xla' does"):
            paged_attention(q, k, v, pool, LAYER, *ints, retention=retention, implementation=kernel)
