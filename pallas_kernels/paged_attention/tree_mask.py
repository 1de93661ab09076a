"""Tree mask: tokens of several branches in one step, each of which sees its own branch alone (tree attention).

Draft tokens of a tree (SpecExec, arXiv:2406.02532) lie in consecutive slots of their request, parents before children.
A token sees the slots before the tree and its ancestors there; the other slots of the tree are hidden from it, one bit
each. The mask comes on top of causal attention by slots, so that rows of zeros are plain causal attention.

A token's position in its sequence is its depth in the tree, which is its slot less the hidden slots before it.

Legend: T tokens, R requests, E words of 32 bits, I blocks of tokens, S slots.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

BITS = 32
"""Slots of a word."""


class TreeMask(NamedTuple):
    """Tree mask of a step.

    Attributes:
        hidden: bit ``j % 32`` of word ``j // 32`` says that a token does not see slot ``first + j`` of its request;
            none at the token's own slot or behind it.
        first: slot of the tree's first token, of a request without a tree its kv_len.
    """

    hidden: Int[Array, "T E"]
    first: Int[Array, " R"]

    @property
    def words(self) -> int:
        """Number of words (E)."""
        return self.hidden.shape[1]

    @property
    def behind(self) -> Int[Array, " T"]:
        """By how much a token's position is less than its slot."""
        return jnp.sum(jax.lax.population_count(self.hidden), axis=1)


def hides(words: list[Int[Array, "M 1"]], slots: Int[Array, "#M S"]) -> Bool[Array, "M S"]:
    """Slots that are hidden from each token, by the words of its mask.

    Args:
        words: words of each token.
        slots: slots of a request, counted from the tree's first; others than the tree's are hidden from none.
    """
    hidden = None
    for number, word in enumerate(words):
        at = slots - number * BITS
        bit = jnp.where((at >= 0) & (at < BITS), jnp.left_shift(jnp.int32(1), jnp.clip(at, 0, BITS - 1)), 0)
        own = jnp.bitwise_and(word, bit) != 0
        hidden = own if hidden is None else hidden | own
    assert hidden is not None
    return hidden
