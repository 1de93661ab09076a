"""One continuation of one prompt, as the engine keeps it: what is known, what is computed, what is on its way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from jaxllm.infer.engine.detokenizer import Reader
from jaxllm.infer.engine.page_allocator import chain
from jaxllm.infer.engine.policies import Service
from jaxllm.infer.grammar import Guide
from jaxllm.infer.sampling_params import SEEDS, SamplingParams

Finish = Literal["stop", "length", "cancelled", "error"]


@dataclass
class Request:
    """What somebody asked for.

    Attributes:
        id: given by the engine.
        prompt: token ids.
        params: how to go on.
        salt: requests find each other's pages only if they have the same.
        seed: of the draws.
        stop_ids: all tokens that end it.
        words: that it must not make, as token ids.
        sequences: continuations, ``params.made`` of them; of a beam search its results.
        prompt_scores: (log-probability, rank) of each token of the prompt but the first; filled where asked for.
        prompt_top: the likeliest tokens there, with their log-probabilities; likewise.
        internal: a part of another request.
        service: what it is to get, for policies.
        chosen: the best of the continuations, once all have ended; None before, and where all are given out.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    salt: bytes
    seed: int
    stop_ids: frozenset[int]
    words: tuple[tuple[int, ...], ...] = ()
    sequences: list[Sequence] = field(default_factory=list)
    prompt_scores: list[tuple[float, int]] = field(default_factory=list)
    prompt_top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    chosen: list[Sequence] | None = None
    internal: bool = False
    service: Service = field(default_factory=Service)

    @property
    def outputs(self) -> list[Sequence]:
        """The continuations that are given out, best first where there was a choice."""
        return self.sequences if self.chosen is None else self.chosen


@dataclass(eq=False)
class Sequence:
    """A continuation.

    Attributes:
        request: whose.
        number: which of its continuations.
        order: when it came; the last to come is the first to give way.
        tokens: prompt and made tokens whose values are known here.
        pending: tokens that the device has been told to make and whose values are not here yet.
        computed: tokens whose keys and values are in pages, or will be when what was dispatched has run.
        replica: that it is served by, once it is handed to one.
        slot: its row in the replica's state; -1 while it waits.
        pages: of each group of layers, the page of every ``page_size`` positions.
        registered: pages that can be found by their tokens.
        saved: keys and values on the host while it is swapped out, by group: (columns, array).
        logprobs, top: of made tokens: (token's own), [(id, log-probability), ...].
        reader: of its text; None where there is no tokenizer.
        text: what is decoded and given out so far; with what is echoed.
        echo: the prompt's text, until it is given out.
        arrived: seconds, by the scheduler's clock.
        predicted: tokens that the text is likely to have.
        rank: the lowest is served first, the highest gives way.
        holds: while it waits it holds the pages of others that begin as it does.
        versions: of the weights that made each token, see ``Engine.swap``.
        guide: where its text is in a grammar; None where it has none.
        finish: why it ended; None while it goes on.
    """

    request: Request
    number: int
    order: int
    tokens: list[int]
    reader: Reader | None = None
    pending: int = 0
    computed: int = 0
    replica: int = 0
    slot: int = -1
    pages: list[list[int]] = field(default_factory=list)
    registered: int = 0
    saved: list[tuple[list[int], Any]] | None = None
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    text: str = ""
    echo: str = ""
    guide: Guide | None = None
    versions: list[int] = field(default_factory=list)
    arrived: float = 0.0
    predicted: float = 0.0
    rank: int = 0
    holds: bool = False
    finish: Finish | None = None
    _hashes: list[bytes] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens, those on their way included."""
        return len(self.tokens) + self.pending

    @property
    def made(self) -> int:
        """Tokens made, those on their way included."""
        return self.length - len(self.request.prompt)

    @property
    def room(self) -> int:
        """Tokens it may still be told to make."""
        return max(1, self.request.params.max_tokens) - self.made  # one is made, and not given out, to score a prompt

    @property
    def seed(self) -> int:
        """Of its draws: continuations of one request draw apart from each other."""
        return (self.request.seed + self.number * 0x9E3779B1) % SEEDS

    def hash_of(self, column: int, page_size: int) -> bytes:
        """What the page of this column is found by; its tokens must be known."""
        while len(self._hashes) <= column:
            at = len(self._hashes)
            before = self._hashes[-1] if at else self.request.salt
            self._hashes.append(chain(before, self.tokens[at * page_size : (at + 1) * page_size]))
        return self._hashes[column]
