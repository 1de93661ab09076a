"""Requests and their sequences (completions), as the engine keeps them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxllm.infer.adapter_catalogue import AdapterRevision
from jaxllm.infer.chunks.cached_chunks import Reuse
from jaxllm.infer.grammar import Guide
from jaxllm.infer.sampling_params import SEEDS, SamplingParams
from jaxllm.infer.scheduling.page_allocator import page_hash
from jaxllm.infer.scheduling.policies import Service
from jaxllm.infer.scheduling.subtasks import SubtaskStack
from jaxllm.text.detokenizer import Detokenizer

Finish = Literal["stop", "length", "cancelled", "error"]


@dataclass
class Request:
    """Request of a client: a prompt, sampling parameters, and the sequences that complete it.

    Attributes:
        id: number given by the engine.
        prompt: token ids, those at the places of the model's virtual tokens included.
        params: sampling parameters.
        salt: requests share cached pages only with requests of the same salt, see ``prefix_cache.prefix_salt``.
        seed: seed of the sampling.
        stop_ids: all stop tokens.
        bad_words: token sequences that must not be generated.
        sequences: completions, ``params.candidates`` of them; of a beam search its results.
        prompt_scores: (log-probability, rank) of each prompt token but the first; filled if requested.
        prompt_top: top tokens at each of these positions, with their log-probabilities; likewise.
        selected: best completions, once all have ended; None before, and if all are returned.
        internal: part of another request; it has no output of its own.
        service: service level, for scheduling policies.
        client_salt: the part of ``salt`` that the client asked for.
        adapter: LoRA adapter that its sequences use, in the revision that was the newest when it came; None: the base.
        failure: why its sequences ended with "error": ``AdapterError``, ``StepFailedError``; None: they did not, or by
            a grammar.
        virtual_tokens: number of places at the start of the prompt that the model's virtual tokens take.
        cached_tokens: tokens of the prompt that were found in the prefix cache when it was first scheduled, those that
            are copied of cached chunks included.
        reuses: what is copied of cached chunks, see ``SamplingParams.cached_chunks``.
        awaits: requests that compute its chunks, for which it waits.
        longest: most tokens that a sequence of it may have at a time, where finished subtasks leave it.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    salt: bytes
    seed: int
    stop_ids: frozenset[int]
    bad_words: tuple[tuple[int, ...], ...] = ()
    sequences: list[Sequence] = field(default_factory=list)
    prompt_scores: list[tuple[float, int]] = field(default_factory=list)
    prompt_top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    selected: list[Sequence] | None = None
    internal: bool = False
    service: Service = field(default_factory=Service)
    client_salt: str = ""
    adapter: AdapterRevision | None = None
    failure: Exception | None = None
    virtual_tokens: int = 0
    cached_tokens: int = 0
    reuses: tuple[Reuse, ...] = ()
    awaits: tuple[Request, ...] = ()
    longest: int = sys.maxsize

    @property
    def text(self) -> list[int]:
        """Token ids of the prompt as the client gave it."""
        return self.prompt[self.virtual_tokens :]

    @property
    def text_scores(self) -> list[tuple[float, int]]:
        """``prompt_scores`` of the client's tokens."""
        return self.prompt_scores[self.virtual_tokens :]

    @property
    def text_top(self) -> list[tuple[tuple[int, float], ...]]:
        """``prompt_top`` of the client's tokens."""
        return self.prompt_top[self.virtual_tokens :]

    @property
    def outputs(self) -> list[Sequence]:
        """Completions that are returned; if the best were selected, best first."""
        return self.sequences if self.selected is None else self.selected


