"""Texts of a given form: which tokens may come next, as bits, from the host.

The parser is llguidance (MIT; ``pip install jaxllm[grammar]``): it needs no torch, has one wheel for all Pythons, reads
JSON schemas, regular expressions and grammars, works its automaton out as the text goes on (so a grammar is ready in
milliseconds), and counts its work, so that no grammar takes longer than its limits.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxllm.text import Tokenizer

Kind = Literal["json_schema", "regex", "ebnf", "choice"]
KEPT = 64
"""Grammars of an engine that are found again."""
LIMITS = {"initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "max_grammar_size": 200_000}
"""Of llguidance: units of work for a grammar (50,000 take about a millisecond), for a token (14,000), and symbols."""


@dataclass(frozen=True)
class Grammar:
    """The form of a text. Use the constructors.

    Attributes:
        kind: of what is in ``text``.
        text: a JSON schema, a regular expression, a grammar in Lark's notation or with ``::=`` (GBNF), or a JSON list
            of texts.
    """

    kind: Kind
    text: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON without spaces that a schema validates; ``{}`` for any."""
        return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """The whole text matches."""
        return cls("regex", pattern)

    @classmethod
    def ebnf(cls, rules: str) -> Grammar:
        """What ``start`` (Lark), or ``root`` (with ``::=``), derives."""
        return cls("ebnf", rules)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of these texts."""
        return cls("choice", json.dumps(list(texts)))

    def __post_init__(self) -> None:
        if self.kind not in ("json_schema", "regex", "ebnf", "choice"):
            raise ValueError(f"grammar: kind = {self.kind!r}; choose json_schema, regex, ebnf or choice.")
        if self.kind == "choice" and not all(json.loads(self.text) or [""]):
            raise ValueError("grammar: a choice needs one or more texts, none of them empty.")


def mask_width(vocab: int) -> int:
    """Pieces of 32 bits of a mask over a vocabulary."""
    return -(-vocab // 32)


class Guide:
    """Where a text is in its grammar.

    Attributes:
        mask: int32[U], the tokens that may come next; None where none may.
        error: why the parser gave up; empty otherwise.
    """

    def __init__(self, matcher: Any, width: int):
        self._matcher, self._width = matcher, width
        self.error = ""
        self.mask: np.ndarray | None = None
        self._look()

    def copy(self) -> Guide:
        """One more, at the same place."""
        made = Guide.__new__(Guide)
        made.__dict__ = {**self.__dict__, "_matcher": self._matcher.deep_copy()}
        return made

    def advance(self, token: int) -> bool:
        """A token was made; whether another may come."""
        self._matcher.consume_token(token)
        self._look()
        return self.mask is not None

    @property
    def accepts(self) -> bool:
        """Whether the text is whole."""
        return not self.error and self._matcher.is_accepting()

    def _look(self) -> None:
        self.mask = None
        if not self._matcher.is_error() and not self._matcher.is_stopped():
            bits = self._matcher.compute_bitmask()
            if not self._matcher.is_error():
                found = np.frombuffer(bits, np.int32)[: self._width]  # it may have a piece to spare
                self.mask = np.pad(found, (0, self._width - len(found)))
        if self._matcher.is_error():
            self.error = self._matcher.get_error().strip().splitlines()[0]


class Grammars:
    """Grammars of one tokenizer; for any thread.

    Args:
        tokenizer: of the texts.
        vocab: tokens of the model.

    Raises:
        ValueError: no tokenizer, or one without a token to end a text with.
        ImportError: llguidance is missing; says how to install it.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab: int):
        if tokenizer is None or not tokenizer.stop_ids:
            raise ValueError("a grammar needs an engine with a tokenizer that has a token to end a text with.")
        try:
            self._library: Any = importlib.import_module("llguidance")
        except ImportError as error:
            raise ImportError("a grammar needs llguidance: pip install 'jaxllm[grammar]'.") from error
        self._width = mask_width(vocab)
        self._limits = self._library.LLParserLimits(**LIMITS, verbose_errors=False)
        wrapped = self._library.TokenizerWrapper(_Words(tokenizer))
        self._tokenizer = self._library.LLTokenizer(wrapped, eos_token=list(tokenizer.stop_ids))
        self._kept: OrderedDict[Grammar, Guide] = OrderedDict()
        self._lock = threading.Lock()

    def guide(self, grammar: Grammar) -> Guide:
        """At the beginning of a text.

        Raises:
            ValueError: the grammar is wrong, cannot be had, or takes too much work; says why.
        """
        with self._lock:
            if (found := self._kept.get(grammar)) is not None:
                self._kept.move_to_end(grammar)
                return found.copy()
        try:
            told = self._told(grammar)
        except ValueError as error:
            raise ValueError(f"grammar ({grammar.kind}): {error}.") from None
        made = Guide(self._library.LLMatcher(self._tokenizer, told, limits=self._limits), self._width)
        if made.error or made.mask is None:
            raise ValueError(f"grammar ({grammar.kind}): {made.error or 'no token can begin such a text'}.")
        with self._lock:
            self._kept[grammar] = made
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return made.copy()

    def _told(self, grammar: Grammar) -> str:
        matcher = self._library.LLMatcher
        if grammar.kind == "json_schema":
            return matcher.grammar_from_json_schema(grammar.text, overrides={"whitespace_flexible": False})
        if grammar.kind == "regex":
            return matcher.grammar_from_regex(grammar.text)
        if grammar.kind == "choice":
            return matcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(grammar.text))))
        rules = grammar.text
        if "::=" in rules:
            rules = importlib.import_module("llguidance.gbnf_to_lark").any_to_lark(rules)
        return matcher.grammar_from_lark(rules)


class _Words:
    """A tokenizer as llguidance asks for it."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = tokenizer.stop_ids[0], tokenizer.bos_id
        names = tokenizer.special_names
        self.tokens = [
            names[i].encode() if i in names else word or f"<unused {i}>".encode()
            for i, word in enumerate(tokenizer.token_bytes)
        ]
        self.special_token_ids = sorted({*names, *(i for i, word in enumerate(tokenizer.token_bytes) if not word)})

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text
        return [int(i) for i in self._tokenizer.encode(text)]
