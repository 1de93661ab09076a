"""Choice of a fixed number of entries by their scores, for retention rules with a budget."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def highest(
    scores: Float[Array, "K S"],
    entries: Int[Array, "K S"],
    used: Bool[Array, "K S"],
    length: Int[Array, ""],
    recent: int,
    budget: int | Int[Array, ""],
) -> Bool[Array, "K S"]:
    """The ``budget`` entries of the highest scores in each kv head, the most recent ones before all others.

    Args:
        scores, entries, used, length: see ``ScoreRule.choose``.
        recent: entries that count as recent.
        budget: number of entries.
    """
    order = jnp.where(entries >= length - recent, jnp.inf, scores)
    order = jnp.where(used, order, -jnp.inf)
    rank = jnp.argsort(jnp.argsort(-order, axis=1, stable=True), axis=1)
    return rank < budget
