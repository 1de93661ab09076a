"""Sampling parameters of a request; values that are not supported are refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxllm.infer.chunks.cached_chunks import CachedChunks
from jaxllm.infer.grammar import Grammar
from jaxllm.infer.scheduling.subtasks import Subtasks

SEEDS = 2**32
MAX_PENALTY = 2.0
"""Largest absolute value of presence and frequency penalties, as in OpenAI's API."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters: how the tokens of a completion are sampled, and when it ends.

    Logits are processed in this order: repetition_penalty, frequency_penalty and presence_penalty, logit_bias; then
    allowed_tokens, bad_words and min_tokens remove tokens. Temperature 0 is greedy decoding. Otherwise the
    distribution is ``softmax(logits / temperature)``, filtered by top-k, then top-p of what top-k leaves, then min-p,
    then typical-p. Ties with the last token that a filter keeps are kept too.

    Attributes:
        max_tokens: maximum number of generated tokens; 0 only scores the prompt, or echoes it.
        temperature: sampling temperature; 0 is greedy decoding.
        top_k: number of most likely tokens to keep (arXiv:1805.04833); 0 for all.
        top_p: nucleus sampling: keep the fewest most likely tokens whose probabilities add up to this
            (arXiv:1904.09751).
        min_p: keep tokens that are at least this fraction as likely as the most likely one (arXiv:2407.01082).
        typical_p: typical sampling: keep the fewest tokens, closest in surprisal to the entropy, whose probabilities
            add up to this (arXiv:2202.00666).
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens of the prompt or the
            completion (arXiv:1909.05858).
        presence_penalty: subtracted from the logits of tokens that the completion contains; -2 to 2.
        frequency_penalty: subtracted from the logit of a token once for each time that the completion contains it; -2
            to 2.
        logit_bias: added to the logits of tokens: {token: bias}; -inf forbids a token.
        bad_words: strings, or tuples of token ids, that must not be generated: no token that would complete one. A
            string counts as tokenized at the start of a text and after a space.
        allowed_tokens: the only tokens that may be generated; None: all.
        min_tokens: until so many tokens are generated, stop tokens are forbidden and stop strings are ignored.
        seed: RNG seed, 0 to 2^32 - 1; a sampled token depends on it and on the position, not on the batch. None:
            random.
        n: number of completions; their prompt is computed and stored once.
        best_of: generate so many completions, and return the ``n`` of the largest log-probability, summed and divided
            by length ** length_penalty, once all have ended. None: n.
        beams: beam search with this many beams, which returns the best ``n`` when it has ended; 1: no beam search. It
            follows the model's own log-probabilities.
        length_penalty: see best_of; 1 compares means over tokens, 0 compares sums.
        stop: stop strings, at which a completion ends.
        stop_ids: stop tokens, in addition to those of the tokenizer.
        include_stop: the stop string is part of the text.
        ignore_eos: the tokenizer's end-of-text tokens do not end the completion.
        logprobs: None: no log-probabilities; 0: those of the generated tokens; k: also the k top tokens at each
            position. They are the model's own, before any processing.
        prompt_logprobs: None: none; 0: the log-probability and rank (0: the most likely) of each prompt token but the
            first; k: also the k top tokens there. Such a prompt is not taken from the prefix cache.
        echo: the text begins with the prompt's.
        grammar: guided decoding: the text matches a ``Grammar``: JSON schema, regular expression, EBNF, or a choice.
            The completion ends where the grammar does, and is complete unless max_tokens or a stop string cuts it.
        spelt: special tokens whose names are part of the text, such as markers that a tool parser looks for.
        cached_chunks: ``CachedChunks``: parts of the prompt whose keys and values are reused wherever they stand, in an
            engine with ``chunk_cache``; None: there are none.
        subtasks: ``Subtasks``: generated tokens between two markers leave the KV cache when they are finished, and what
            follows is sampled without them; then the engine's max_len limits the tokens that are left, and max_tokens
            may be larger. None: all stay.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    allowed_tokens: tuple[int, ...] | None = None
    min_tokens: int = 0
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    beams: int = 1
    length_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    grammar: Grammar | None = None
    spelt: tuple[int, ...] = ()
    cached_chunks: CachedChunks | None = None
    subtasks: Subtasks | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.max_tokens == 0 and self.prompt_logprobs is None and not self.echo:
            self._refuse("max_tokens", "give 1 or more, or request prompt_logprobs or echo")
        if self.min_tokens > self.max_tokens:
            self._refuse("min_tokens", f"give max_tokens ({self.max_tokens}) or fewer")
        if isinstance(self.stop, str) or "" in self.stop:
            self._refuse("stop", "give a tuple of strings, none of them empty")
        if isinstance(self.bad_words, str) or any(not len(word) for word in self.bad_words):
            self._refuse("bad_words", "give a tuple of strings or of tuples of token ids, none of them empty")
        if self.allowed_tokens is not None and not self.allowed_tokens:
            self._refuse("allowed_tokens", "give one or more, or None for all")
        if any(math.isnan(value) or value == math.inf for value in self.logit_bias.values()):
            self._refuse("logit_bias", "give finite biases, or -inf to forbid a token")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or value < 0):
                self._refuse(name, "give 0 or more, or None")
        if self.best_of is not None and self.best_of < self.n:
            self._refuse("best_of", f"give n ({self.n}) or more")
        if self.beams > 1:
            self._check_beams()
        if self.grammar is not None:
            self._check_grammar()
        if self.cached_chunks is not None and (self.beams > 1 or self.prompt_logprobs is not None):
            self._refuse("cached_chunks", "it goes neither with beams nor with prompt_logprobs, which need every token")

    def _refuse(self, name: str, legal: str) -> None:
        raise ValueError(f"{name} = {getattr(self, name)!r}; {legal}.")

    def _check_numbers(self) -> None:
        legal = {
            "max_tokens": (self.max_tokens >= 0, "give 0 or more"),
            "min_tokens": (self.min_tokens >= 0, "give 0 or more"),
            "temperature": (0 <= self.temperature < math.inf, "give 0 (greedy decoding) or a positive number"),
            "top_k": (self.top_k >= 0, "give a number of tokens, or 0 for all"),
            "top_p": (0 < self.top_p <= 1, "give a number above 0 and up to 1"),
            "min_p": (0 <= self.min_p <= 1, "give a number from 0 to 1"),
            "typical_p": (0 < self.typical_p <= 1, "give a number above 0 and up to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "give a positive number; 1 changes nothing"),
            "presence_penalty": (abs(self.presence_penalty) <= MAX_PENALTY, "give a number from -2 to 2"),
            "frequency_penalty": (abs(self.frequency_penalty) <= MAX_PENALTY, "give a number from -2 to 2"),
            "seed": (self.seed is None or 0 <= self.seed < SEEDS, "give a number from 0 to 2^32 - 1, or None"),
            "n": (self.n >= 1, "give 1 or more"),
            "beams": (self.beams >= 1, "give 1 (no search) or more"),
            "length_penalty": (math.isfinite(self.length_penalty), "give a number"),
        }
        for name, (holds, words) in legal.items():
            if not holds:
                self._refuse(name, words)

    def _check_beams(self) -> None:
        """Checks beam search: it follows the model's own log-probabilities, so nothing may sample or change logits."""
        if self.n > self.beams:
            self._refuse("n", f"a search of {self.beams} beams returns at most {self.beams} completions")
        if self.max_tokens == 0:
            self._refuse("max_tokens", "a beam search generates 1 or more")
        if self.temperature not in (0, 1):
            self._refuse("temperature", "a beam search does not sample: leave it at 1, or give 0")
        fresh = SamplingParams()
        for name in NOT_WITH_BEAMS:
            if getattr(self, name) != getattr(fresh, name):
                self._refuse(name, f"it does not go with a beam search (beams = {self.beams})")

    def _check_grammar(self) -> None:
        """Checks a grammar: together with other constraints on tokens, it might leave no legal token."""
        fresh = SamplingParams()
        for name in ("min_tokens", "allowed_tokens", "bad_words", "ignore_eos", "beams"):
            if getattr(self, name) != getattr(fresh, name):
                self._refuse(name, "it does not go with a grammar, which determines the legal tokens")
        if -math.inf in self.logit_bias.values():
            self._refuse("logit_bias", "-inf does not go with a grammar, which determines the legal tokens")

    @property
    def candidates(self) -> int:
        """Number of completions that are generated, of which ``n`` are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def changes_logits(self) -> bool:
        """Whether the request needs logits processors with state in its slot."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or bool(self.logit_bias)
            or bool(self.bad_words)
            or self.allowed_tokens is not None
            or self.min_tokens > 0
        )

    @property
    def filters(self) -> bool:
        """Whether a filter (top-k, top-p, min-p, typical-p) applies."""
        cuts = self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.typical_p < 1
        return self.temperature > 0 and cuts

    @property
    def needs_logprobs(self) -> bool:
        """Whether log-probabilities of generated tokens are needed."""
        return self.logprobs is not None or self.candidates > self.n

    @property
    def needs_full(self) -> bool:
        """Whether the full sampler is needed; the plain one supports temperature and seed."""
        other = self.prompt_logprobs is not None or self.grammar is not None or self.beams > 1
        return self.changes_logits or self.filters or self.needs_logprobs or other


def with_sampling_defaults(
    given: Mapping[str, Any], defaults: Mapping[str, float], *, max_tokens: int, seed: int | None = None
) -> SamplingParams:
    """Sampling parameters from what a user gave; a field that is None has the value of ``defaults``, if it has one.

    Raises:
        ValueError: a value is not legal.
    """
    fields = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    return SamplingParams(max_tokens=max_tokens, seed=seed, **fields)  # type: ignore[arg-type]


NOT_WITH_BEAMS = (
    "min_tokens", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "bad_words", "allowed_tokens", "best_of", "stop", "include_stop",
    "prompt_logprobs", "subtasks",
)  # fmt: skip
