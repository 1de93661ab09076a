"""Sampler: from logits to tokens and log-probabilities, on the device.

Sampling a token uses three uniform random values whose key is folded from the request's seed and the token's position,
so it does not depend on the other rows of a step: the first selects a part of the vocabulary by its probability, the
second a block of the part, the third a token of the block. Filters (top-k, top-p, ...) are thresholds, found by
bisection over the integers that order floats, without sorting the vocabulary.

Legend: S sampled rows, V vocab, W tokens of a part of it, B blocks of a part, K top tokens that are reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt

from jaxllm.models.tpu_layout import row_major

PARTS, BLOCK = 32, 128
"""Parts of the vocabulary, each a whole number of blocks of so many tokens."""
LOWEST, HIGHEST = -(2**31), 2**31 - 1


class SamplerRows(NamedTuple):
    """Sampling parameters and position of each sampled row.

    Attributes:
        seeds: seeds of the random keys.
        positions: positions of the sampled tokens.
        temperature: 0 for greedy decoding.
        top_k, top_p, min_p, typical_p: see ``SamplingParams``; None for the plain sampler.
    """

    seeds: UInt[Array, " S"]
    positions: Int[Array, " S"]
    temperature: Float[Array, " S"]
    top_k: Int[Array, " S"] | None = None
    top_p: Float[Array, " S"] | None = None
    min_p: Float[Array, " S"] | None = None
    typical_p: Float[Array, " S"] | None = None


def sample(logits: Float[Array, "S V"], rows: SamplerRows) -> Int[Array, " S"]:
    """Samples a token per row from ``softmax(logits / temperature)``, with the rows' filters applied first."""
    highest = jnp.max(logits, axis=-1, keepdims=True)
    scaled = logits - jnp.where(jnp.isfinite(highest), highest, 0)
    scaled = (scaled / jnp.maximum(rows.temperature, 1e-6)[:, None].astype(logits.dtype)).astype(jnp.float32)
    if rows.top_k is not None:
        assert rows.top_p is not None
        assert rows.min_p is not None
        assert rows.typical_p is not None
        cuts = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0) | (rows.typical_p < 1)
        filtering = (rows.temperature > 0) & cuts
        scaled = jax.lax.cond(jnp.any(filtering), lambda x: filter_logits(x, rows), lambda x: x, scaled)
    greedy = _first_true(logits == highest)
    drawn = jax.lax.cond(
        jnp.any(rows.temperature > 0),
        lambda x: draw(x, rows.seeds, rows.positions),
        lambda x: jnp.zeros_like(greedy),
        scaled,
    )
    return jnp.where(rows.temperature > 0, drawn, greedy)


def draw(scaled: Float[Array, "S V"], seeds: UInt[Array, " S"], positions: Int[Array, " S"]) -> Int[Array, " S"]:
    """Samples a token of each row from ``softmax(scaled)``, whose highest is 0; one of -inf is never sampled."""
    uniform = jax.vmap(_uniform)(seeds, positions)
    width = BLOCK * math.ceil(scaled.shape[1] / (PARTS * BLOCK))
    part, scaled = _choose_part(scaled, width, uniform[:, 0])
    block, scaled = _choose_part(scaled, BLOCK, uniform[:, 1])
    return part * width + block * BLOCK + _inverse_cdf(jnp.exp(scaled), uniform[:, 2])


def _choose_part(
    scaled: Float[Array, "S V"], width: int, at: Float[Array, " S"]
) -> tuple[Int[Array, " S"], Float[Array, "S W"]]:
    """Part of so many values that holds the fraction ``at`` of each row's total weight, and its values.

    Parts are slices, and not rows of a reshaped array, for which a TPU would move all logits into another layout; they
    are selected, and not gathered, which a TPU does row by row.
    """
    parts = [scaled[:, first : first + width] for first in range(0, scaled.shape[1], width)]
    parts[-1] = jnp.pad(parts[-1], ((0, 0), (0, width - parts[-1].shape[1])), constant_values=-jnp.inf)
    chosen = _inverse_cdf(jnp.stack([jnp.exp(one).sum(axis=1) for one in parts], axis=1), at)
    found = parts[0]
    for number, one in enumerate(parts[1:], 1):
        found = jnp.where(chosen[:, None] == number, one, found)
    return chosen, row_major(found)


