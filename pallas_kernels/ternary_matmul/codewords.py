"""Ternary matrices as codewords of runs of pairs of values (QMoE, arXiv:2310.16795, section 4.2).

Legend: E experts, W numbers of the longest matrix, V codewords of the dictionary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt16, UInt32

LONGEST = 14
"""Most pairs of a codeword."""
HALF = 7
"""Pairs in each of the two integers of a codeword's run."""


class TernaryCode(NamedTuple):
    """Matrices in a dictionary code.

    Attributes:
        words: of each matrix, where the codewords of each output begin, as two numbers of 16 bits, the lower first; and
            the codewords: output after output, the values of an output's inputs in order.
        runs: pairs of each codeword of the dictionary, 4 bits each, the first seven in the first integer, the first in
            the lowest bits; the highest 4 bits of the second integer say how many there are. A pair is ``first + 3 *
            second``, each value plus one.
    """

    words: UInt16[Array, "E W"]
    runs: UInt32[Array, "2 V"]


def pairs_of(inputs: int) -> int:
    """Pairs of an output; the last one of an odd number of inputs has a zero after it."""
    return -(-inputs // 2)


def place_of(low: UInt16[Array, "..."], high: UInt16[Array, "..."], outputs: int) -> Int32[Array, "..."]:
    """Place of an output's first codeword among a matrix's numbers, from the two that say it."""
    return low.astype(jnp.int32) + (high.astype(jnp.int32) << 16) + 2 * outputs


def length_of(high: UInt32[Array, "..."]) -> Int32[Array, "..."]:
    """Pairs of a codeword, from the second integer of its run."""
    return (high >> 28).astype(jnp.int32)


def values_at(
    low: UInt32[Array, "..."], high: UInt32[Array, "..."], place: int
) -> tuple[Int32[Array, "..."], Int32[Array, "..."]]:
    """The two values, -1, 0 or 1, of a codeword's pair at a place."""
    pair = ((low if place < HALF else high) >> 4 * (place % HALF) & 15).astype(jnp.int32)
    return pair % 3 - 1, pair // 3 - 1
