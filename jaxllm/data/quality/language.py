"""Languages of texts, told from their bytes by py3langid (Lui and Baldwin 2012), whose model is in its package."""

from functools import lru_cache
from typing import Any

from py3langid.langid import MODEL_FILE, LanguageIdentifier

SAMPLE_CHARACTERS = 10_000
"""Characters of a text from which its language is told."""
MIN_PROBABILITY = 0.65
"""Probability below which a language is undecided."""
UNDECIDED = "undecided"


@lru_cache(maxsize=1)
def language_identifier() -> Any:
    """Language identifier of py3langid, with probabilities that sum to 1."""
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def known_languages() -> list[str]:
    """Codes of the languages that can be told, sorted."""
    return sorted(language_identifier().labels)


def detect_language(text: str, min_probability: float = MIN_PROBABILITY) -> str:
    """Code of a text's language (ISO 639-1), or "undecided" if its probability is below ``min_probability``."""
    code, probability = language_identifier().classify(text[:SAMPLE_CHARACTERS])
    return code if probability >= min_probability else UNDECIDED
