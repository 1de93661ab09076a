"""Word n-grams (shingles) as 64-bit hashes, used by deduplication and decontamination."""

import hashlib
import re
from functools import lru_cache

import numpy as np
from jaxtyping import UInt64

from jaxllm.data.shuffle import splitmix64

_WORD = re.compile(r"\w+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def words(text: str) -> list[str]:
    """Words of a text: lower-case runs of letters, digits and underscores."""
    return _WORD.findall(text.lower())


@lru_cache(maxsize=1 << 18)
def _hashed(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def ngram_hashes(text: str, n: int) -> UInt64[np.ndarray, " grams"]:
    """Hashes of all word n-grams of a text, in order; a text with fewer than `n` words has one hash of all of them."""
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
