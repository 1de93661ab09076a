"""Sums over the segments of packed rows: log-probabilities of completions out of those of tokens.

A batch of preferences has the two completions of a pair beside each other: segments 1 and 2 of a row are its first
pair, segments 3 and 4 its second one. A pair is never split over rows, so that any split of the rows, over devices or
into micro-batches, keeps pairs whole.

Legend: B batch, S sequence, K most segments of a row, P = K / 2 most pairs of a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import sharding

TOKENS = ("batch", "seq")


def most_segments(length: int) -> int:
    """Most segments that a row of so many tokens can have, rounded up to whole pairs."""
    return length + length % 2


def segment_sums(values: Float[Array, "B S"], segment_ids: Int[Array, "B S"]) -> Float[Array, "B K"]:
    """Sum of values over each segment; column k is segment k + 1. Padding, segment 0, is in no sum."""
    return _by_segment(values, segment_ids, largest=False)


def segment_maxima(values: Float[Array, "B S"], segment_ids: Int[Array, "B S"]) -> Float[Array, "B K"]:
    """Maximum of non-negative values over each segment, and 0 for segments that there are none of."""
    return _by_segment(values, segment_ids, largest=True)


def _by_segment(values: Array, segment_ids: Array, *, largest: bool) -> Array:
    axes, width = sharding.axis_names("seq"), most_segments(values.shape[1])

    def local(values: Array, segment_ids: Array) -> Array:
        rows = jnp.broadcast_to(jnp.arange(values.shape[0])[:, None], values.shape)
        start = jnp.zeros((values.shape[0], width + 1), values.dtype)
        if sharding.current_mesh() is not None:
            start = start + jnp.zeros_like(values[:, :1])  # varies over the devices as the values do
        place = start.at[rows, segment_ids]
        found = (place.max(values) if largest else place.add(values))[:, 1:]
        if not axes:
            return found
        return jax.lax.pmax(found, axes) if largest else jax.lax.psum(found, axes)

    return sharding.shard_map(local, (TOKENS, TOKENS), ("batch", None))(values, segment_ids)


def of_segments(values: Float[Array, "B K"], segment_ids: Int[Array, "B S"]) -> Float[Array, "B S"]:
    """Value of each token's segment; 0 for padding. Inverse of a sum in so far as it spreads what a segment has."""

    def local(values: Array, segment_ids: Array) -> Array:
        found = jnp.take_along_axis(values, jnp.maximum(segment_ids - 1, 0), axis=1)
        return jnp.where(segment_ids > 0, found, 0.0)

    return sharding.shard_map(local, (("batch", None), TOKENS), TOKENS)(values, segment_ids)


def pairs(by_segment: Float[Array, "B K"]) -> tuple[Float[Array, "B P"], Float[Array, "B P"]]:
    """The first and the second completion of each pair."""
    return by_segment[:, 0::2], by_segment[:, 1::2]


def pair_count(segment_ids: Int[Array, "B S"]) -> Float[Array, ""]:
    """Number of pairs in a batch."""
    return jnp.sum(jnp.max(segment_ids, axis=1) // 2).astype(jnp.float32)
