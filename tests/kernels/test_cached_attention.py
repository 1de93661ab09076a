"""Cached attention against a loop over queries in numpy, on difficult shapes.

Legend: L layers, B batch, S new tokens, T cache slots, N query heads, K kv heads, H head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cached_attention import cached_attention, cached_attention_reference

L = 2
STATIC = ("scale", "window", "softcap")
run = jax.jit(cached_attention, static_argnames=("chunk", *STATIC))
reference = jax.jit(cached_attention_reference, static_argnames=STATIC)


def oracle(q, k, v, positions, scale=None, window=None, softcap=None):
    """One query at a time; q [B S N H], k and v [B T K H] of one layer."""
    out = np.zeros(q.shape)
    for b, s, n in np.ndindex(q.shape[:3]):
        head = n // (q.shape[2] // k.shape[2])
        end = positions[b, s] + 1
        begin = 0 if window is None else max(0, end - window)
        scores = k[b, begin:end, head] @ q[b, s, n] * (scale or 1 / np.sqrt(q.shape[3]))
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        out[b, s, n] = weights @ v[b, begin:end, head] / weights.sum()
    return out


def inputs(rng, b, s, t, n, k, h, first=None):
    """Random q, caches and positions: a row's queries follow one another from anywhere, or from ``first``."""
    q = rng.normal(size=(b, s, n, h))
    caches = rng.normal(size=(2, L, b, t, k, h))
    start = rng.integers(0, t - s + 1, b) if first is None else np.asarray(first)
    positions = (start[:, None] + np.arange(s)).astype(np.int32)
    return q, caches[0], caches[1], positions


def close(got, want, bound):
    error = np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)
    assert error <= bound, error


SHAPES = {
    # name: (B, S, T, N, K, H), chunk
    "one of everything": ((1, 1, 1, 1, 1, 2), 4),
    "chunk larger than the cache": ((2, 1, 5, 2, 2, 4), 256),
    "chunk equals the cache": ((2, 2, 8, 2, 1, 4), 8),
    "last chunk overlaps": ((3, 1, 11, 4, 2, 3), 4),
    "last chunk overlaps by all but one": ((2, 1, 9, 2, 2, 4), 8),
    "chunks of one slot": ((2, 2, 7, 2, 1, 2), 1),
    "three query heads a kv head": ((2, 3, 13, 6, 2, 4), 5),
    "prefill of the whole cache": ((2, 12, 12, 3, 3, 4), 5),
}


@pytest.mark.parametrize(("shape", "chunk"), SHAPES.values(), ids=SHAPES)
def test_equals_a_loop_over_queries(shape, chunk, rng, float64):
    q, k, v, positions = inputs(rng, *shape)
    for layer in range(L):
        want = oracle(q, k[layer], v[layer], positions)
        args = *map(jnp.asarray, (q, k, v)), jnp.int32(layer), jnp.asarray(positions)
        got = run(*args, chunk=chunk)
        assert got.dtype == jnp.float64
        close(got, want, 1e-12)
        close(reference(*args), want, 1e-12)


@pytest.mark.parametrize(
    "options", [{"window": 1}, {"window": 3}, {"window": 9}, {"softcap": 0.8, "scale": 0.9}], ids=str
)
@pytest.mark.parametrize("name", ["last chunk overlaps", "three query heads a kv head", "prefill of the whole cache"])
def test_window_softcap_scale(options, name, rng, float64):
    shape, chunk = SHAPES[name]
    q, k, v, positions = inputs(rng, *shape)
    want = oracle(q, k[1], v[1], positions, **options)
    args = *map(jnp.asarray, (q, k, v)), jnp.int32(1), jnp.asarray(positions)
    close(run(*args, chunk=chunk, **options), want, 1e-12)
    close(reference(*args, **options), want, 1e-12)


