"""What a request asks of sampling and of its end; refused by name where it cannot be had."""

from __future__ import annotations

import math
from dataclasses import dataclass

SEEDS = 2**32


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a request are chosen, and when it ends.

    The distribution is ``softmax(logits / temperature)``; of it top-k, then top-p of what that leaves, then min-p keep
    the likeliest tokens. Tokens as likely as the last that is kept are kept too.

    Attributes:
        max_tokens: tokens to make at most.
        temperature: 0 takes the likeliest token.
        top_k: how many of the likeliest tokens are kept (arXiv:1805.04833); 0 for all.
        top_p: the fewest of the likeliest whose probabilities add up to this are kept (arXiv:1904.09751).
        min_p: those are kept that are at least this times as likely as the likeliest (arXiv:2407.01082).
        seed: of the draws, 0 to 2^32 - 1; each depends on it and on the token's position, on nothing else. None: any.
        n: how many continuations; their prompt is computed and kept once.
        stop: texts at which a continuation ends; they are not part of it.
        stop_ids: tokens at which it ends, besides those of the tokenizer.
        ignore_eos: the tokenizer's end-of-text tokens do not end it.
        logprobs: None: no log-probabilities; 0: those of the tokens made; k: also the k likeliest at each place. They
            are the model's own, before temperature and filters.
        prompt_logprobs: the log-probability of each token of the prompt but the first, and its rank (0: the likeliest).
            Such a prompt is computed whole, whatever is kept of others.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        def refuse(name: str, legal: str) -> None:
            raise ValueError(f"{name} = {getattr(self, name)!r}; {legal}.")

        if self.max_tokens < 1:
            refuse("max_tokens", "give 1 or more")
        if not 0 <= self.temperature < math.inf:
            refuse("temperature", "give 0 (the likeliest token) or a positive number")
        if self.top_k < 0:
            refuse("top_k", "give a number of tokens, or 0 for all")
        if not 0 < self.top_p <= 1:
            refuse("top_p", "give a number above 0 and up to 1")
        if not 0 <= self.min_p <= 1:
            refuse("min_p", "give a number from 0 to 1")
        if self.seed is not None and not 0 <= self.seed < SEEDS:
            refuse("seed", "give a number from 0 to 2^32 - 1, or None")
        if self.n < 1:
            refuse("n", "give 1 or more")
        if isinstance(self.stop, str) or "" in self.stop:
            refuse("stop", "give a tuple of texts, none of them empty")
        if self.logprobs is not None and self.logprobs < 0:
            refuse("logprobs", "give 0 or more, or None")

    @property
    def needs_full(self) -> bool:
        """Whether the plain sampler (temperature and seed) does not do."""
        filters = self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
        return filters or self.logprobs is not None or self.prompt_logprobs