@dataclass(eq=False)
class Sequence:
    """Sequence: the prompt of a request and one completion of it.

    Attributes:
        request: request that it belongs to.
        number: index among the request's sequences.
        order: arrival number; without a policy the last to arrive is preempted first.
        tokens: tokens of prompt and completion whose values the host knows, without those that have left.
        pending: tokens that the device has been told to generate and whose values the host does not know yet.
        computed: tokens whose KV cache is in pages, or will be once the dispatched steps have run.
        found: those of them that were in pages already when it was last admitted, in the prefix cache or as a fork's
            prompt.
        replica: data-parallel replica that serves it, once one is assigned.
        slot: row of the replica's device state; -1 while it waits.
        pages: per layer group, the page of every ``page_size`` positions.
        registered: number of leading pages that are in the prefix cache.
        cleared: per layer group, the number of its pages that the device knows to be this sequence's, see
            ``ScheduledChunk.fresh``.
        entries: per layer group, upper limit of the slots that an entry of its cache is in, where a retention rule
            chooses by scores.
        life: counts how often its KV cache has been freed.
        unsettled: number of proposed tokens in ``computed`` that may yet be refused: their step has not landed.
        swapped: KV cache on the host while it is swapped out, per group: (columns, array).
        logprobs, top: of each generated token: its log-probability, and [(id, log-probability), ...] of the top tokens.
        detokenizer: decodes its text; None without a tokenizer.
        text: text that is decoded and given out so far, echoed prompt included.
        echo: text of the prompt, until it is given out.
        arrived: arrival time in seconds, by the scheduler's clock.
        predicted: predicted number of generated tokens.
        rank: priority in the current step: the lowest is served first, the highest is preempted first.
        holds: while waiting, it keeps references to the cached pages of its prefix.
        subtasks: its subtasks, which leave it when they are finished; None: it has none.
        cuts: what has left it, in order: (place of the first token at that time, the tokens).
        versions: version of the weights that generated each token, see ``Engine.swap``.
        guide: state of its grammar (guided decoding); None without one.
        finish: finish reason; None while it runs or waits.
    """

    request: Request
    number: int
    order: int
    tokens: list[int]
    detokenizer: Detokenizer | None = None
    pending: int = 0
    computed: int = 0
    found: int = 0
    replica: int = 0
    slot: int = -1
    pages: list[list[int]] = field(default_factory=list)
    registered: int = 0
    cleared: list[int] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    life: int = 0
    unsettled: int = 0
    swapped: list[tuple[list[int], Any]] | None = None
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
    subtasks: SubtaskStack | None = None
    cuts: list[tuple[int, list[int]]] = field(default_factory=list)
    finish: Finish | None = None
    _hashes: list[bytes] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Number of tokens, pending ones included."""
        return len(self.tokens) + self.pending

    @property
    def left(self) -> int:
        """Number of generated tokens that have left it, see ``cut``."""
        return sum(len(tokens) for _, tokens in self.cuts)

    @property
    def generated(self) -> int:
        """Number of generated tokens, pending ones and those that have left included."""
        return self.length + self.left - len(self.request.prompt)

    @property
    def completion(self) -> list[int]:
        """All generated tokens that the host knows, those that have left included, in order."""
        tokens = list(self.tokens)
        for place, gone in reversed(self.cuts):
            tokens[place:place] = gone
        return tokens[len(self.request.prompt) :]

    @property
    def remaining(self) -> int:
        """Number of tokens that it may still be told to generate, before some leave it."""
        # One token is generated, and not returned, to score a prompt.
        return min(max(1, self.request.params.max_tokens) - self.generated, self.request.longest - self.length)

    @property
    def seed(self) -> int:
        """RNG seed of the sequence, salted so that the n completions of one request are sampled independently.

        So are tokens at a position that a sequence has a second time, because others have left it.
        """
        return (self.request.seed + self.number * 0x9E3779B1 + len(self.cuts) * 0x85EBCA6B) % SEEDS

    def cut(self, start: int, stop: int, page_size: int) -> None:
        """Takes known tokens out of the sequence; ``Scheduler.cut`` does so with what is in pages."""
        self.cuts.append((start, self.tokens[start:stop]))
        del self.tokens[start:stop]
        del self._hashes[start // page_size :]

    def page_hash(self, column: int, page_size: int) -> bytes:
        """Hash that the page of this column is registered under; the tokens of the page must be known."""
        while len(self._hashes) <= column:
            at = len(self._hashes)
            before = self._hashes[-1] if at else self.request.salt
            if (chunks := self.request.params.cached_chunks) is not None:
                before += chunks.mark(at * page_size, (at + 1) * page_size)
            self._hashes.append(page_hash(before, self.tokens[at * page_size : (at + 1) * page_size]))
        return self._hashes[column]
