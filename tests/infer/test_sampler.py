"""Sampler: draws from the distribution that its parameters define, row by row, position by position."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.infer import SamplingParams
from jaxllm.infer.runner.sampler import BLOCK, PARTS, SamplerRows, filter_logits, logprobs, ranks, sample

LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -2.0, 1.0, -np.inf])
# Quantile 1 - 1e-7 of chi-square with 6 degrees of freedom: one false alarm in ten million seeds.
CRITICAL = 43.3
draw = jax.jit(sample)


def rows(count: int, seed: int = 0, **fields: Any) -> SamplerRows:
    """``count`` rows of one request at positions 0, 1, ...; with filters if any are given."""
    full = (
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0} | fields if set(fields) - {"temperature"} else fields
    )
    arrays = {
        name: jnp.full(count, value, jnp.int32 if name == "top_k" else jnp.float32)
        for name, value in ({"temperature": 1.0} | full).items()
    }
    return SamplerRows(jnp.full(count, seed, jnp.uint32), jnp.arange(count, dtype=jnp.int32), **arrays)


def counts(logits: np.ndarray, seed: int, many: int = 20_000, **fields: Any) -> np.ndarray:
    tokens = draw(jnp.tile(jnp.asarray(logits, jnp.float32), (many, 1)), rows(many, seed, **fields))
    assert tokens.dtype == jnp.int32
    return np.bincount(tokens, minlength=len(logits))


def chi_square(found: np.ndarray, weights: np.ndarray) -> float:
    there = weights > 0
    assert found[~there].sum() == 0, "what has no probability is never drawn"
    expected = found.sum() * weights / weights.sum()
    return float(((found - expected)[there] ** 2 / expected[there]).sum())


@pytest.mark.parametrize("temperature", [1.0, 0.6, 3.0])
def test_positions_draw_from_the_softmax(temperature, rng):
    found = counts(LOGITS, int(rng.integers(2**32)), temperature=temperature)
    assert chi_square(found, np.exp(LOGITS / temperature)) < CRITICAL
    off = np.exp(LOGITS / temperature / 1.4)
    assert chi_square(found, off) > CRITICAL, "the test sees a temperature that is off by 40%"


def test_neighbours_are_independent(rng):
    """Pairs of positions are as frequent as the product of their parts; so are pairs of seeds."""
    many, weights = 20_000, np.exp(LOGITS)
    expected = (many - 1) * np.outer(weights, weights)[:7, :7] / weights.sum() ** 2
    start = int(rng.integers(2**31))
    at = rows(many)
    seeds = at._replace(seeds=start + jnp.arange(many, dtype=jnp.uint32), positions=jnp.full(many, 7, jnp.int32))
    for one in (at._replace(seeds=jnp.full(many, start, jnp.uint32)), seeds):
        tokens = np.asarray(draw(jnp.tile(jnp.asarray(LOGITS, jnp.float32), (many, 1)), one))
        pairs = np.zeros((8, 8))
        np.add.at(pairs, (tokens[:-1], tokens[1:]), 1)
        # The quantile 1 - 1e-7 of 48 degrees of freedom is 117; pairs that share a token are not quite free.
        assert ((pairs[:7, :7] - expected) ** 2 / expected).sum() < 135


@pytest.mark.parametrize("size", [100, 3 * BLOCK + 5, PARTS * BLOCK + BLOCK + 5])
def test_the_whole_vocabulary_is_drawn_from(size, rng):
    """One block; parts of one block and of two, the last one partial: frequencies of ten shares of the vocabulary."""
    logits = rng.normal(size=size)
    found = counts(logits, int(rng.integers(2**32)))
    parts = np.arange(size) % 10
    weights = np.bincount(parts, np.exp(logits))
    # The quantile 1 - 1e-7 of 9 degrees of freedom.
    assert chi_square(np.bincount(parts, found), weights) < 50
    assert found[-5:].sum() > 0


def test_zero_is_the_likeliest_and_the_first_of_equals():
    logits = jnp.array([[0.0, 3.0, 1.0], [5.0, 5.0, 0.0]])
    assert draw(jnp.tile(logits, (32, 1)), rows(64, temperature=0.0)).tolist() == [1, 0] * 32
    assert draw(jnp.tile(logits, (32, 1)), rows(64, temperature=0.0, top_k=2)).tolist() == [1, 0] * 32


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_of_logits_that_are_no_numbers_are_of_the_vocabulary(temperature):
    size = PARTS * BLOCK + BLOCK + 5
    assert draw(jnp.full((2, size), jnp.nan), rows(2, temperature=temperature)).tolist() == [0, 0]


def test_a_row_depends_on_its_own_seed_and_position_alone():
    logits = jnp.zeros((4, 1000))
    one = rows(4, seed=1)
    made = draw(logits, one)
    others = jnp.array([0, 1, 3])
    moved = one._replace(
        positions=one.positions.at[others].set(9),
        seeds=one.seeds.at[others].set(77),
        temperature=one.temperature.at[others].set(0.3),
    )
    assert draw(logits, moved)[2] == made[2]
    assert (draw(logits, one._replace(seeds=one.seeds + 1)) != made).all()
    assert (draw(logits, one._replace(positions=one.positions + 1)) != made).all()
    # Seed and position are not merely added up.
    equal_sums = one._replace(seeds=10 - one.positions.astype(jnp.uint32))
    assert len(set(draw(logits, equal_sums).tolist())) > 1
    # The plain and the full sampler draw alike.
    assert draw(logits, rows(4, seed=1, top_p=1.0)).tolist() == made.tolist()


def kept(logits: np.ndarray, **fields: Any) -> set[int]:
    scaled = jnp.asarray(logits - logits.max(), jnp.float32)[None] / fields.get("temperature", 1.0)
    return set(
        np.flatnonzero(np.isfinite(np.asarray(jax.jit(filter_logits)(scaled, rows(1, **{"top_k": 0} | fields))))[0])
    )


def by_hand(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, typical_p: float = 1.0
) -> set[int]:
    """The filters as their papers have them, one after the other, by sorting."""
    weights = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-weights)[: np.count_nonzero(weights)]
    order = order[: top_k or len(order)]
    shares = weights[order] / weights[order].sum()
    if top_p < 1:  # 1 keeps all, and what is summed up would leave out shares too small to count
        order = order[: int(np.searchsorted(np.cumsum(shares), top_p - 1e-9)) + 1]
    order = order[weights[order] >= min_p]
    shares = weights[order] / weights[order].sum()
    odd = np.abs(-np.log(shares) + (shares * np.log(shares)).sum())
    usual = np.argsort(odd)
    if typical_p < 1:
        usual = usual[: int(np.searchsorted(np.cumsum(shares[usual]), typical_p - 1e-9)) + 1]
    return {int(i) for i in order[usual]}


def test_filters_keep_what_their_definitions_say(rng):
    for _ in range(30):
        logits = 2 * rng.normal(size=50)
        fields = {
            "temperature": float(rng.choice([0.5, 1.0, 2.0])),
            "top_k": int(rng.choice([0, 1, 3, 20, 50, 99])),
            "top_p": float(rng.choice([1.0, 0.95, 0.5, 0.1])),
            "min_p": float(rng.choice([0.0, 0.03, 0.4, 1.0])),
            "typical_p": float(rng.choice([1.0, 1.0, 0.9, 0.3])),
        }
        assert kept(logits, **fields) == by_hand(logits, **fields), fields


def test_tokens_as_likely_as_the_last_are_kept():
    logits = np.array([1.0, 0.0, 0.0, 0.0, -1.0])
    assert kept(logits, top_k=2) == {0, 1, 2, 3}
    assert kept(logits, top_k=1) == {0}
    assert kept(logits, top_p=0.5) == {0, 1, 2, 3}
    assert kept(np.array([-0.0, 0.0, -5.0]), top_k=1) == {0, 1}


def test_filtered_rows_draw_from_what_is_left(rng):
    for fields in (
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.3},
        {"typical_p": 0.4},
        {"top_k": 5, "top_p": 0.9, "temperature": 2.0},
    ):
        temperature = fields.get("temperature", 1.0)
        weights = np.exp(LOGITS / temperature)
        left = by_hand(LOGITS, **{"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | fields)
        left |= {i for i in range(8) if any(LOGITS[i] == LOGITS[j] for j in left)}
        assert len(left) < 7
        weights[[i for i in range(8) if i not in left]] = 0
        assert chi_square(counts(LOGITS, int(rng.integers(2**32)), **fields), weights) < CRITICAL


def test_log_probabilities_are_the_models_own(rng):
    logits = rng.normal(size=(6, 30))
    tokens = rng.integers(0, 30, 6)
    own, ids, top = jax.jit(logprobs, static_argnums=2)(jnp.asarray(logits), jnp.asarray(tokens, jnp.int32), 4)
    want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(own, want[np.arange(6), tokens], atol=1e-5)
    np.testing.assert_array_equal(ids, np.argsort(-logits, axis=-1)[:, :4])
    np.testing.assert_allclose(top, np.sort(want, axis=-1)[:, :-5:-1], atol=1e-5)
    found = jax.jit(ranks)(jnp.asarray(logits), jnp.asarray(tokens, jnp.int32))
    np.testing.assert_array_equal(found, (logits > logits[np.arange(6), tokens][:, None]).sum(-1))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", [0, -1]),
        ("temperature", [-0.5, float("nan"), float("inf")]),
        ("top_k", [-1]),
        ("top_p", [0.0, 1.1, float("nan")]),
        ("min_p", [-0.1, 1.5, float("nan")]),
        ("seed", [-1, 2**32]),
        ("n", [0]),
        ("stop", [("a", "")]),
        ("logprobs", [-1]),
    ],
)
def test_what_cannot_be_sampled_is_refused_by_name(name, values):
    for value in values:
        with pytest.raises(ValueError, match=f"^{name} = "):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(("top_p", "most"), [(0.25, 1), (0.5, 2), (0.50001, 3), (0.75, 3), (0.999, 4)])
def test_top_p_of_an_exact_mass_keeps_no_more(top_p, most):
    """Four tokens in order whose weights are one float, a quarter each: what just reaches the mass is enough."""
    logits = np.array([0.0, -1e-9, -2e-9, -3e-9], np.float32)
    assert (np.exp(logits) == 1).all()
    assert kept(logits, top_p=top_p) == set(range(most))
