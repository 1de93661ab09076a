"""Guided decoding: grammars that a completion must match, as bit masks of the legal next tokens, computed on the host.

The parser is llguidance (MIT; ``pip install jaxllm[grammar]``): it needs no torch, has one wheel for all Python
versions, reads JSON schemas, regular expressions and EBNF grammars, builds its automaton lazily (so a grammar is ready
in milliseconds), and limits its work, so that no grammar takes longer than its limits.
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

GrammarKind = Literal["json_schema", "regex", "ebnf", "choice"]
CACHED_GRAMMARS = 64
"""Compiled grammars that an engine keeps."""
PARSER_LIMITS = {"initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "max_grammar_size": 200_000}
"""Limits of llguidance: work per grammar (50,000 units take about a millisecond) and token (14,000), and symbols."""


@dataclass(frozen=True)
class Grammar:
    """Grammar that a completion must match. Use the constructors.

    Attributes:
        kind: kind of ``text``.
        text: a JSON schema, a regular expression, an EBNF grammar in Lark's notation or with ``::=`` (GBNF), or a JSON
            list of strings.
    """

    kind: GrammarKind
    text: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON without whitespace that is valid by a schema; ``{}`` for any JSON."""
        return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def ebnf(cls, rules: str) -> Grammar:
        """Text derived from ``start`` (Lark) or ``root`` (with ``::=``)."""
        return cls("ebnf", rules)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of these strings."""
        return cls("choice", json.dumps(list(texts)))

    def __post_init__(self) -> None:
        if self.kind not in ("json_schema", "regex", "ebnf", "choice"):
            raise ValueError(f"grammar: kind = {self.kind!r}; choose json_schema, regex, ebnf or choice.")
        if self.kind == "choice" and not all(json.loads(self.text) or [""]):
            raise ValueError("grammar: a choice needs one or more strings, none of them empty.")


def mask_width(vocab: int) -> int:
    """Number of 32-bit words of a token mask."""
    return -(-vocab // 32)


class Guide:
    """State of a sequence in its grammar.

    Attributes:
        mask: int32[U], bit mask of the tokens that may come next; None if none may.
        error: why the parser failed; empty otherwise.
    """

    def __init__(self, matcher: Any, width: int):
        self._matcher, self._width = matcher, width
        self.error = ""
        self.mask: np.ndarray | None = None
        self._update()

    def copy(self) -> Guide:
        """Copy with the same state."""
        guide = Guide.__new__(Guide)
        guide.__dict__ = {**self.__dict__, "_matcher": self._matcher.deep_copy()}
        return guide

    def allows(self, token: int) -> bool:
        """Whether the mask has this token."""
        word = token // 32
        return self.mask is not None and word < self._width and bool(self.mask[word] >> (token % 32) & 1)

    def advance(self, token: int) -> bool:
        """Advances by a sampled token; returns whether another token may follow."""
        self._matcher.consume_token(token)
        self._update()
        return self.mask is not None

    @property
    def accepts(self) -> bool:
        """Whether the text so far is a complete match."""
        return not self.error and self._matcher.is_accepting()

    def _update(self) -> None:
        self.mask = None
        if not self._matcher.is_error() and not self._matcher.is_stopped():
            bits = self._matcher.compute_bitmask()
            if not self._matcher.is_error():
                found = np.frombuffer(bits, np.int32)[: self._width]  # it may have one word more
                self.mask = np.pad(found, (0, self._width - len(found)))
        if self._matcher.is_error():
            self.error = self._matcher.get_error().strip().splitlines()[0]


class Grammars:
    """Compiled grammars of one tokenizer; may be used from any thread.

    Args:
        tokenizer: tokenizer of the model.
        vocab: size of the model's vocabulary.

    Raises:
        ValueError: there is no tokenizer, or it has no end-of-text token.
        ImportError: llguidance is missing; says how to install it.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab: int):
        if tokenizer is None or not tokenizer.stop_ids:
            raise ValueError("a grammar needs an engine with a tokenizer that has an end-of-text token.")
        try:
            self._library: Any = importlib.import_module("llguidance")
        except ImportError as error:
            raise ImportError("a grammar needs llguidance: pip install 'jaxllm[grammar]'.") from error
        self._width = mask_width(vocab)
        self._limits = self._library.LLParserLimits(**PARSER_LIMITS, verbose_errors=False)
        wrapped = self._library.TokenizerWrapper(_GrammarTokenizer(tokenizer))
        self._tokenizer = self._library.LLTokenizer(wrapped, eos_token=list(tokenizer.stop_ids))
        self._cached: OrderedDict[Grammar, Guide] = OrderedDict()
        self._lock = threading.Lock()

    def guide(self, grammar: Grammar) -> Guide:
        """State at the start of a completion.

        Raises:
            ValueError: the grammar is invalid, not supported, or exceeds the work limits; says why.
        """
        with self._lock:
            if (found := self._cached.get(grammar)) is not None:
                self._cached.move_to_end(grammar)
                return found.copy()
        try:
            source = self._grammar_source(grammar)
        except ValueError as error:
            raise ValueError(f"grammar ({grammar.kind}): {error}.") from None
        guide = Guide(self._library.LLMatcher(self._tokenizer, source, limits=self._limits), self._width)
        if guide.error or guide.mask is None:
            raise ValueError(f"grammar ({grammar.kind}): {guide.error or 'no token can begin such a text'}.")
        with self._lock:
            self._cached[grammar] = guide
            while len(self._cached) > CACHED_GRAMMARS:
                self._cached.popitem(last=False)
        return guide.copy()

    def _grammar_source(self, grammar: Grammar) -> str:
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


class _GrammarTokenizer:
    """Tokenizer in the interface of llguidance."""

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
