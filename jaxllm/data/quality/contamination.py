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


class EvaluationIndex:
    """Word n-grams of the items of an evaluation, to be searched for in documents.

    items: n-gram hashes of each item; None for items that are too short to be searched for. `wording`: n-grams that
    more than half of the items share.

    Raises ValueError for an evaluation without items, or n-grams of fewer than two words.
    """

    def __init__(self, evaluation: Iterable[str], ngram_words: int = NGRAM_WORDS):
        if ngram_words < 2:
            raise ValueError(f"n-grams of {ngram_words} words are in every text; use 2 words or more")
        self.items: list[np.ndarray | None] = []
        sizes = set()
        for text in evaluation:
            size = len(words(text))
            if size >= MIN_WORDS:
                sizes.add(min(ngram_words, size))
            self.items.append(np.unique(ngram_hashes(text, ngram_words)) if size >= MIN_WORDS else None)
        if not self.items:
            raise ValueError("the evaluation has no items")
        self._owners: dict[int, list[int]] = {}
        for number, grams in enumerate(self.items):
            for gram in [] if grams is None else grams.tolist():
                self._owners.setdefault(gram, []).append(number)
        self.searched = sum(grams is not None for grams in self.items)
        most = max(1, COMMON_SHARE * self.searched)
        self.wording = {gram for gram, own in self._owners.items() if len(own) > most}
        self._known = np.array(sorted(set(self._owners) - self.wording), np.uint64)
        self._sizes = sorted(sizes)

    def hits(self, text: str) -> set[int]:
        """Hashes of the n-grams of a text that items have."""
        found: set[int] = set()
        for size in self._sizes:
            found |= set(np.intersect1d(ngram_hashes(text, size), self._known).tolist())
        return found

    def shared(self, text: str) -> list[int]:
        """Indices of the items that share an n-gram with a text."""
        return sorted({item for gram in self.hits(text) for item in self._owners[gram]})


def find_contamination(
    documents: Iterable[str], evaluation: Iterable[str], *, ngram_words: int = NGRAM_WORDS
) -> Contamination:
    """Searches documents for the items of an evaluation by word n-grams.

    Raises ValueError for an evaluation without items, or n-grams of fewer than two words.
    """
    index = EvaluationIndex(evaluation, ngram_words)
    seen: set[int] = set()
    holding = []
    for number, text in enumerate(documents):
        if hits := index.hits(text):
            holding.append(number)
            seen |= hits
    found: dict[int, float] = {}
    for number, grams in enumerate(index.items):
        own = set() if grams is None else set(grams.tolist()) - index.wording
        if own & seen:
            found[number] = len(own & seen) / len(own)
    return Contamination(found, holding, len(index.items), len(index.items) - index.searched)
