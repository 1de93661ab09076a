"""Paged attention over pages that are encoded as a whole, behind a window of tokens in full precision (KIVI)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import PageFormat, PagePool, Slots, paged_attention
from pallas_kernels.paged_attention.channel_formats import KiviFormat
from pallas_kernels.paged_attention.kv_formats import KV_FORMATS
from pallas_kernels.paged_attention.residual_window import Residual
from tests.kernels import paged_body

LAYERS, LAYER, PAGE, COLUMNS, N, K, H, RESIDUAL = 2, 1, 4, 8, 4, 2, 8, 6
implementations = pytest.mark.parametrize("implementation", paged_body.PLAIN)


@pytest.fixture
def form(monkeypatch) -> PageFormat:
    """A format with a short window."""
    monkeypatch.setitem(KV_FORMATS, "short", KiviFormat(2, RESIDUAL))
    return PageFormat(K, H, H, encoding="short")


def empty(form: PageFormat, pages: int, sequences: int) -> PagePool:
    """A pool of garbage."""
    pool = PagePool.zeros(
        form, layers=LAYERS, pages=pages, page_size=PAGE, dtype=jnp.float64, sequences=sequences
    )  # fmt: skip
    return PagePool(
        jnp.full_like(pool.rows, 255), form, jnp.full_like(pool.scales, -1), None, jnp.full_like(pool.channels, -1),
        jnp.full_like(pool.recent, jnp.nan),
    )  # fmt: skip


def program(implementation: str, window: int | None = None) -> Any:
    @jax.jit
    def run(pool, q, k, v, table, starts, lens, slots, found):
        return paged_attention(
            q, k, v, pool, LAYER, table, starts, lens, residual=Residual(slots, found), window=window,
            implementation=implementation,
        )  # fmt: skip

    return run


def rounded(form: PageFormat, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values as pages hold them, one page after the other."""
    rows = np.concatenate([k, v], axis=-1)
    rows = np.pad(rows, ((0, -len(rows) % PAGE), (0, 0), (0, 0))).reshape(-1, PAGE, K, 2 * H).swapaxes(1, 2)
    page = form.kv_format.encode_page(jnp.asarray(rows), form.value_parts)  # pyright: ignore[reportAttributeAccessIssue]
    held = np.asarray(form.unpack(Slots(**page), "float64")).swapaxes(1, 2).reshape(-1, K, 2 * H)
    return held[..., :H], held[..., H:]


