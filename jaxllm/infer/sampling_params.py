"""What a request asks of sampling and of its end; refused by name where it cannot be had."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxllm.infer.grammar import Grammar

SEEDS = 2**32
PENALTY = 2.0
"""Presence and frequency penalties lie within this, either way, as elsewhere."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a request are chosen, and when it ends.

    Logits are changed in this order: repetition_penalty, frequency_penalty and presence_penalty, logit_bias; then
    allowed_tokens, bad_words and min_tokens take tokens away. Temperature 0 takes the likeliest of what is left. Else
    the distribution is ``softmax(logits / temperature)``; of it top-k, then top-p of what that leaves, then min-p, then
    typical-p keep some tokens. Tokens as likely as the last that is kept are kept too.

    Attributes:
        max_tokens: tokens to make at most; 0 only scores the prompt, or echoes it.
        temperature: 0 takes the likeliest token.
        top_k: how many of the likeliest tokens are kept (arXiv:1805.04833); 0 for all.
        top_p: the fewest of the likeliest whose probabilities add up to this are kept (arXiv:1904.09751).
        min_p: those are kept that are at least this times as likely as the likeliest (arXiv:2407.01082).
        typical_p: the fewest whose surprise is closest to the entropy, and whose probabilities add up to this
            (arXiv:2202.00666).
        repetition_penalty: logits of tokens of the prompt or the text are divided by this where positive, multiplied
            where negative (arXiv:1909.05858).
        presence_penalty: taken from the logits of tokens that the text has; -2 to 2.
        frequency_penalty: taken from the logit of a token as many times as the text has it; -2 to 2.
        logit_bias: added to the logits of tokens: {token: number}; -inf takes a token away.
        bad_words: texts, or tuples of token ids, that are not made: no token that would complete one. A text counts as
            the tokenizer writes it, at a beginning and after a space.
        allowed_tokens: no others are made; None: all.
        min_tokens: until so many are made no stop token is, and stop texts do not count.
        seed: of the draws, 0 to 2^32 - 1; each depends on it and on the token's position, on nothing else. None: any.
        n: how many continuations; their prompt is computed and kept once.
        best_of: so many are made, and the ``n`` of the largest log-probability given out, once all have ended: their
            sum over length ** length_penalty. None: n.
        beams: of a beam search, whose best ``n`` are given out when it has ended; 1: none. It takes the likeliest
            continuations by the model's own log-probabilities.
        length_penalty: see best_of; 1 is the mean of a token, 0 the sum.
        stop: texts at which a continuation ends.
        stop_ids: tokens at which it ends, besides those of the tokenizer.
        include_stop: the stop text is part of the text.
        ignore_eos: the tokenizer's end-of-text tokens do not end it.
        logprobs: None: no log-probabilities; 0: those of the tokens made; k: also the k likeliest at each place. They
            are the model's own, before all that is above.
        prompt_logprobs: None: none; 0: the log-probability of each token of the prompt but the first, and its rank (0:
            the likeliest); k: also the k likeliest there. Such a prompt is computed whole, whatever is kept of others.
        echo: the text begins with the prompt's.
        grammar: the form of the text, see ``Grammar``: JSON schema, regular expression, EBNF, or a choice. It ends
            where the form does, and is whole unless max_tokens or a stop text cuts it.
        spelt: special tokens whose names are part of the text, as those of marks that a reader looks for.
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

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.max_tokens == 0 and self.prompt_logprobs is None and not self.echo:
            self._refuse("max_tokens", "give 1 or more, or ask for prompt_logprobs or echo")
        if self.min_tokens > self.max_tokens:
            self._refuse("min_tokens", f"give max_tokens ({self.max_tokens}) or fewer")
        if isinstance(self.stop, str) or "" in self.stop:
            self._refuse("stop", "give a tuple of texts, none of them empty")
        if isinstance(self.bad_words, str) or any(not len(word) for word in self.bad_words):
            self._refuse("bad_words", "give a tuple of texts or of tuples of token ids, none of them empty")
        if self.allowed_tokens is not None and not self.allowed_tokens:
            self._refuse("allowed_tokens", "give one or more, or None for all")
        if any(math.isnan(value) or value == math.inf for value in self.logit_bias.values()):
            self._refuse("logit_bias", "give numbers, or -inf to take a token away")
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

    def _refuse(self, name: str, legal: str) -> None:
        raise ValueError(f"{name} = {getattr(self, name)!r}; {legal}.")

    def _check_numbers(self) -> None:
        legal = {
            "max_tokens": (self.max_tokens >= 0, "give 0 or more"),
            "min_tokens": (self.min_tokens >= 0, "give 0 or more"),
            "temperature": (0 <= self.temperature < math.inf, "give 0 (the likeliest token) or a positive number"),
            "top_k": (self.top_k >= 0, "give a number of tokens, or 0 for all"),
            "top_p": (0 < self.top_p <= 1, "give a number above 0 and up to 1"),
            "min_p": (0 <= self.min_p <= 1, "give a number from 0 to 1"),
            "typical_p": (0 < self.typical_p <= 1, "give a number above 0 and up to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "give a positive number; 1 changes nothing"),
            "presence_penalty": (abs(self.presence_penalty) <= PENALTY, "give a number from -2 to 2"),
            "frequency_penalty": (abs(self.frequency_penalty) <= PENALTY, "give a number from -2 to 2"),
            "seed": (self.seed is None or 0 <= self.seed < SEEDS, "give a number from 0 to 2^32 - 1, or None"),
            "n": (self.n >= 1, "give 1 or more"),
            "beams": (self.beams >= 1, "give 1 (no search) or more"),
            "length_penalty": (math.isfinite(self.length_penalty), "give a number"),
        }
        for name, (holds, words) in legal.items():
            if not holds:
                self._refuse(name, words)

    def _check_beams(self) -> None:
        """A search follows the model's own log-probabilities: what draws or changes logits has no place in it."""
        if self.n > self.beams:
            self._refuse("n", f"a search of {self.beams} beams has no more texts")
        if self.max_tokens == 0:
            self._refuse("max_tokens", "a beam search makes 1 or more")
        if self.temperature not in (0, 1):
            self._refuse("temperature", "a beam search draws nothing: leave it at 1, or give 0")
        fresh = SamplingParams()
        for name in NOT_WITH_BEAMS:
            if getattr(self, name) != getattr(fresh, name):
                self._refuse(name, f"it does not go with a beam search (beams = {self.beams})")

    def _check_grammar(self) -> None:
        """A form decides what may come and where it ends: what forbids tokens could leave none."""
        fresh = SamplingParams()
        for name in ("min_tokens", "allowed_tokens", "bad_words", "ignore_eos", "beams"):
            if getattr(self, name) != getattr(fresh, name):
                self._refuse(name, "it does not go with a grammar, which decides what may come")
        if -math.inf in self.logit_bias.values():
            self._refuse("logit_bias", "-inf does not go with a grammar, which decides what may come")

    @property
    def made(self) -> int:
        """Continuations that are worked on."""
        return self.n if self.best_of is None else self.best_of

    @property
    def shapes(self) -> bool:
        """Whether the logits of this request are changed by what the device keeps for its slot."""
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
        """Whether the distribution is cut."""
        cuts = self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.typical_p < 1
        return self.temperature > 0 and cuts

    @property
    def scores(self) -> bool:
        """Whether log-probabilities of made tokens are needed."""
        return self.logprobs is not None or self.made > self.n

    @property
    def needs_full(self) -> bool:
        """Whether the plain sampler (temperature and seed) does not do."""
        asks = self.prompt_logprobs is not None or self.grammar is not None
        return self.shapes or self.filters or self.scores or self.beams > 1 or asks


NOT_WITH_BEAMS = (
    "min_tokens", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "bad_words", "allowed_tokens", "best_of", "stop", "include_stop",
    "prompt_logprobs",
)  # fmt: skip
