"""Deduplication: exact, and near by MinHash (Broder 1997) with LSH bands (Indyk and Motwani 1998).

A text is the set of its 5-word shingles. Its MinHash signature is the smallest hash of the set under each of 128 hash
functions: two texts agree at a position with a probability equal to their Jaccard similarity, so the share of equal
positions estimates it with a standard deviation of at most 1 / (2 sqrt(128)) = 0.044. Texts that agree in a whole band
of positions are compared; the size of a band is chosen so that pairs at the threshold are found.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, UInt64

from jaxllm.data.quality.word_shingles import ngram_hashes, words
from jaxllm.data.shuffle import splitmix64

NUM_HASHES = 128
"""Hash functions, the length of a signature."""
SHINGLE_WORDS = 5
"""Words in a shingle."""
MIN_RECALL = 0.99
"""Least probability that a pair at the threshold shares a band."""


@dataclass(frozen=True, eq=False)
class Duplicates:
    """Result of deduplication.

    keep[d]: whether document d is kept, as the first of its kind, bool.
    duplicate_of[d]: index of the document that d repeats; d itself if it is kept.
    similarity[d]: estimated Jaccard similarity with that document; 1 for equal texts.
    exact, near: numbers of exact and near duplicates.
    """

    keep: np.ndarray
    duplicate_of: Int[np.ndarray, " documents"]
    similarity: Float[np.ndarray, " documents"]
    exact: int
    near: int


def minhash_signature(text: str) -> UInt64[np.ndarray, "128"]:
    """MinHash signature of a text's set of shingles; all bits are one for a text without words."""
    grams = np.unique(ngram_hashes(text, SHINGLE_WORDS))
    if not len(grams):
        return np.full(NUM_HASHES, np.iinfo(np.uint64).max, np.uint64)
    out = np.full(NUM_HASHES, np.iinfo(np.uint64).max, np.uint64)
    for begin in range(0, len(grams), 4096):  # bounds the memory of the hash table
        part = splitmix64(grams[None, begin : begin + 4096] ^ _SALTS[:, None])
        out = np.minimum(out, part.min(axis=1))
    return out


_SALTS = splitmix64(np.arange(1, NUM_HASHES + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def rows_per_band(threshold: float) -> int:
    """Largest LSH band with which a pair at `threshold` shares a band with probability `MIN_RECALL` or more."""
    legal = [r for r in range(1, NUM_HASHES + 1) if NUM_HASHES % r == 0]
    good = [r for r in legal if 1 - (1 - threshold**r) ** (NUM_HASHES // r) >= MIN_RECALL]
    return max(good, default=1)


def find_duplicates(texts: Iterable[str], *, threshold: float | None = 0.8) -> Duplicates:
    """Deduplication: finds later documents that repeat an earlier one.

    Texts are equal if their words are equal (case, punctuation and spacing do not matter).

    Args:
        threshold: Jaccard similarity from which on texts are near duplicates; None finds exact duplicates only.

    Raises ValueError for a threshold outside (0, 1].
    """
    if threshold is not None and not 0 < threshold <= 1:
        raise ValueError(f"threshold is {threshold}; legal: above 0 and up to 1, or None for exact duplicates only")
    first_with: dict[bytes, int] = {}
    of: list[int] = []
    similarity: list[float] = []
    bands: dict[tuple[int, bytes], list[int]] = {}
    signatures: dict[int, np.ndarray] = {}
    exact = near = 0
    rows = rows_per_band(threshold) if threshold is not None else 0
    for number, text in enumerate(texts):
        listed = words(text)
        key = hashlib.blake2b(" ".join(listed or [text]).encode(errors="surrogatepass"), digest_size=16).digest()
        same = first_with.setdefault(key, number)
        if same != number:
            exact += 1
            of.append(of[same])
            similarity.append(similarity[same])
            continue
        best, share = number, 1.0
        if threshold is not None and listed:
            own = minhash_signature(text)
            keys = [(band, own[band * rows : (band + 1) * rows].tobytes()) for band in range(NUM_HASHES // rows)]
            candidates = {one for key in keys for one in bands.get(key, ())}
            shares = {one: float((signatures[one] == own).mean()) for one in candidates}
            if shares and max(shares.values()) >= threshold:
                best, share = min(shares, key=lambda one: (-shares[one], one)), max(shares.values())
                near += 1
            else:
                signatures[number] = own
                for key in keys:
                    bands.setdefault(key, []).append(number)
        of.append(best)
        similarity.append(share)
    whole = np.array(of, np.int64)
    return Duplicates(whole == np.arange(len(whole)), whole, np.array(similarity), exact, near)
