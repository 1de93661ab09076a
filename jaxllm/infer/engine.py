"""The engine: requests in, tokens out, one step ahead of what the host has seen.

    engine = Engine.of(loaded.model, loaded.params, tokenizer=loaded.tokenizer)
    request = engine.submit(ids, SamplingParams(max_tokens=20))
    while engine.busy:
        for piece in engine.step():
            ...

A call of ``step`` sends the next step to the device and then looks at the one before it, so the device never waits for
the host. One thread calls the methods of an engine; ``AsyncEngine`` is for several.
"""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsIndex

import jax
import numpy as np

from jaxllm.infer.config import EngineConfig
from jaxllm.infer.device import Device, Runner
from jaxllm.infer.sampling import SEEDS, SamplingParams
from jaxllm.infer.scheduler import Entry, Plan, Scheduler
from jaxllm.infer.sequence import Finish, Request, Sequence
from jaxllm.infer.step import STOPS, Shape
from jaxllm.models import Functional
from jaxllm.text import StreamDecoder, Tokenizer

NOT_YET = (
    "min_tokens", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words",
    "allowed_tokens", "best_of", "beams", "include_stop", "echo",
)  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """What a continuation has gained.

    Attributes:
        request, number: which continuation of which request.
        tokens: made since the last piece.
        text: of them; empty without a tokenizer. Text that may begin a stop text comes later.
        logprobs: of the tokens, where asked for.
        top: the likeliest tokens at each place and their log-probabilities, where asked for.
        finish: "stop", "length" or "cancelled"; None while it goes on.
    """

    request: Request
    number: int
    tokens: tuple[int, ...]
    text: str = ""
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    finish: Finish | None = None


@dataclass
class Metrics:
    """What an engine has done.

    Attributes:
        steps: sent to the device; a loop on the device is one.
        prompt_tokens, made_tokens: computed, and given out.
        padding_tokens: rows of flat batches that were none.
        finished: continuations, by how they ended.
    """

    steps: int = 0
    prompt_tokens: int = 0
    made_tokens: int = 0
    padding_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)


@dataclass
class _Flight:
    """A step on its way."""

    plan: Plan
    shape: Shape
    result: Any