def oracle(form: PageFormat, q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None, found: int) -> np.ndarray:
    """One query and head at a time over a whole sequence."""
    out, (kept_k, kept_v) = np.zeros((len(q), N, H)), rounded(form, k, v)
    for t in range(len(q)):
        encoded = max((t + 1 - RESIDUAL) // PAGE * PAGE, found, 0)
        keys, values = (np.concatenate([a[:encoded], b[encoded : t + 1]]) for a, b in ((kept_k, k), (kept_v, v)))
        seen = slice(0 if window is None else max(0, t - window + 1), t + 1)
        for n in range(N):
            scores = keys[seen, n // (N // K)] @ q[t, n] / np.sqrt(H)
            weights = np.exp(scores - scores.max())
            out[t, n] = weights @ values[seen, n // (N // K)] / weights.sum()
    return out


@pytest.mark.drawn(0.5)
@implementations
@pytest.mark.parametrize("window", [None, 5, 13])
def test_equal_for_all_chunks(implementation, window, form, rng, float64):
    """Two requests in chunks of any lengths: what a query reads depends on its position alone."""
    run, length, pages = program(implementation, window), 29, rng.permutation(16)
    q, k, v = (rng.normal(size=(2, length, heads, H)) for heads in (N, K, K))
    want = [oracle(form, q[r], k[r], v[r], window, 0) for r in range(2)]
    pool, done, slots = empty(form, 16, 3), [0, 0], np.array([2, 0], np.int32)
    table = pages.reshape(2, COLUMNS).astype(np.int32)
    while min(done) < length:
        counts = [int(min(rng.choice([0, 1, 3, 11]), length - at)) for at in done]
        rows = [slice(at, at + n) for at, n in zip(done, counts, strict=True)]
        flat = [np.concatenate([x[0, rows[0]], x[1, rows[1]]]) for x in (q, k, v)]
        flat = [np.pad(x, ((0, 23 - len(x)), (0, 0), (0, 0)), constant_values=np.nan) for x in flat]
        starts = np.cumsum([0, *counts]).astype(np.int32)
        lens = np.asarray([at + n for at, n in zip(done, counts, strict=True)], np.int32)
        seen = table
        if window is not None:  # pages behind the window are somebody else's by now
            behind = np.maximum(np.asarray(done) - window + 1, 0) // PAGE
            seen = np.where(np.arange(COLUMNS) < behind[:, None], table[::-1], table)
        out, pool = run(pool, *map(jnp.asarray, flat), seen, starts, lens, slots, np.zeros(2, np.int32))
        for r in range(2):
            np.testing.assert_allclose(out[starts[r] : starts[r + 1]], want[r][rows[r]], atol=1e-12)
        np.testing.assert_array_equal(out[starts[2] :], 0)
        done = lens.tolist()


@pytest.mark.drawn(1)
@implementations
def test_found_pages_are_read_as_they_are(implementation, form, rng, float64):
    """A request goes on after two pages of another: those are encoded for it, though its window would reach them."""
    run, length, found = program(implementation), 26, 8
    q, k, v = (rng.normal(size=(length, heads, H)) for heads in (N, K, K))
    table = np.arange(2 * COLUMNS, dtype=np.int32).reshape(2, COLUMNS)
    table[1, :2] = table[0, :2]
    pool, none = empty(form, 16, 2), np.zeros(1, np.int32)
    ints = lambda *x: np.asarray(x, np.int32)  # noqa: E731
    _, pool = run(pool, q, k, v, table[:1], ints(0, length), ints(length), none, none)
    rest = [x[found : found + 3] for x in (q, k, v)]
    out, _ = run(pool, *rest, table[1:], ints(0, 3), ints(found + 3), ints(1), ints(found))
    q, k, v = (x[: found + 3] for x in (q, k, v))
    want = oracle(form, q, k, v, None, found)[found:]
    np.testing.assert_allclose(out, want, atol=1e-12)


@pytest.mark.drawn(1)
@implementations
def test_refused_tokens_are_written_over(implementation, form, rng, float64):
    """Draft tokens of up to a page that a verification refuses: the tokens after them are as if they had never been."""
    run, length = program(implementation), 24
    q, k, v = (rng.normal(size=(length, heads, H)) for heads in (N, K, K))
    want = oracle(form, q, k, v, None, 0)
    table, none = np.arange(COLUMNS, dtype=np.int32)[None], np.zeros(1, np.int32)
    ints = lambda *x: np.asarray(x, np.int32)  # noqa: E731
    pool, at = empty(form, COLUMNS, 1), 0
    while at < length:
        drafts = [rng.normal(size=(PAGE, heads, H)) for heads in (N, K, K)]
        given = [np.concatenate([x[at : at + 1], y]) for x, y in zip((q, k, v), drafts, strict=True)]
        out, pool = run(pool, *given, table, ints(0, 1 + PAGE), ints(at + 1 + PAGE), none, none)
        np.testing.assert_allclose(out[0], want[at], atol=1e-12)
        at += 1


def test_bytes_of_a_page():
    """2 and 4 bits a number, 4 bytes for a channel of keys, and 4 for 32 channels of a token's value."""
    for name, bits in (("kivi2", 2), ("kivi4", 4)):
        form = PageFormat(3, 64, 64, encoding=name)
        pool = PagePool.zeros(form, layers=2, pages=5, page_size=32, dtype="float32", sequences=1)
        assert form.page_bytes(32, "float32") == 32 * 128 * bits // 8 + 4 * 64 + 32 * 4 * 2
        nbytes = pool.rows.nbytes + pool.scales.nbytes + pool.channels.nbytes
        assert nbytes == 2 * 5 * 3 * form.page_bytes(32, "float32")
        assert pool.recent.shape == (2, 1, 3, 192, 128)


def test_what_is_not_supported_is_refused(form, float64):
    with pytest.raises(ValueError, match="a latent is both"):
        PageFormat(1, 16, 8, latent=True, encoding="kivi4")
    with pytest.raises(ValueError, match="an element of 'kivi2' holds 4 values"):
        PageFormat(1, 6, 8, encoding="kivi2")
    pool, ints = empty(form, 2, 1), (jnp.zeros((1, 2), int), jnp.array([0, 1]), jnp.ones(1, int))
    q, k, v = (jnp.ones((1, heads, H), jnp.float32) for heads in (N, K, K))
    with pytest.raises(ValueError, match="ring buffers belong to a pool"):
        paged_attention(q, k, v, pool, 0, *ints)
