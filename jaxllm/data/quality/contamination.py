"""Text of evaluations in training data, by runs of words that both have.

GPT-3's rule (arXiv:2005.14165, appendix C) with one length: an item of an evaluation is found in the data if any run of
13 of its words is; an item with fewer words, if all of it is. What half of the items have in common is a prompt's
wording, and is left out.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jaxllm.data.quality.word_shingles import ngram_hashes, words

NGRAM_WORDS = 13
MIN_WORDS = 5
"""Items with fewer words are not looked for: they are found everywhere."""
COMMON_SHARE = 0.5


@dataclass(frozen=True)
class Contamination:
    """found: per item of the evaluation, the share of its runs that the data holds. documents: those that hold any.

    short: items that are too short to be looked for.
    """

    found: dict[int, float]
    documents: list[int]
    items: int
    short: int

    @property
    def share(self) -> float:
        """Of the items that were looked for, those of which any run was found."""
        return len(self.found) / max(1, self.items - self.short)


def find_contamination(
    documents: Iterable[str], evaluation: Iterable[str], *, ngram_words: int = NGRAM_WORDS
) -> Contamination:
    """Looks for the items of an evaluation in documents.

    Raises ValueError for an evaluation without items, or runs of fewer than two words.
    """
    if ngram_words < 2:
        raise ValueError(f"run is {ngram_words}; runs of one word are in every text, give 2 or more")
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
