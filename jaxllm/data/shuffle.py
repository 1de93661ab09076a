"""Stateless shuffle: a pseudo-random permutation of an epoch that can be evaluated at any position.

It needs no state and no array of the whole order. It is a Feistel network over the smallest power of four that holds
the range, with cycle walking until the value is inside (Black and Rogaway 2002, "Ciphers with Arbitrary Finite
Domains"). numpy's permutations may change between versions; this order never changes, and the data cursor of an old
checkpoint relies on that.
"""

import numpy as np
from jaxtyping import Int, UInt64

ROUNDS = 8
NAME = "feistel-1"  # part of fingerprints: it must change if the order ever changes

_MASK64 = (1 << 64) - 1


def permute(index: Int[np.ndarray, " n"], size: int, *, seed: int, epoch: int) -> Int[np.ndarray, " n"]:
    """Shuffled positions, int64: for fixed (size, seed, epoch) a bijection of 0 .. size - 1, at the given indices."""
    if size == 1:
        return np.zeros_like(index, np.int64)
    half = max(2, (size - 1).bit_length() + 1 >> 1)
    keys = _round_keys(seed, epoch)
    place = _feistel(index.astype(np.uint64), half, keys)
    while (outside := np.flatnonzero(place >= size)).size:
        place[outside] = _feistel(place[outside], half, keys)
    return place.astype(np.int64)


def _feistel(value: np.ndarray, half: int, keys: list[int]) -> np.ndarray:
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    left, right = value >> shift, value & mask
    for key in keys:
        left, right = right, left ^ (splitmix64(right + np.uint64(key)) >> np.uint64(64 - half))
    return (left << shift) | right


def splitmix64(value: UInt64[np.ndarray, "..."]) -> UInt64[np.ndarray, "..."]:
    """Finaliser of SplitMix64 (Steele, Lea and Flood 2014): a bijective hash of uint64; its arithmetic wraps."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> list[int]:
    golden = np.uint64(0x9E3779B97F4A7C15)
    state = splitmix64(np.array([seed & _MASK64], np.uint64) + golden)
    state = splitmix64(state + np.array([epoch & _MASK64], np.uint64) * golden)
    return splitmix64(state + np.arange(1, ROUNDS + 1, dtype=np.uint64) * golden).tolist()
