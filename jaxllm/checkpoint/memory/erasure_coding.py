"""Erasure coding: Reed-Solomon over GF(256), with k data pieces and m parity pieces, any k of which restore the data.

The generator is systematic and made of a Cauchy matrix, each of whose square submatrices is invertible; its columns are
scaled so that the first row is ones, and one parity piece is the XOR of the data. One byte of each piece is one symbol;
numpy looks products up in a table.

    Blömer et al., An XOR-based erasure-resilient coding scheme (ICSI TR-95-048); Plank, A tutorial on Reed-Solomon
    coding (1997).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np

_POLYNOMIAL = 0x11D  # x^8 + x^4 + x^3 + x^2 + 1, primitive


@functools.cache
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """(products [256, 256], inverses [256]) of the field."""
    power, log = np.zeros(510, np.int64), np.zeros(256, np.int64)
    value = 1
    for exponent in range(255):
        power[exponent] = power[exponent + 255] = value
        log[value] = exponent
        value <<= 1
        if value & 256:
            value ^= _POLYNOMIAL
    products = power[log[:, None] + log[None, :]].astype(np.uint8)
    products[0, :] = products[:, 0] = 0
    inverses = np.zeros(256, np.uint8)
    inverses[1:] = power[255 - log[1:]]
    return products, inverses


def gf_multiply(coefficient: int, data: np.ndarray) -> np.ndarray:
    """Product of a piece of data and an element of the field."""
    return data if coefficient == 1 else _tables()[0][coefficient][data]


@functools.cache
def parity_coefficients(data: int, parity: int) -> np.ndarray:
    """Coefficients [parity, data]: parity piece i is the sum over j of coefficient [i, j] times data piece j.

    Raises:
        ValueError: more than 256 pieces in all, or no data pieces.
    """
    if data < 1 or parity < 0 or data + parity > 256:
        raise ValueError(f"{data} pieces of data and {parity} of parity: a code over GF(256) has at most 256 in all.")
    products, inverses = _tables()
    x, y = np.arange(parity)[:, None], parity + np.arange(data)[None, :]
    cauchy = inverses[x ^ y]
    # Columns may be scaled freely: it takes no submatrix its inverse.
    return products[cauchy, inverses[cauchy[:1]]] if parity else cauchy


def encode(pieces: Sequence[np.ndarray], parity: int) -> list[np.ndarray]:
    """Parity pieces of data pieces of one length, all uint8."""
    table = parity_coefficients(len(pieces), parity)
    return [_combine(table[i], pieces) for i in range(parity)]


def decode(known: Mapping[int, np.ndarray], data: int, parity: int) -> list[np.ndarray]:
    """Restores all data pieces from any `data` of the pieces.

    Args:
        known: piece by number: 0 to data - 1 are data, then parity.

    Raises:
        ValueError: too few pieces are known.
    """
    missing = [j for j in range(data) if j not in known]
    rows = [i for i in range(parity) if data + i in known][: len(missing)]
    if len(rows) < len(missing):
        raise ValueError(f"{len(known)} pieces of {data} + {parity} are known, and {data} are needed.")
    if not missing:
        return [known[j] for j in range(data)]
    table = parity_coefficients(data, parity)
    # What parity says of the missing pieces alone: A x = b, with A square and invertible.
    right = []
    for i in rows:
        there = [j for j in range(data) if j in known]
        right.append(_combine([1, *(int(table[i, j]) for j in there)], [known[data + i], *(known[j] for j in there)]))
    inverse = _invert(table[np.ix_(rows, missing)])
    found = {j: _combine(inverse[n], right) for n, j in enumerate(missing)}
    return [known[j] if j in known else found[j] for j in range(data)]


def _combine(factors: Sequence[int] | np.ndarray, pieces: Sequence[np.ndarray]) -> np.ndarray:
    total = np.zeros_like(pieces[0])
    for factor, piece in zip(factors, pieces, strict=True):
        total ^= gf_multiply(int(factor), piece)
    return total


def _invert(matrix: np.ndarray) -> np.ndarray:
    """Inverse of a small square matrix over the field, by Gauss-Jordan elimination."""
    products, inverses = _tables()
    size = len(matrix)
    work = np.concatenate([matrix, np.eye(size, dtype=np.uint8)], axis=1)
    for column in range(size):
        pivot = column + int(np.argmax(work[column:, column] != 0))
        work[[column, pivot]] = work[[pivot, column]]
        work[column] = products[inverses[work[column, column]], work[column]]
        for row in range(size):
            if row != column:
                work[row] ^= products[work[row, column], work[column]]
    return work[:, size:]
