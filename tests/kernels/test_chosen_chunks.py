"""ShadowKV in paged attention: low-rank keys, chosen chunks, values in host memory."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models.attention_context import AttentionParams
from jaxllm.models.layers.rope import RopeConfig, turn
from pallas_kernels.paged_attention import PageFormat, PagePool, paged_attention
from pallas_kernels.paged_attention.kv_formats import KV_FORMATS, kv_format
from pallas_kernels.paged_attention.pages import host_sharding
from pallas_kernels.paged_attention.residual_window import Residual
from pallas_kernels.paged_attention.shadow.shadow_format import ShadowFormat, low_rank
from tests.kernels import paged_body
from tests.seams import shadow_reference

LAYERS, LAYER, PAGE, COLUMNS, N, K, H = 2, 1, 8, 5, 4, 2, 8
ROPE = RopeConfig(theta=100.0)
FORMS = {
    "few": ShadowFormat(rank=5, tokens=4, outliers=1, residual=6, chunk=2),
    "none whole": ShadowFormat(rank=3, tokens=6, outliers=0, residual=3, chunk=2),
    "all": ShadowFormat(rank=PAGE, tokens=PAGE * COLUMNS, outliers=1, residual=6, chunk=2),
}
implementations = pytest.mark.parametrize("implementation", paged_body.PLAIN)


@pytest.fixture(autouse=True)
def forms(monkeypatch):
    """Formats of small sizes."""
    for name, form in FORMS.items():
        monkeypatch.setitem(KV_FORMATS, name, form)


def empty(form: PageFormat, pages: int, sequences: int) -> PagePool:
    """A pool of garbage."""
    pool = PagePool.zeros(form, layers=LAYERS, pages=pages, page_size=PAGE, dtype=jnp.float64, sequences=sequences)
    nan = lambda x: jnp.full_like(x, jnp.nan)  # noqa: E731
    return PagePool(
        nan(pool.rows), form, None, None, jnp.full_like(pool.channels, -1), nan(pool.recent), None, nan(pool.keys),
        nan(pool.factors),
    )  # fmt: skip


def program(implementation: str, params: AttentionParams, **options: Any) -> Any:
    @jax.jit
    def run(pool, q, k, v, table, starts, lens, slots, found, sinks=None):
        return paged_attention(
            q, k, v, pool, LAYER, table, starts, lens, residual=Residual(slots, found), window=params.window,
            implementation=implementation, scale=params.scale, softcap=params.softcap, sinks=sinks,
            turn=functools.partial(turn, ROPE), **options,
        )  # fmt: skip

    return run


def draw(rng: np.random.Generator, length: int) -> list[np.ndarray]:
    """Queries, keys and values of a sequence; keys are rotated."""
    q, k, v = (rng.normal(size=(length, heads, H)) for heads in (N, K, K))
    return [q * 3, np.asarray(shadow_reference.turned(ROPE, jnp.asarray(k), False)), v]


def ints(*x: int) -> np.ndarray:
    return np.asarray(x, np.int32)


@pytest.mark.drawn(0.5)
@implementations
@pytest.mark.parametrize(
    ("name", "window", "softcap"),
    [("few", None, None), ("few", 13, 2.0), ("none whole", 21, None), ("all", None, None)],
)
def test_equal_for_all_chunks(implementation, name, window, softcap, rng, float64):
    """Two requests in chunks of any lengths are the dense reference; with all of it, full attention."""
    params, length, pages = AttentionParams(0.4, window, softcap), 37, rng.permutation(2 * COLUMNS)
    run, drawn, sinks = program(implementation, params), [draw(rng, 37) for _ in range(2)], rng.normal(size=N)
    want = [
        shadow_reference.attend(FORMS[name], PAGE, ROPE, *map(jnp.asarray, one), params=params, sinks=sinks)
        for one in drawn
    ]
    pool, done, slots = empty(PageFormat(K, H, H, encoding=name), 2 * COLUMNS, 3), [0, 0], ints(2, 0)
    table = pages.reshape(2, COLUMNS).astype(np.int32)
    while min(done) < length:
        counts = [int(min(rng.choice([0, 1, 3, 11]), length - at)) for at in done]
        rows = [slice(at, at + n) for at, n in zip(done, counts, strict=True)]
        flat = [np.concatenate([x[rows[0]], y[rows[1]]]) for x, y in zip(*drawn, strict=True)]
        flat = [np.pad(x, ((0, 23 - len(x)), (0, 0), (0, 0)), constant_values=np.nan) for x in flat]
        starts = ints(0, *np.cumsum(counts))
        lens = ints(*(at + n for at, n in zip(done, counts, strict=True)))
        seen = table
        if window is not None:  # pages behind the window are somebody else's by now
            behind = np.maximum(np.asarray(done) - window + 1, 0) // PAGE
            seen = np.where(np.arange(COLUMNS) < behind[:, None], table[::-1], table)
        out, pool = run(pool, *map(jnp.asarray, flat), seen, starts, lens, slots, ints(0, 0), sinks)
        for r in range(2):
            np.testing.assert_allclose(out[starts[r] : starts[r + 1]], want[r][rows[r]], atol=1e-10)
        np.testing.assert_array_equal(out[starts[2] :], 0)
        done = lens.tolist()
    if name == "all":
        q, k, v = (jnp.asarray(x) for x in drawn[0])
        scores = jnp.einsum("tkgh,skh->tkgs", q.reshape(length, K, -1, H), k) * params.scale
        scores = jnp.where((np.arange(length) <= np.arange(length)[:, None])[:, None, None], scores, -np.inf)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks.reshape(K, -1, 1), (*scores.shape[:3], 1))], axis=3)
        full = jnp.einsum("tkgs,skv->tkgv", jax.nn.softmax(scores, -1)[..., :length], v).reshape(length, N, H)
        np.testing.assert_allclose(want[0], full, atol=1e-10)


@pytest.mark.drawn(3)
@implementations
def test_found_pages_are_read_as_they_are(implementation, rng, float64):
    """A request goes on after two pages of another: those are encoded for it, though its window would reach them."""
    params, found = AttentionParams(0.4), 16
    run, drawn = program(implementation, params), draw(rng, 34)
    table = np.arange(2 * COLUMNS, dtype=np.int32).reshape(2, COLUMNS)
    table[1, :2] = table[0, :2]
    pool = empty(PageFormat(K, H, H, encoding="few"), 2 * COLUMNS, 2)
    _, pool = run(pool, *drawn, table[:1], ints(0, 34), ints(34), ints(0), ints(0))
    rest = [x[found : found + 3] for x in drawn]
    out, _ = run(pool, *rest, table[1:], ints(0, 3), ints(found + 3), ints(1), ints(found))
    first = [jnp.asarray(x[: found + 3]) for x in drawn]
    want = shadow_reference.attend(FORMS["few"], PAGE, ROPE, *first, params=params, found=found)[found:]
    np.testing.assert_allclose(out, want, atol=1e-10)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", ["few", "none whole"])
def test_a_decode_token_fetches_its_chunks_alone(name, rng, float64):
    """Every value in host memory that is not of a chosen chunk is nan by then; with one more, so is the output."""
    form, params, length = FORMS[name], AttentionParams(0.4), 36
    drawn = draw(rng, length + 1)
    run, one = program("xla", params), program("xla", params, decode_only=True)
    table, pool = rng.permutation(COLUMNS).astype(np.int32)[None], empty(PageFormat(K, H, H, encoding=name), COLUMNS, 1)
    _, pool = run(pool, *(x[:length] for x in drawn), table, ints(0, length), ints(length), ints(0), ints(0))
    padded = [jnp.pad(jnp.asarray(x), ((0, -len(x) % PAGE), (0, 0), (0, 0))) for x in drawn]
    encoded, _, few = shadow_reference.chosen(form, PAGE, padded[0][: length + 1], padded[1], params)
    few = np.asarray(few[length])  # K A
    assert encoded[length, 0] == encoded[length - 1, 0], "the step writes no page"
    assert few.sum() == K * form.tokens // form.chunk < int(encoded[length, 0]) // form.chunk
    kept = np.full(pool.rows.shape, np.nan)
    for head, chunk in zip(*np.nonzero(few), strict=True):
        page, at = table[0, chunk * form.chunk // PAGE], chunk * form.chunk % PAGE
        place = LAYER, page, head, slice(at, at + form.chunk)
        kept[place] = pool.rows[place]
    given = [x[length:] for x in drawn], table, ints(0, 1), ints(length + 1), ints(0), ints(0)
    poisoned = PagePool(jnp.asarray(kept), pool.format, *pool.slots[1:])
    out, _ = one(poisoned, *given[0], *given[1:])
    want = shadow_reference.attend(form, PAGE, ROPE, *map(jnp.asarray, drawn), params=params)[length:]
    np.testing.assert_allclose(out, want, atol=1e-10)
    kept[place] = np.nan
    out, _ = one(PagePool(jnp.asarray(kept), pool.format, *pool.slots[1:]), *given[0], *given[1:])
    assert np.isnan(out).any()


@pytest.mark.drawn(3)
def test_values_stay_in_host_memory(rng, float64):
    """A program that takes values in host memory gives them back there, with the same output."""
    params, length = AttentionParams(0.4), 34
    drawn, table = draw(rng, length), np.arange(COLUMNS, dtype=np.int32)[None]
    pool = empty(PageFormat(K, H, H, encoding="few"), COLUMNS, 1)
    run = program("xla", params)
    given = (*drawn, table, ints(0, length), ints(length), ints(0), ints(0))
    want, there = run(pool, *given)
    moved = PagePool(jax.device_put(pool.rows, host_sharding(jax.devices()[0])), pool.format, *pool.slots[1:])
    assert "f64<host>[" in str(jax.make_jaxpr(run)(moved, *given))
    out, back = run(moved, *given)
    np.testing.assert_array_equal(out, want)
    assert back.rows.sharding.memory_kind == "pinned_host"
    assert back.keys.sharding.memory_kind != "pinned_host"
    np.testing.assert_array_equal(back.rows, there.rows)


@pytest.mark.parametrize(("c", "d"), [(6, 20), (20, 6), (8, 8)])
def test_low_rank_is_the_truncated_decomposition(c, d, rng, float64):
    """As singular values have it, by either side; the whole rank is exact, though singular values are tiny."""
    x = rng.normal(size=(c, d)) * 10.0 ** -np.arange(d)
    for rank in (1, 3, min(c, d)):
        factors, basis = low_rank(jnp.asarray(x), rank)
        u, s, w = np.linalg.svd(x, full_matrices=False)
        np.testing.assert_allclose(factors @ basis, (u * s)[:, :rank] @ w[:rank], atol=1e-7)
    np.testing.assert_allclose(factors @ basis, x, atol=1e-12)


def test_bytes_of_a_page():
    """Coefficients, landmarks, outliers and a basis on the device; values on the host."""
    form = PageFormat(3, 64, 64, encoding="shadowkv:24,128,2")
    pool = PagePool.zeros(form, layers=2, pages=5, page_size=64, dtype="float32", sequences=1)
    rows = 3 * (64 // 8 + 2 * 2 * 8 + 24) * 64
    assert form.device_page_bytes(64, "float32") == 4 * (64 * 24 + rows) + 4 * 3 * 2
    assert form.host_page_bytes(64, "float32") == 4 * 3 * 64 * 64
    assert pool.keys.nbytes + pool.factors.nbytes + pool.channels.nbytes == 10 * form.device_page_bytes(64, "float32")
    assert pool.rows.nbytes == 10 * form.host_page_bytes(64, "float32")
    assert pool.recent.shape == (2, 1, 3, 64 + 64, 128)


def test_what_is_not_legal_is_refused(float64):
    assert vars(kv_format("shadowkv:16")) == vars(ShadowFormat(16))
    assert vars(kv_format("shadowkv:16,64,0")) == vars(ShadowFormat(16, 64, 0))
    for wrong in ("", "0", "a", "8,4", "8,16,1,1"):
        with pytest.raises(ValueError, match=r"give shadowkv:RANK\[,TOKENS\[,OUTLIERS\]\]"):
            kv_format(f"shadowkv:{wrong}")
    with pytest.raises(ValueError, match="the format 'int8' has no sizes to give"):
        kv_format("int8:4")
    pool, q = empty(PageFormat(K, H, H, encoding="few"), 2, 1), jnp.ones((1, N, H))
    given = q, q[:, :K], q[:, :K], pool, 0, jnp.zeros((1, 2), int), jnp.array([0, 1]), jnp.ones(1, int)
    for kernel in ("pallas_tpu", "pallas_gpu"):
        with pytest.raises(NotImplementedError, match="not 'few'; implementation 'xla' reads those"):
            paged_attention(*given, residual=Residual(jnp.zeros(1, int), jnp.zeros(1, int)), implementation=kernel)
    plain = PagePool.zeros(PageFormat(K, H, H), layers=1, pages=2, page_size=8, dtype="float64")
    with pytest.raises(ValueError, match="turn is for keys without rotation"):
        paged_attention(*given[:3], plain, *given[4:], turn=functools.partial(turn, ROPE))
