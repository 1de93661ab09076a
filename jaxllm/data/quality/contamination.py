"""Decontamination: finds evaluation items in training data by shared word n-grams.

The rule of GPT-3 (arXiv:2005.14165, appendix C) with one length: an evaluation item is found in the data if any 13-gram
of its words is; a shorter item, if all of it is. N-grams that more than half of the items share are the wording of a
prompt, and are ignored.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jaxllm.data.quality.word_shingles import ngram_hashes, words

NGRAM_WORDS = 13
MIN_WORDS = 5
"""Items with fewer words are not searched for: they would be found everywhere."""
COMMON_SHARE = 0.5
"""Share of the items from which on a shared n-gram counts as the wording of a prompt."""


@dataclass(frozen=True)
class Contamination:
    """Contamination of training data by an evaluation.

    found: item index -> share of its n-grams that the data contains. documents: indices of those that contain any.
    items: items of the evaluation. short: items that are too short to be searched for.
    """

    found: dict[int, float]
    documents: list[int]
    items: int
    short: int

    @property
    def share(self) -> float:
        """Share of contaminated items, 0 to 1, among those that were searched for."""
        return len(self.found) / max(1, self.items - self.short)


def find_contamination(
    documents: Iterable[str], evaluation: Iterable[str], *, ngram_words: int = NGRAM_WORDS
) -> Contamination:
    """Searches documents for the items of an evaluation by word n-grams.

    Raises ValueError for an evaluation without items, or n-grams of fewer than two words.
    """
    if ngram_words < 2:
        raise ValueError(f"n-grams of {ngram_words} words are in every text; use 2 words or more")
    texts = list(evaluation)
    sizes = [len(words(text)) for text in texts]
    items = [
        np.unique(ngram_hashes(t, ngram_words)) if n >= MIN_WORDS else None for t, n in zip(texts, sizes, strict=True)
    ]
    if not items:
        raise ValueError("the evaluation has no items")
    owners: dict[int, list[int]] = {}
    for number, grams in enumerate(items):
        for gram in [] if grams is None else grams.tolist():
            owners.setdefault(gram, []).append(number)
    looked_for = sum(grams is not None for grams in items)
    wording = {gram for gram, own in owners.items() if len(own) > max(1, COMMON_SHARE * looked_for)}
    runs = sorted({min(ngram_words, size) for size in sizes if size >= MIN_WORDS})
    known = np.array(sorted(set(owners) - wording), np.uint64)
    seen: set[int] = set()
    holding = []
    for number, text in enumerate(documents):
        hits: set[int] = set()
        for size in runs:
            hits |= set(np.intersect1d(ngram_hashes(text, size), known).tolist())
        if hits:
            holding.append(number)
            seen |= hits
    found: dict[int, float] = {}
    for number, grams in enumerate(items):
        own = set() if grams is None else set(grams.tolist()) - wording
        if own & seen:
            found[number] = len(own & seen) / len(own)
    return Contamination(found, holding, len(items), len(items) - looked_for)
