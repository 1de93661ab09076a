"""Deduplication of documents in one process, by the keys and verdicts of `near_duplicates`.

A document is a duplicate if an earlier one, kept or not, has the same words or a Jaccard similarity of sets of 5-word
n-grams of `threshold` or more. Texts and keys lie in a temporary folder, so memory grows by a few bytes a document.
Corpora of many files and processes: `jaxllm data prepare`.
"""

import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from jaxllm.data.quality.near_duplicates import (
    BAND,
    EXACT,
    PAIR,
    BandKeys,
    SortedWriter,
    candidate_pairs,
    exact_keys,
    exact_pairs,
    partition,
    partition_count,
    similar_documents,
    unique_pairs,
)
from jaxllm.data.quality.word_shingles import words

NUM_HASHES = 128
"""Hash functions of a MinHash signature."""
SHINGLE_WORDS = 5
"""Words of an n-gram."""


@dataclass(frozen=True, eq=False)
class Duplicates:
    """Result of deduplication.

    keep[d]: whether document d has no earlier duplicate, bool.
    duplicate_of[d]: index of an earlier document that d repeats; d itself if it is kept.
    similarity[d]: Jaccard similarity with that document; 1 for equal words.
    exact, near: numbers of exact and near duplicates.
    """

    keep: np.ndarray
    duplicate_of: Int[np.ndarray, " documents"]
    similarity: Float[np.ndarray, " documents"]
    exact: int
    near: int


def find_duplicates(texts: Iterable[str], *, threshold: float | None = 0.8) -> Duplicates:
    """Finds documents that repeat an earlier one.

    Texts are equal if their words are equal (case, punctuation and spacing do not matter).

    Args:
        threshold: Jaccard similarity from which on texts are near duplicates; None finds exact duplicates only.

    Raises ValueError for a threshold outside (0, 1].
    """
    if threshold is not None and not 0 < threshold <= 1:
        raise ValueError(f"threshold is {threshold}; legal: above 0 and up to 1, or None for exact duplicates only")
    keys = None if threshold is None else BandKeys(threshold, NUM_HASHES, SHINGLE_WORDS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        exact, bands = SortedWriter(folder, "exact", EXACT), SortedWriter(folder, "bands", BAND)
        places = [0]
        with (folder / "texts").open("wb") as file:
            for number, text in enumerate(texts):
                listed = words(text)
                exact.add(*exact_keys(text, listed), number)
                if keys is not None:
                    bands.add(keys(listed), number)
                    places.append(places[-1] + file.write(json.dumps(text).encode()))
                else:
                    places.append(0)
        exact.close()
        bands.close()
        equal = _pairs(folder / "exact.npy", exact_pairs)
        count = len(places) - 1
        of, similarity = np.arange(count), np.ones(count)
        of[equal["id"].astype(int)] = equal["other"]
        if threshold is not None:
            pairs = _pairs(folder / "bands.npy", candidate_pairs)
            pairs = pairs[~np.isin(pairs["id"], equal["id"])]
            with (folder / "texts").open("rb") as file:

                def text_of(number: int) -> str:
                    file.seek(places[number])
                    return json.loads(file.read(places[number + 1] - places[number]))

                for number, other, share in similar_documents(pairs, text_of, threshold, SHINGLE_WORDS):
                    of[number], similarity[number] = other, share
    keep = of == np.arange(count)
    return Duplicates(keep, of, similarity, len(equal), int((~keep).sum()) - len(equal))


def _pairs(path: Path, find: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    count = partition_count(len(np.load(path, mmap_mode="r")))
    found = [find(partition([path], number, count)) for number in range(count)]
    return unique_pairs(np.concatenate([np.empty(0, PAIR), *found]))
