"""Retention by attention scores: what attention collects, and which entries leave and where the others go."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.infer.runner.retention.corm import Corm
from pallas_kernels.paged_attention import PageFormat, PagePool, paged_attention
from pallas_kernels.paged_attention.retention import Retention, ScoreRule, by_scores, evict
from tests.kernels import paged_body

LAYERS, LAYER, PAGE, COLUMNS, N, K, H = 2, 1, 4, 5, 4, 2, 4
RULE = Corm(2.5, recent=3, interval=8)
implementations = pytest.mark.parametrize("implementation", paged_body.PLAIN)


def oracle(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, list[list[set[int]]]]:
    """One query at a time over a whole sequence: output, and the entries of each head after each eviction."""
    out, held, kept = np.zeros((len(q), N, H)), [set[int]() for _ in range(K)], []
    best = [dict[int, float]() for _ in range(K)]
    for t in range(len(q)):
        if t and t % RULE.interval == 0:
            for g in range(K):
                held[g] = {e for e in held[g] if best[g].get(e, 0.0) >= RULE.threshold or e >= t - RULE.recent}
            kept.append([set(one) for one in held])
            best = [{} for _ in range(K)]
        for g in range(K):
            held[g].add(t)
            seen = sorted(held[g])
            for n in range(g * N // K, (g + 1) * N // K):
                scores = k[seen, g] @ q[t, n] / np.sqrt(H)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                out[t, n] = weights @ v[seen, g]
                if t % RULE.interval >= RULE.interval - RULE.recent:
                    for e, w in zip(seen, weights, strict=True):
                        best[g][e] = max(best[g].get(e, 0.0), w * (t + 1))
    return out, kept


@pytest.mark.drawn(1)
@implementations
def test_entries_leave_by_their_scores(implementation, rng, float64):
    """Two requests in chunks that end at multiples of the interval: as one query at a time; entries are in front."""
    assert isinstance(RULE, ScoreRule)
    assert by_scores(RULE) is RULE
    length = 19
    form = PageFormat(K, H, H)
    pool = PagePool.zeros(
        form, layers=LAYERS, pages=11, page_size=PAGE, dtype=jnp.float64, positions=True, scores=True
    )  # fmt: skip
    pool = PagePool(jnp.full_like(pool.rows, jnp.nan), form, None, pool.positions, scores=pool.scores)

    @jax.jit
    def run(pool, q, k, v, table, starts, lens, columns):
        before = jnp.where(starts[1:] > starts[:-1], lens - (starts[1:] - starts[:-1]), 0)
        slots, found = evict(pool.slots, table, columns, before, RULE)
        pool = PagePool(slots.data, form, *slots[1:])
        out, pool = paged_attention(
            q, k, v, pool, LAYER, table, starts, lens, retention=Retention(RULE, columns),
            implementation=implementation,
        )  # fmt: skip
        return out, pool, found

    q, k, v = (rng.normal(size=(2, length, heads, H)) * scale for heads, scale in ((N, 2.0), (K, 1.0), (K, 1.0)))
    want = [oracle(*(x[r] for x in (q, k, v))) for r in range(2)]
    assert all(sum(map(len, kept[1])) < 16 * K for _, kept in want), "19 of the two evictions leave, give or take 2"
    own = np.split(rng.permutation(10).astype(np.int32), 2)
    done, evictions = [0, 0], [0, 0]
    while min(done) < length:
        counts = [
            int(min(rng.integers(0, 7), length - at, RULE.interval - at % RULE.interval)) for at in done
        ]  # fmt: skip
        columns = np.asarray([-(-(at + n) // PAGE) for at, n in zip(done, counts, strict=True)], np.int32)
        table = np.full((2, COLUMNS), 99, np.int32)
        for r in range(2):
            table[r, : columns[r]] = own[r][: columns[r]]
        rows = [slice(at, at + n) for at, n in zip(done, counts, strict=True)]
        flat = [np.concatenate([x[r, rows[r]] for r in range(2)]) for x in (q, k, v)]
        flat = [np.pad(x, ((0, 13 - len(x)), (0, 0), (0, 0)), constant_values=np.nan) for x in flat]
        starts = np.cumsum([0, *counts]).astype(np.int32)
        lens = np.asarray([at + n for at, n in zip(done, counts, strict=True)], np.int32)
        out, pool, found = run(pool, *map(jnp.asarray, flat), table, starts, lens, columns)
        for r in range(2):
            np.testing.assert_allclose(out[starts[r] : starts[r + 1]], want[r][0][rows[r]], atol=1e-12)
            if counts[r] and done[r] and done[r] % RULE.interval == 0:
                kept = want[r][1][evictions[r]]
                evictions[r] += 1
                # The other layer has no entries.
                assert found[r].tolist()[:2] == [max(map(len, kept)), sum(map(len, kept))]
                at = np.asarray(pool.positions)[LAYER, own[r][: columns[r]], :, 0].swapaxes(0, 1).reshape(K, -1)
                for g in range(K):
                    there = [*sorted(kept[g]), *range(done[r], done[r] + counts[r])]
                    assert at[g].tolist() == there + [-1] * (len(at[g]) - len(there))
            else:
                assert found[r].tolist() == [-1, 0, 0]
        done = [at + n for at, n in zip(done, counts, strict=True)]
    assert evictions == [2, 2]
    assert (np.asarray(pool.positions)[1 - LAYER] == -1).all()


@pytest.mark.parametrize("encoding", ["plain", "int8"])
def test_scales_move_with_their_entries(encoding, rng):
    """Entries that stay are the same bits in other slots; the pages of another request are as they were."""
    form = PageFormat(K, H, H, encoding=encoding)
    zeros = PagePool.zeros(
        form, layers=1, pages=6, page_size=PAGE, dtype=jnp.float32, positions=True, scores=True
    ).slots  # fmt: skip
    at = np.full((1, 6, K, 1, PAGE), -1, np.int32)
    at[0, [2, 0]] = np.arange(8).reshape(2, 1, 1, PAGE)
    data = rng.integers(-100, 100, zeros.data.shape).astype(zeros.data.dtype)
    scores = rng.choice([0.0, 3.0], zeros.scores.shape).astype(np.float32)
    pool = zeros._replace(
        data=jnp.asarray(data), positions=jnp.asarray(at), scores=jnp.asarray(scores),
        scales=None if zeros.scales is None else jnp.asarray(rng.random(zeros.scales.shape).astype(np.float32)),
    )  # fmt: skip
    table = jnp.asarray([[2, 0, 5], [3, 4, 5]], jnp.int32)
    made, found = jax.jit(lambda pool: evict(pool, table, jnp.asarray([2, 2]), jnp.asarray([8, 0]), RULE))(pool)
    assert found[1].tolist() == [-1, 0, 0]
    for g in range(K):
        flat = [(page, slot) for page in (2, 0) for slot in range(PAGE)]
        stay = [i for i, (page, slot) in enumerate(flat) if scores[0, page, g, 0, slot] or i >= 5]
        for new, i in enumerate(stay):
            (page, slot), (there, place) = flat[i], flat[new]
            np.testing.assert_array_equal(made.data[0, there, g, place], data[0, page, g, slot])
            assert made.positions[0, there, g, 0, place] == i
            assert made.scores[0, there, g, 0, place] == 0
            if encoding == "int8":
                np.testing.assert_array_equal(made.scales[0, there, g, :, place], pool.scales[0, page, g, :, slot])
        assert (np.asarray(made.positions)[0, [2, 0], g, 0].reshape(-1)[len(stay) :] == -1).all()
    for page in (1, 3, 4, 5):
        np.testing.assert_array_equal(made.data[0, page], data[0, page])
