"""Corpus statistics: lengths and languages of documents.

The language is guessed by a simple rule: the script of most letters; for Latin and Cyrillic, the language whose twenty
commonest words have the largest share of the text. It serves to count the composition of a corpus, not to label a
sentence: short texts are often undecided, "latin".
"""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jaxllm.data.quality.word_shingles import words

MIN_COMMON_SHARE = 0.06
"""Least share of a text's words that must be among a language's common words."""

_COMMON = {
    "en": "the of and to in a is that it was for on with as he be at by i this you are not",
    "de": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als",
    "fr": "de la le et les des en un du une que est pour qui dans par plus pas au sur",
    "es": "de la que el en y a los se del las un por con no una su para es al",
    "it": "di e il la che in a per un è del non le con i si una da sono al",
    "pt": "de a o que e do da em um para é com não uma os no se na por mais",
    "nl": "de en van het een in is dat op te zijn met voor niet aan er om ook als dan",
    "pl": "w i z na się do nie że jest to o jak ale po co tak za od przez dla",
    "ru": "и в не на я что он с как это по но а из у за от то так же",  # noqa: RUF001
    "uk": "і в не на я що він з як це та але до у за від то так же є",  # noqa: RUF001
}
_LISTS = {language: frozenset(listed.split()) for language, listed in _COMMON.items()}
_SCRIPTS = {
    "LATIN": "latin", "CYRILLIC": "cyrillic", "GREEK": "el", "ARABIC": "ar", "HEBREW": "he", "DEVANAGARI": "hi",
    "HIRAGANA": "ja", "KATAKANA": "ja", "HANGUL": "ko", "CJK": "zh", "THAI": "th", "BENGALI": "bn", "TAMIL": "ta",
}  # fmt: skip
_SAMPLE = 4000  # characters examined


@lru_cache(maxsize=1 << 16)
def _script(letter: str) -> str:
    return unicodedata.name(letter, "").split(" ")[0].split("-")[0]


def detect_language(text: str) -> str:
    """Language code of a text; "latin" or "cyrillic" if the words do not decide, "none" without letters."""
    sample = text[:_SAMPLE]
    if sample.isascii():
        if not any(letter.isalpha() for letter in sample):
            return "none"
        script = "latin"
    else:
        count = Counter(_SCRIPTS.get(_script(letter), "other") for letter in sample if letter.isalpha())
        if not count:
            return "none"
        script = "ja" if count["ja"] * 5 > count.total() else count.most_common(1)[0][0]
    if script not in ("latin", "cyrillic"):
        return script
    listed = words(sample)
    share = {name: sum(word in common for word in listed) / max(1, len(listed)) for name, common in _LISTS.items()}
    best = max(share, key=lambda name: share[name])
    return best if share[best] >= MIN_COMMON_SHARE else script


@dataclass(frozen=True)
class LengthStats:
    """Length statistics of a set of documents: count, sum, extremes and percentiles (each a length that occurs)."""

    count: int
    total: int
    least: int
    p50: int
    p90: int
    p99: int
    most: int


def length_stats(values: Sequence[int] | np.ndarray) -> LengthStats:
    """Length statistics of documents. Raises ValueError for an empty set."""
    ordered = np.sort(np.asarray(values, np.int64))
    if not len(ordered):
        raise ValueError("there are no documents, so there are no lengths")
    p50, p90, p99 = (int(ordered[min(len(ordered) - 1, int(share * len(ordered)))]) for share in (0.5, 0.9, 0.99))
    return LengthStats(len(ordered), int(ordered.sum()), int(ordered[0]), p50, p90, p99, int(ordered[-1]))


def count_languages(texts: Iterable[str]) -> dict[str, int]:
    """Number of documents by language, commonest first."""
    return dict(Counter(map(detect_language, texts)).most_common())
