"""Text as words, and runs of words as 64-bit hashes: what duplicates and contamination are found by."""

import hashlib
import re
from functools import lru_cache

import numpy as np
from jaxtyping import UInt64

_WORD = re.compile(r"\w+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def words(text: str) -> list[str]:
    """Lower-case runs of letters, digits and underscores."""
    return _WORD.findall(text.lower())


@lru_cache(maxsize=1 << 18)
def _hashed(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def ngram_hashes(text: str, n: int) -> UInt64[np.ndarray, " grams"]:
    """A hash of every run of `n` words, in order; of a shorter text one hash of all its words."""
    listed = words(text)
    if not listed:
        return np.empty(0, np.uint64)
    each = np.array([_hashed(word) for word in listed], np.uint64)
    n = min(n, len(each))
    count = len(each) - n + 1
    out = np.zeros(count, np.uint64)
    for place in range(n):
        out = splitmix64(out * _MULTIPLIER + each[place : place + count])
    return out


def splitmix64(value: UInt64[np.ndarray, "..."]) -> UInt64[np.ndarray, "..."]:
    """The finaliser of SplitMix64; uint64 arithmetic wraps."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
