"""Ternary dictionary code: sparse ternary rows in less than a bit a value (QMoE, arXiv:2310.16795, section 4).

A row is cut into pairs of values, and runs of up to 14 pairs are codewords of 16 bits. The dictionary is fixed: the
2^16 runs that are the likeliest if values are independent and 0 with a probability of 0.885. With every run it has the
runs that it begins with, so that the longest one is found by walking down a trie. No codeword crosses the end of a row,
so that rows can be decoded in any order.

Legend: R rows, I values of a row, P pairs of a row, W codewords.
"""

from __future__ import annotations

import functools
import heapq
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int8, UInt16, UInt32

from pallas_kernels.ternary_matmul.codewords import HALF, LONGEST

WORDS = 2**16
"""Codewords."""
ZEROS = 0.885
"""Probability of a zero that the dictionary is made for."""
SYMBOLS = 9
"""Pairs: ``first + 3 * second``, each value plus one, so that the pair of zeros is 4."""


class Dictionary(NamedTuple):
    """The runs of all codewords.

    Attributes:
        runs: uint32[2, 2^16], pairs of a codeword and their number, see ``pallas_kernels.ternary_matmul.codewords``.
        lengths: int32[2^16], their number.
        children: int32[2^16 + 1, 9], codeword of a run with one more pair, -1 where it is none; the last row is that of
            the empty run.
    """

    runs: UInt32[np.ndarray, "2 W"]
    lengths: Int[np.ndarray, " W"]
    children: Int[np.ndarray, "V 9"]


@functools.cache
def dictionary() -> Dictionary:
    """The dictionary; likelier runs have lower codewords, and of equally likely ones those that were found first."""
    of_value = ((1 - ZEROS) / 2, ZEROS, (1 - ZEROS) / 2)
    chances = [of_value[pair % 3] * of_value[pair // 3] for pair in range(SYMBOLS)]
    runs = np.zeros((2, WORDS), np.uint32)
    lengths = np.zeros(WORDS, np.int32)
    children = np.full((WORDS + 1, SYMBOLS), -1, np.int32)
    # (-probability, order, run it extends, pair, length); a longer run is never likelier than what it begins with.
    heap = [(-chance, pair, WORDS, pair, 1) for pair, chance in enumerate(chances)]
    heapq.heapify(heap)
    found = SYMBOLS
    for word in range(WORDS):
        chance, _, parent, pair, length = heapq.heappop(heap)
        children[parent, pair], lengths[word] = word, length
        if parent < WORDS:
            runs[:, word] = runs[:, parent]
        runs[(length - 1) // HALF, word] |= np.uint32(pair << 4 * ((length - 1) % HALF))
        if length < LONGEST:
            for more, own in enumerate(chances):
                heapq.heappush(heap, (chance * own, found, word, more, length + 1))
                found += 1
    runs[1] |= lengths.astype(np.uint32) << np.uint32(28)
    return Dictionary(runs, lengths, children)


def encode(values: Int8[np.ndarray, "R I"]) -> tuple[UInt16[np.ndarray, " W"], Int[np.ndarray, " R"]]:
    """Codewords of rows of -1, 0 and 1, row after row, and the number of codewords of each row.

    A row of an odd length is coded with a zero after it. The longest run that is a codeword is taken each time.

    Raises:
        ValueError: other values.
    """
    if not np.isin(values, (-1, 0, 1)).all():
        raise ValueError("the ternary dictionary code has the values -1, 0 and 1 alone.")
    rows, inputs = values.shape
    pairs = np.pad(values, ((0, 0), (0, inputs % 2))).astype(np.int32) + 1
    pairs = pairs[:, ::2] + 3 * pairs[:, 1::2]
    children = dictionary().children
    words = np.zeros((rows, pairs.shape[1]), np.uint16)
    ends = np.zeros(words.shape, bool)
    run = np.full(rows, WORDS, np.int32)
    for at in range(pairs.shape[1]):
        longer = children[run, pairs[:, at]]
        full = longer < 0
        words[full, at - 1], ends[full, at - 1] = run[full], True
        run = np.where(full, children[WORDS, pairs[:, at]], longer)
    if pairs.shape[1]:
        words[:, -1], ends[:, -1] = run, True
    return words[ends], ends.sum(axis=1)


def decode_row(words: UInt16[np.ndarray, " W"], inputs: int) -> Int8[np.ndarray, " I"]:
    """Values of one row from its own codewords, one after another: the reference of ``decode``."""
    runs, lengths, _ = dictionary()
    out = list[int]()
    for word in words.tolist():
        for place in range(int(lengths[word])):
            pair = int(runs[place // HALF, word]) >> 4 * (place % HALF) & 15
            out += [pair % 3 - 1, pair // 3 - 1]
    return np.asarray(out[:inputs], np.int8)


def decode(words: UInt16[Array, " W"], rows: int, inputs: int) -> Int8[Array, "R I"]:
    """Values of all rows from their codewords, in JAX; shapes do not depend on the values.

    Rows have a known number of pairs, so that sums of the codewords' lengths say where each begins.

    Args:
        words: codewords of the rows, row after row; those after the last row are ignored.
    """
    table = dictionary()
    each = -(-inputs // 2)
    lengths = jnp.asarray(table.lengths.astype(np.uint8))[words].astype(jnp.int32)
    starts = jnp.cumsum(lengths) - lengths
    marks = jnp.zeros(rows * each, jnp.int32).at[starts].add(1, mode="drop")
    word = jnp.cumsum(marks) - 1
    place = jnp.arange(rows * each) - starts[word]
    halves = jnp.asarray(table.runs)
    own = words[word]
    runs = jnp.where(place < HALF, halves[0][own], halves[1][own])
    pair = (runs >> (4 * (place % HALF)).astype(jnp.uint32) & 15).astype(jnp.int8)
    values = jnp.stack([pair % 3 - 1, pair // 3 - 1], axis=-1)
    return values.reshape(rows, 2 * each)[:, :inputs]


def entropy(zeros: Float[np.ndarray, "..."] | float) -> Float[np.ndarray, "..."] | float:
    """Bits of a value that is 0 with a probability and else 1 or -1 alike: no code of independent values has less."""
    other = 1 - np.asarray(zeros, np.float64)
    return -(zeros * np.log2(zeros) + other * np.log2(other / 2))