def _uniform(seed: UInt[Array, ""], position: Int[Array, ""]) -> Float[Array, "3"]:
    """Uniform random values below 1 of one row."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), seed), position)
    return jax.random.uniform(key, (3,), jnp.float32)


def _inverse_cdf(weights: Float[Array, "S B"], at: Float[Array, " S"]) -> Int[Array, " S"]:
    """First index whose cumulative weight exceeds the fraction ``at`` < 1 of the total; its own weight is positive."""
    cumulated = jnp.cumsum(weights, axis=1)
    return _first_true(cumulated > at[:, None] * cumulated[:, -1:])


def _first_true(found: Bool[Array, "S B"]) -> Int[Array, " S"]:
    """Index of the first true value of each row, 0 where there is none (of nan); CPUs compute argmax slower."""
    size = found.shape[1]
    first = jnp.min(jnp.where(found, jnp.arange(size, dtype=jnp.int32), size), axis=1)
    return jnp.where(first < size, first, 0)


def filter_logits(scaled: Float[Array, "S V"], rows: SamplerRows) -> Float[Array, "S V"]:
    """Logits over temperature, with -inf for tokens that a filter removes; the highest is 0."""
    assert rows.top_k is not None
    assert rows.top_p is not None
    assert rows.min_p is not None
    assert rows.typical_p is not None
    order = _sortable_ints(scaled)
    k = jnp.where(rows.top_k > 0, rows.top_k, scaled.shape[1])
    least = _largest_true(lambda t: jnp.sum(order >= t[:, None], axis=1) >= k, k)
    weights = jnp.where(order >= least[:, None], jnp.exp(scaled), 0)
    enough = rows.top_p * jnp.sum(weights, axis=1)
    nucleus = _largest_true(lambda t: jnp.sum(jnp.where(order >= t[:, None], weights, 0), axis=1) >= enough, k)
    least = jnp.maximum(least, jnp.where(rows.top_p < 1, nucleus, LOWEST))
    keep = (order >= least[:, None]) & (scaled >= jnp.log(rows.min_p)[:, None])
    kept = jnp.where(keep, scaled, -jnp.inf)
    mass = rows.typical_p
    return jax.lax.cond(jnp.any(mass < 1), lambda x: _filter_typical(x, mass), lambda x: x, kept)


def _filter_typical(scaled: Float[Array, "S V"], mass: Float[Array, " S"]) -> Float[Array, "S V"]:
    """Keeps the tokens whose surprisal is closest to the entropy, up to this probability mass."""
    weights = jnp.exp(scaled)
    whole = jnp.sum(weights, axis=1, keepdims=True)
    surprise = jnp.where(weights > 0, jnp.log(whole) - scaled, 0)
    entropy = jnp.sum(weights * surprise, axis=1, keepdims=True) / whole
    order = _sortable_ints(jnp.where(weights > 0, -jnp.abs(surprise - entropy), -jnp.inf))
    enough = mass * whole[:, 0]
    least = _largest_true(lambda t: jnp.sum(jnp.where(order >= t[:, None], weights, 0), axis=1) >= enough, mass)
    keep = (order >= least[:, None]) | (mass >= 1)[:, None]
    return jnp.where(keep, scaled, -jnp.inf)


def _sortable_ints(values: Float[Array, "S V"]) -> Int[Array, "S V"]:
    """Integers that order like the floats."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    bits = jnp.where(bits == LOWEST, 0, bits)  # minus zero equals zero
    return jnp.where(bits < 0, bits ^ HIGHEST, bits)


def _largest_true(
    holds: Callable[[Int[Array, " S"]], Bool[Array, " S"]], like: Shaped[Array, " S"]
) -> Int[Array, " S"]:
    """Largest integer of each row for which ``holds`` is true, by bisection; it is true for the lowest integer."""

    def halve(_: Int[Array, ""], ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        there = holds(middle)
        return jnp.where(there, middle, low), jnp.where(there, high, middle)

    low = jnp.full(like.shape, LOWEST, jnp.int32)
    return jax.lax.fori_loop(0, 32, halve, (low, jnp.full(like.shape, HIGHEST, jnp.int32)))[0]


def logprobs(
    logits: Float[Array, "S V"], tokens: Int[Array, " S"], count: int
) -> tuple[Float[Array, " S"], Int[Array, "S K"], Float[Array, "S K"]]:
    """Log-probabilities of the tokens, and the ``count`` top tokens with theirs, of the model's own distribution."""
    whole = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    own = jnp.take_along_axis(logits, tokens[:, None], axis=1) - whole
    top, ids = jax.lax.top_k(logits, count)
    return own[:, 0], ids.astype(jnp.int32), top - whole


def ranks(logits: Float[Array, "S V"], tokens: Int[Array, " S"]) -> Int[Array, " S"]:
    """Number of tokens that are more likely."""
    there = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    return jnp.sum(logits > there, axis=1).astype(jnp.int32)