class Engine:
    """See the module; ``Engine.of`` makes one for a model.

    Args:
        device: runs the steps.
        config: sizes, those of the device.
        vocab_size: tokens from there on are never made.
        tokenizer: for texts, stop texts and the tokens that end a text; None: tokens only.
    """

    def __init__(self, device: Runner, config: EngineConfig, vocab_size: int, tokenizer: Tokenizer | None = None):
        self.device, self.config, self.vocab_size, self.tokenizer = device, config, vocab_size, tokenizer
        spec = self.device.spec
        self.max_len = spec.max_len
        self.scheduler = Scheduler(
            self.config, [g.window for g in spec.groups], list(spec.pages), spec.page_size, spec.columns
        )
        self.metrics = Metrics()
        self._flights: deque[_Flight] = deque()
        self._cancelled: list[Piece] = []
        self._numbers = itertools.count()
        self._orders = itertools.count()

    @classmethod
    def of(
        cls,
        model: Functional,
        params: Any,
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        vocab_size: int | None = None,
        longest: int | None = None,
        mesh: jax.sharding.Mesh | None = None,
        manifest: Path | None = None,
        strict: bool = False,
    ) -> Engine:
        """An engine for a model, ready: all its programs are there.

        Args:
            model, params: the trained model, as ``load_model`` gives them.
            config: sizes.
            tokenizer: see ``Engine``.
            vocab_size: tokens from there on are never made; None: the tokenizer's, or the model's.
            longest: tokens the model was trained to read: the default of ``config.max_len``.
            mesh: where the parameters live; None for one device.
            manifest: folder to keep compiled programs in; None: nowhere.
            strict: a program that would be compiled later raises ``RecompileError``; otherwise it is counted.

        Raises:
            ValueError: sizes that do not go together, more tokens than the model can be served with.
            ShardingError: a mesh that splits anything but heads.
        """
        config, most = config or EngineConfig(), model.config.vocab_size
        size = min(most, tokenizer.vocab_size if tokenizer else most) if vocab_size is None else vocab_size
        if not 1 <= size <= most:
            raise ValueError(f"vocab_size = {size}; the model's vocabulary has {most} tokens.")
        device = Device(
            model, params, config, vocab_size=size, longest=longest, mesh=mesh, manifest=manifest, strict=strict
        )
        return cls(device, config, size, tokenizer)

    # Requests

    def submit(
        self, prompt: Iterable[SupportsIndex], params: SamplingParams | None = None, *, salt: str = ""
    ) -> Request:
        """Takes a request in.

        Args:
            prompt: token ids.
            params: how to go on.
            salt: requests share what was computed for their prompts only with those of the same salt.

        Raises:
            ValueError: an empty or too long prompt, a token outside the vocabulary, parameters that this engine was not
                built for.
        """
        prompt, params = [int(token) for token in prompt], params or SamplingParams()
        self.check(prompt, params)
        ends = () if params.ignore_eos or self.tokenizer is None else self.tokenizer.stop_ids
        seed = secrets.randbelow(SEEDS) if params.seed is None else params.seed
        request = Request(
            next(self._numbers), prompt, params, salt.encode(), seed, frozenset((*params.stop_ids, *ends))
        )
        for number in range(params.n):
            decoder = None if self.tokenizer is None else StreamDecoder(self.tokenizer, continues=True)
            request.sequences.append(Sequence(request, number, next(self._orders), list(prompt), decoder))
        if params.prompt_logprobs is not None:
            request.prompt_scores = [(float("nan"), -1)] * (len(prompt) - 1)
        for sequence in request.sequences:
            self.scheduler.add(sequence)
        return request

    def cancel(self, request: Request) -> None:
        """Ends what is left of a request; its continuations end with the next ``step``."""
        for sequence in request.sequences:
            if sequence.finish is None:
                self._cancelled.append(self._end(sequence, "cancelled", (), ""))

    @property
    def busy(self) -> bool:
        """Whether ``step`` has something to do."""
        return bool(self._flights or self._cancelled) or not self.scheduler.idle

    def step(self) -> list[Piece]:
        """Sends the next step to the device and gives what the one before it has made."""
        out, self._cancelled = self._cancelled, []
        plan = None if self.scheduler.idle else self.scheduler.plan()
        if plan is not None:
            self._move(plan)
        sent = 0
        if plan is not None and plan.entries:
            self._flights.append(self._dispatch(plan))
            sent = 1
        if len(self._flights) > sent:
            out += self._land(self._flights.popleft())
        elif plan is None and not self.scheduler.idle:
            raise RuntimeError("the engine has requests and cannot go on with any: this is a mistake in its scheduler.")
        return out

    # A step

    def _move(self, plan: Plan) -> None:
        """Keys and values to the host and back."""
        device = self.device
        for sequence, held in plan.leaving:
            sequence.saved = [(columns, device.read(g, pages)) for g, (columns, pages) in enumerate(held)]
        for sequence, held in plan.returning:
            assert sequence.saved is not None
            for group, ((_, pages), (_, content)) in enumerate(zip(held, sequence.saved, strict=True)):
                device.write(group, pages, content)
            sequence.saved = None

    def _dispatch(self, plan: Plan) -> _Flight:
        device = self.device
        shape = device.choose(len(plan.entries), plan.tokens, **_needs(plan))
        packed = np.zeros(shape.inputs.size, np.int32)
        self._fill(plan, shape, shape.inputs.views(packed))
        self.metrics.steps += 1
        self.metrics.prompt_tokens += sum(e.count for e in plan.entries if e.start < len(e.sequence.request.prompt))
        self.metrics.padding_tokens += shape.tokens - plan.tokens
        return _Flight(plan, shape, device.run(shape, packed))

    def _fill(self, plan: Plan, shape: Shape, x: Mapping[str, np.ndarray]) -> None:
        """What the device is told of a plan."""
        entries, many = plan.entries, len(plan.entries)
        counts = np.fromiter((e.count for e in entries), np.int32, many)
        ends = np.cumsum(counts, dtype=np.int32)
        x["starts"][1 : many + 1], x["starts"][many + 1 :] = ends, ends[-1]
        x["kv_lens"][:many] = [e.start + e.count for e in entries]
        slots = [e.sequence.slot for e in entries]
        x["slots"][:many], x["slots"][many:] = slots, shape.slots
        for own, table in zip(x["tables"], self.scheduler.tables, strict=True):
            own[:many] = table[slots]
        for group, copies in enumerate(plan.copies):
            x["copied"][group] = len(copies)
            x["copies"][group, : len(copies)] = np.asarray(copies).reshape(-1, 2)
        x["seeds"][:many] = [e.sequence.seed for e in entries]
        params = [e.sequence.request.params for e in entries]
        x["temperature"][:many] = [p.temperature for p in params]
        tokens = x["tokens"]
        if shape.decode:
            tokens[:many] = [s.tokens[e.start] if e.start < len((s := e.sequence).tokens) else -1 for e in entries]
            x["steps"][...] = plan.steps
            x["stops"][...] = -1
            for row, entry in zip(x["stops"], entries, strict=False):
                if stops := entry.sequence.request.stop_ids:
                    row[: min(STOPS, len(stops))] = sorted(stops)[:STOPS]
        else:
            for entry, end in zip(entries, ends, strict=True):
                known = entry.sequence.tokens[entry.start : entry.start + entry.count]
                tokens[end - entry.count : end] = known or -1
        if shape.full:
            x["top_k"][:many] = [p.top_k for p in params]
            x["top_p"][...] = 1
            x["top_p"][:many] = [p.top_p for p in params]
            x["min_p"][:many] = [p.min_p for p in params]
        if shape.full and not shape.decode:
            x["targets"][...] = -1
            for entry, end in zip(entries, ends, strict=True):
                if entry.sequence.request.params.prompt_logprobs is not None and entry.sequence.number == 0:
                    after = entry.sequence.request.prompt[entry.start + 1 : entry.start + entry.count + 1]
                    x["targets"][end - entry.count : end - entry.count + len(after)] = after

    def _land(self, flight: _Flight) -> list[Piece]:
        """Hands out what a step has made."""
        made = flight.shape.outputs.views(np.asarray(flight.result))
        out, at = [], 0
        tokens = made["tokens"].tolist()
        for row, entry in enumerate(flight.plan.entries):
            sequence, request = entry.sequence, entry.sequence.request
            if request.params.prompt_logprobs is not None and sequence.number == 0 and "scores" in made:
                self._score(entry, made, at)
            at += entry.count
            if not entry.samples or sequence.finish is not None:
                continue
            sequence.pending -= flight.plan.steps
            fresh = [tokens[step][row] for step in range(flight.plan.steps)]
            out.append(self._gain(sequence, fresh, made, row))
        return out

    def _score(self, entry: Entry, made: Mapping[str, np.ndarray], at: int) -> None:
        request = entry.sequence.request
        many = min(entry.count, len(request.prompt) - 1 - entry.start)
        if many > 0:
            pairs = zip(made["scores"][at : at + many].tolist(), made["ranks"][at : at + many].tolist(), strict=True)
            request.prompt_scores[entry.start : entry.start + many] = list(pairs)

    def _gain(self, sequence: Sequence, fresh: list[int], made: Mapping[str, np.ndarray], row: int) -> Piece:
        """Adds tokens to a continuation, up to where it ends."""
        params = sequence.request.params
        before = len(sequence.tokens)
        finish: Finish | None = None
        text = ""
        for number, token in enumerate(fresh):
            sequence.tokens.append(token)
            if params.logprobs is not None:
                sequence.logprobs.append(float(made["logprobs"][number, row]))
                ids, values = made["top_ids"][number, row], made["top_logprobs"][number, row]
                best = zip(ids.tolist(), values.tolist(), strict=True)
                sequence.top.append(list(itertools.islice(best, params.logprobs)))
            if token in sequence.request.stop_ids:
                finish = "stop"
            elif len(sequence.tokens) - len(sequence.request.prompt) >= params.max_tokens:
                finish = "length"
            if sequence.decoder is not None and finish != "stop":
                piece, stopped = self._read(sequence, sequence.decoder.push(token))
                text += piece
                finish = "stop" if stopped else finish
            if finish is not None:
                break
        new = tuple(sequence.tokens[before:])
        self.metrics.made_tokens += len(new)
        if finish is None:
            sequence.text += text
            return self._piece(sequence, new, text)
        return self._end(sequence, finish, new, text)

    def _read(self, sequence: Sequence, text: str) -> tuple[str, bool]:
        """(text to give out, whether a stop text came); what may begin a stop text is held back."""
        stops = sequence.request.params.stop
        if not stops:
            return text, False
        sequence.held += text
        found = [at for stop in stops if (at := sequence.held.find(stop)) >= 0]
        if found:
            given, sequence.held = sequence.held[: min(found)], ""
            return given, True
        most = max(len(stop) for stop in stops)
        keep = next(
            (n for n in range(min(most - 1, len(sequence.held)), 0, -1)
             if any(stop.startswith(sequence.held[-n:]) for stop in stops)),
            0,
        )  # fmt: skip
        given, sequence.held = sequence.held[: len(sequence.held) - keep], sequence.held[len(sequence.held) - keep :]
        return given, False

    def _end(self, sequence: Sequence, finish: Finish, tokens: tuple[int, ...], text: str) -> Piece:
        sequence.finish = finish
        if sequence.decoder is not None and (finish != "stop" or sequence.held or not sequence.request.params.stop):
            rest, _ = self._read(sequence, sequence.decoder.flush())
            text += rest + sequence.held
        sequence.text += text
        self.metrics.finished[finish] = self.metrics.finished.get(finish, 0) + 1
        self.scheduler.finish(sequence)
        return self._piece(sequence, tokens, text, finish)

    def _piece(self, sequence: Sequence, tokens: tuple[int, ...], text: str, finish: Finish | None = None) -> Piece:
        wanted = sequence.request.params.logprobs is not None
        first = len(sequence.logprobs) - len(tokens)
        return Piece(
            sequence.request,
            sequence.number,
            tokens,
            text,
            tuple(sequence.logprobs[first:]) if wanted else (),
            tuple(tuple(best) for best in sequence.top[first:]) if wanted else (),
            finish,
        )

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """Raises ValueError for what ``submit`` would refuse; for any thread."""
        if not prompt:
            raise ValueError("a prompt is empty; generation starts from at least one token.")
        for what, tokens in (("a prompt", prompt), ("stop_ids", params.stop_ids)):
            wrong = [token for token in tokens if not 0 <= token < self.vocab_size]
            if wrong:
                raise ValueError(f"{what} holds token {wrong[0]}, but the vocabulary has {self.vocab_size} tokens.")
        total = len(prompt) + params.max_tokens
        if total > self.max_len:
            raise ValueError(
                f"{len(prompt)} tokens of prompt and {params.max_tokens} new ones are {total}; this engine's sequences "
                f"have {self.max_len} at most. Give a shorter prompt or fewer new tokens."
            )
        if params.stop and self.tokenizer is None:
            raise ValueError("stop texts need an engine with a tokenizer; give stop_ids.")
        fresh = SamplingParams()
        for name in NOT_YET:
            if (value := getattr(params, name)) != getattr(fresh, name):
                raise ValueError(f"{name} = {value!r}; this engine cannot do that yet.")
        if params.max_tokens == 0 or (params.prompt_logprobs or 0) > 0:
            raise ValueError("max_tokens = 0 and prompt_logprobs above 0: this engine cannot do that yet.")
        if (params.logprobs or 0) > self.config.top_logprobs:
            raise ValueError(
                f"logprobs = {params.logprobs}; this engine was built with top_logprobs = {self.config.top_logprobs}."
            )
        if params.needs_full and "full" not in self.config.samplers:
            raise ValueError(
                "top_k, top_p, min_p, logprobs and prompt_logprobs need the full sampler; this engine was built with "
                f"samplers = {self.config.samplers}."
            )


def _needs(plan: Plan) -> dict[str, bool]:
    """Which program a plan can run on."""
    params = [entry.sequence.request.params for entry in plan.entries]
    scores = any(
        e.sequence.number == 0 and p.prompt_logprobs is not None and e.start < len(e.sequence.request.prompt) - 1
        for e, p in zip(plan.entries, params, strict=True)
    )
    return {
        "decode": not scores and all(entry.count == 1 for entry in plan.entries),
        "full": any(p.needs_full for p in params),
    }