def test_rows_far_apart_in_a_window(rng, float64):
    """The loop begins at the first slot any row needs; a row further on sees none of its first chunks."""
    q, k, v, positions = inputs(rng, 3, 1, 40, 2, 1, 4, first=[11, 39, 25])
    got = run(*map(jnp.asarray, (q, k, v)), jnp.int32(0), jnp.asarray(positions), chunk=4, window=5)
    close(got, oracle(q, k[0], v[0], positions, window=5), 1e-12)


@pytest.mark.parametrize("slots", [8, 10])
def test_rows_that_end_at_and_around_every_chunk_boundary(slots, rng, float64):
    """All starting points of a row at once, so every row is ragged against the others."""
    q, k, v, positions = inputs(rng, slots, 1, slots, 2, 1, 4, first=np.arange(slots))
    got = run(*map(jnp.asarray, (q, k, v)), jnp.int32(1), jnp.asarray(positions), chunk=4)
    close(got, oracle(q, k[1], v[1], positions), 1e-12)


def test_long_rows_elsewhere_change_nothing(rng, float64):
    """A row's result is bit for bit its own, however many more chunks another row needs."""
    q, k, v, _ = inputs(rng, 2, 1, 12, 2, 2, 4)
    q, k, v = map(jnp.asarray, (q, k, v))
    results = [run(q, k, v, jnp.int32(0), jnp.array([[2], [other]], jnp.int32), chunk=4)[0] for other in (0, 5, 11)]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("stale", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("fn", [run, reference], ids=["xla", "reference"])
def test_stale_slots_do_not_leak(fn, stale, rng, float64):
    """Slots a row has not reached may hold anything: 0 x nan is nan, so a weight of zero is not enough."""
    q, k, v, positions = inputs(rng, 3, 2, 11, 4, 2, 4, first=[0, 4, 8])
    want = oracle(q, k[0], v[0], positions)
    for row, end in enumerate(positions[:, -1]):
        k[:, row, end + 1 :] = stale
        v[:, row, end + 1 :] = stale
    options = {"chunk": 4} if fn is run else {}
    got = fn(*map(jnp.asarray, (q, k, v)), jnp.int32(0), jnp.asarray(positions), **options)
    close(got, want, 1e-12)


def test_large_scores_do_not_overflow(rng):
    q, k, v, positions = inputs(rng, 2, 1, 9, 2, 1, 4)
    want = oracle(300 * q, 300 * k[0], v[0], positions)
    args = (jnp.asarray(300 * q, jnp.float32), jnp.asarray(300 * k, jnp.float32), jnp.asarray(v, jnp.float32))
    got = run(*args, jnp.int32(0), jnp.asarray(positions), chunk=4)
    close(got, want, 1e-4)  # scores near 1e5 carry an error near 1e-2 into the exponent of near ties


def test_bfloat16_rounds_once(rng):
    """Inputs and output are bfloat16, everything between is float32: the error is that of one rounding."""
    q, k, v, positions = inputs(rng, 2, 3, 40, 4, 2, 8)
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    exact = oracle(*(np.asarray(x, np.float64) for x in (q, k[0], v[0])), positions)
    got = run(q, k, v, jnp.int32(0), jnp.asarray(positions), chunk=16)
    assert got.dtype == jnp.bfloat16
    close(got, exact, 2**-8)  # the unit roundoff: one rounding never exceeds it, arithmetic in bfloat16 would


def test_without_jit_and_with_the_layer_as_an_argument(rng, float64):
    """Positions known at trace time or not, layer known or not: one result."""
    q, k, v, positions = inputs(rng, 2, 1, 7, 2, 1, 4)
    args = [jnp.asarray(x) for x in (q, k, v)]
    plain = cached_attention(*args, jnp.int32(1), jnp.asarray(positions), chunk=4)
    close(plain, oracle(q, k[1], v[1], positions), 1e-12)
    before = run._cache_size()
    for layer in range(L):
        close(
            run(*args, jnp.int32(layer), jnp.asarray(positions), chunk=4),
            oracle(q, k[layer], v[layer], positions),
            1e-12,
        )
    assert run._cache_size() == before + 1
