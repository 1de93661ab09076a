"""Duplicates: equal texts, and nearly equal ones by MinHash (Broder 1997) and LSH bands (Indyk and Motwani 1998).

A text is the set of its runs of five words. A signature has one number for each of 128 hash functions, the smallest
hash of the set: two texts agree in a place with a probability equal to their Jaccard similarity, so the share of equal
places estimates it with a standard deviation of at most 1 / (2 sqrt(128)) = 0.044. Texts that agree in a whole band of
places are compared; the number of places in a band is chosen such that pairs at the threshold are found.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, UInt64

from jaxllm.data.quality.word_shingles import ngram_hashes, words
from jaxllm.data.shuffle import splitmix64

NUM_HASHES = 128
SHINGLE_WORDS = 5
"""Words in a run."""
MIN_RECALL = 0.99
"""Least probability that a pair at the threshold shares a band."""


@dataclass(frozen=True, eq=False)
class Duplicates:
    """keep[d]: whether document d is the first of its kind. of[d]: the document it repeats; itself where it is kept.

    similarity[d]: estimated Jaccard similarity with that document; 1 for equal texts.
    """

    keep: np.ndarray
    duplicate_of: Int[np.ndarray, " documents"]
    similarity: Float[np.ndarray, " documents"]
    exact: int
    near: int


def minhash_signature(text: str) -> UInt64[np.ndarray, "128"]:
    """MinHash of the set of runs of words; all ones for a text without words."""
    grams = np.unique(ngram_hashes(text, SHINGLE_WORDS))
    if not len(grams):
        return np.full(NUM_HASHES, np.iinfo(np.uint64).max, np.uint64)
    out = np.full(NUM_HASHES, np.iinfo(np.uint64).max, np.uint64)
    for begin in range(0, len(grams), 4096):  # bounds the table of hashes
        part = splitmix64(grams[None, begin : begin + 4096] ^ _SALTS[:, None])
        out = np.minimum(out, part.min(axis=1))
    return out


_SALTS = splitmix64(np.arange(1, NUM_HASHES + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def rows_per_band(threshold: float) -> int:
    """The most places in a band with which a pair at `threshold` shares one with probability `FOUND` or more."""
    legal = [r for r in range(1, NUM_HASHES + 1) if NUM_HASHES % r == 0]
    good = [r for r in legal if 1 - (1 - threshold**r) ** (NUM_HASHES // r) >= MIN_RECALL]
    return max(good, default=1)


def find_duplicates(texts: Iterable[str], *, threshold: float | None = 0.8) -> Duplicates:
    """Finds later documents that repeat an earlier one.

    Texts are equal if their words are (case, punctuation and spacing play no part).

    Args:
        threshold: Jaccard similarity from which on texts are nearly equal; None finds equal texts only.

    Raises ValueError for a threshold outside (0, 1].
    """
    if threshold is not None and not 0 < threshold <= 1:
        raise ValueError(f"threshold is {threshold}; legal: above 0 and up to 1, or None for equal texts only")
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
