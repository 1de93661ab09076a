"""Document rules: language, quality rules of published corpora, block lists, and masks of personal data.

The rules are those of datatrove, each with its own name for why a document is dropped; languages are told by py3langid,
whose model is in its package. Words are what whitespace separates, as in the published rules, unless datatrove's
tokenizer is chosen: its English one, spaCy's, counts each mark as a word and takes most of the time.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxllm.config import ConfigError, closest
from jaxllm.data.prepare.corpus_config import Blocklist, CorpusConfig, LanguageRule, PIIMasks, QualityRules
from jaxllm.data.quality.language import detect_language, known_languages
from jaxllm.files import DataError

INSTALL = "pip install 'jaxllm[corpus]'"
PUBLISHED = {"fineweb": {"char_duplicates_ratio": 0.1}}
"""Arguments in which the published definition of a rule differs from datatrove's default."""
Verdict = tuple[str, str]
"""(text, rule): the text as the rules left it, and the rule that drops the document, or ''."""
Rule = Callable[[str], Verdict]

_LETTER = re.compile(r"\w")
_UNSPACED = re.compile(r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]")
_SENTENCE = re.compile(r"(?<=[.!?])[\"')\]’”]*\s+")  # noqa: RUF001


class DocumentRules:
    """Rules of a corpus that look at one document: language, quality, block list, masks; in this order."""

    def __init__(self, config: CorpusConfig):
        self._rules: list[Rule] = []
        if config.language:
            self._rules.append(language_rule(config.language))
        if config.quality:
            self._rules += quality_rules(config.quality)
        if config.blocklist:
            self._rules.append(blocklist_rule(config.blocklist))
        self._masks = masks(config.pii) if config.pii else {}

    def apply(self, text: str) -> tuple[str, str, list[str]]:
        """(text, rule, masks): the text to keep, or the rule that drops it; and the masks that changed it."""
        for rule in self._rules:
            text, dropped = rule(text)
            if dropped:
                return text, dropped, []
        changed = []
        for name, mask in self._masks.items():
            masked = mask(text)
            if masked != text:
                text = masked
                changed.append(name)
        return text, "" if text.strip() else "no_text", changed


def language_rule(config: LanguageRule) -> Rule:
    """Language rule: drops documents by `language_CODE`, or `language_undecided`. Raises ConfigError for a code that
    py3langid does not know."""
    known = known_languages()
    for code in config.keep:
        if code not in known:
            raise ConfigError(f"language.keep: no language {code!r}; legal: {', '.join(known)}")

    def rule(text: str) -> Verdict:
        code = detect_language(text, config.min_probability)
        return text, "" if code in config.keep else f"language_{code}"

    return rule


def blocklist_rule(config: Blocklist) -> Rule:
    """Block list rule: drops documents by `blocked_word` (C4, arXiv:1910.10683, section 2.2).

    A word counts where no letter or digit is beside it; one without spaces between words (Chinese, Japanese, Thai),
    anywhere. Raises DataError for a list that cannot be read or is empty.
    """
    listed: set[str] = set()
    for name in config.files:
        try:
            lines = Path(name).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"blocklist.files: {name}: {getattr(error, 'strerror', None) or error}") from None
        listed |= {line.strip().lower() for line in lines} - {""}
    if not listed:
        raise DataError(f"blocklist.files: no words in {', '.join(config.files)}")
    parts = [
        re.escape(word) if _UNSPACED.search(word) else rf"(?<!\w){re.escape(word)}(?!\w)" for word in sorted(listed)
    ]
    pattern = re.compile("|".join(parts))

    def rule(text: str) -> Verdict:
        return text, "blocked_word" if pattern.search(text.lower()) else ""

    return rule


def quality_rules(config: QualityRules) -> Iterator[Rule]:
    """Quality rules, in order. Raises ConfigError for an argument that a rule does not have."""
    datatrove = _datatrove()
    words = whitespace_words(datatrove) if config.words == "whitespace" else config.language
    for name in config.rules:
        kind = datatrove[name]
        given = PUBLISHED.get(name, {}) | getattr(config, name)
        legal = [key for key in inspect.signature(kind).parameters if key not in ("exclusion_writer", "language")]
        for key in given:
            if key not in legal:
                raise ConfigError(
                    f"quality.{name}: no argument {key!r}.{closest(key, legal)} Legal: {', '.join(legal)}"
                )
        yield _quality_rule(name, kind(**given, language=words), datatrove["Document"])


def _quality_rule(name: str, rule: Any, document: Any) -> Rule:
    def apply(text: str) -> Verdict:
        if not _LETTER.search(text):
            return text, "no_words"  # the ratios of a text without words are undefined
        one = document(text=text, id="")
        found = rule.filter(one)
        kept, why = found if isinstance(found, tuple) else (found, "")
        if kept:
            return one.text, ""
        why = re.sub(r"\W+", "_", why).removeprefix("gopher_")
        return text, f"{name}_{why}" if why else name

    return apply


def masks(config: PIIMasks) -> dict[str, Callable[[str], str]]:
    """Masks by name; each is one text, because datatrove's default cycles through several by the order of documents."""
    formatter = _datatrove()["PIIFormatter"](
        remove_emails=config.emails,
        remove_ips=config.ips,
        email_replacement=config.email_mask,
        ip_replacement=config.ip_mask,
    )
    found = {}
    if config.emails:
        found["emails"] = formatter.emails_replacer.replace
    if config.ips:
        found["ips"] = formatter.ip_replacer.replace
    return found


def _datatrove() -> dict[str, Any]:
    try:
        from datatrove.data import Document
        from datatrove.pipeline.filters.c4_filters import C4QualityFilter
        from datatrove.pipeline.filters.fineweb_quality_filter import FineWebQualityFilter
        from datatrove.pipeline.filters.gopher_quality_filter import GopherQualityFilter
        from datatrove.pipeline.filters.gopher_repetition_filter import GopherRepetitionFilter
        from datatrove.pipeline.formatters.pii import PIIFormatter
        from datatrove.utils.word_tokenizers import WordTokenizer
    except ImportError as error:
        raise DataError(f"[quality] and [pii] need the package datatrove ({error}): {INSTALL}") from None
    return {
        "Document": Document,
        "WordTokenizer": WordTokenizer,
        "PIIFormatter": PIIFormatter,
        "gopher_repetition": GopherRepetitionFilter,
        "gopher_quality": GopherQualityFilter,
        "c4": C4QualityFilter,
        "fineweb": FineWebQualityFilter,
    }


def whitespace_words(datatrove: dict[str, Any]) -> Any:
    """Word tokenizer by whitespace, in the interface of datatrove; sentences end in . ! or ? before whitespace."""

    class WhitespaceWords(datatrove["WordTokenizer"]):
        def word_tokenize(self, text: str) -> list[str]:
            return text.split()

        def sent_tokenize(self, text: str) -> list[str]:
            return [text[begin:end] for begin, end in self.span_tokenize(text)]

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            cuts = [0, *(match.end() for match in _SENTENCE.finditer(text)), len(text)]
            return [(a, b) for a, b in itertools.pairwise(cuts) if text[a:b].strip()]

    return WhitespaceWords()
