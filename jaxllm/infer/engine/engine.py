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

import functools
import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex

import jax
import numpy as np

from jaxllm.infer.engine import step_inputs, step_outputs
from jaxllm.infer.engine.candidates import Chooser
from jaxllm.infer.engine.detokenizer import Reader
from jaxllm.infer.engine.engine_metrics import Metrics as Metrics
from jaxllm.infer.engine.policies import Policy, Service
from jaxllm.infer.engine.policy_state import Ranking
from jaxllm.infer.engine.replica_schedulers import Replicas
from jaxllm.infer.engine.scheduler import Scheduler
from jaxllm.infer.engine.sequence import Finish, Request, Sequence
from jaxllm.infer.engine.step_plan import Plan
from jaxllm.infer.engine.stream_output import Piece, piece_of
from jaxllm.infer.engine.validation import bad_words, check
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.grammar import Grammars, mask_width
from jaxllm.infer.runner.engine_step import Shape
from jaxllm.infer.runner.model_runner import Device, Runner
from jaxllm.infer.runner.multihost import Leading, follow
from jaxllm.infer.sampling_params import SEEDS, SamplingParams
from jaxllm.models import Functional
from jaxllm.parallel import distributed
from jaxllm.text import Tokenizer


@dataclass
class _Flight:
    """A step on its way, with what each replica does in it."""

    plans: list[Plan]
    shape: Shape
    result: Any


class Engine:
    """See the module; ``Engine.of`` makes one for a model.

    Args:
        device: runs the steps.
        config: sizes, those of the device.
        vocab_size: tokens from there on are never made.
        tokenizer: for texts, stop texts and the tokens that end a text; None: tokens only.
        policy: who is next, see ``jaxllm.infer.engine.policies``; None: first come, first served.
        tpot: seconds that a token of a text is to take at most: prompts are read in smaller pieces meanwhile.
        predict, clock: see ``Ranking``.
    """

    def __init__(
        self,
        device: Runner,
        config: EngineConfig,
        vocab_size: int,
        tokenizer: Tokenizer | None = None,
        *,
        policy: Policy | None = None,
        tpot: float | None = None,
        predict: Callable[[int, int], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.device, self.config, self.vocab_size, self.tokenizer = device, config, vocab_size, tokenizer
        spec = self.device.spec
        self.max_len = spec.max_len
        ranking = Ranking(policy, tpot, clock, predict)
        one = functools.partial(
            Scheduler, config, [g.window for g in spec.groups], list(spec.pages), spec.page_size, spec.columns, ranking
        )
        self.scheduler = one() if spec.replicas == 1 else Replicas(config, one, spec.replicas, ranking)
        self._landed = clock()
        self.paused, self.version = False, 0
        self.metrics = Metrics()
        self._flights: deque[_Flight] = deque()
        self._cancelled: list[Piece] = []
        self._chooser = Chooser(self.submit, self.cancel)
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
        policy: Policy | None = None,
        tpot: float | None = None,
        predict: Callable[[int, int], float] | None = None,
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
            policy, tpot, predict: see ``Engine``.
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
        runner = Leading(device) if device.spans and distributed.group().leads else device
        return cls(runner, config, size, tokenizer, policy=policy, tpot=tpot, predict=predict)

    # Requests

    def submit(
        self,
        prompt: Iterable[SupportsIndex],
        params: SamplingParams | None = None,
        *,
        salt: str = "",
        service: Service | None = None,
        internal: bool = False,
    ) -> Request:
        """Takes a request in.

        Args:
            prompt: token ids.
            params: how to go on.
            salt: requests share what was computed for their prompts only with those of the same salt.
            service: what it is to get, for the engine's policy.
            internal: a part of another request; nothing of it is given out.

        Raises:
            ValueError: an empty or too long prompt, a token outside the vocabulary, parameters that this engine was not
                built for.
        """
        if isinstance(self.device, Device) and self.device.spans:
            raise RuntimeError(
                f"process {distributed.group().rank} follows process 0, which takes requests: call follow() here."
            )
        prompt, params = [int(token) for token in prompt], params or SamplingParams()
        words, stops = self.check(prompt, params)
        seed = secrets.randbelow(SEEDS) if params.seed is None else params.seed
        request = Request(next(self._numbers), prompt, params, salt.encode(), seed, stops, words, internal=internal)
        request.service = service or request.service
        echo = self.tokenizer.decode(prompt) if params.echo and self.tokenizer is not None else ""
        for number in range(params.n if params.beams > 1 else params.made):
            reader = None
            if self.tokenizer is not None:
                reader = Reader(
                    self.tokenizer, params.stop, include=params.include_stop, earliest=params.min_tokens,
                    spelt=params.spelt,
                )  # fmt: skip
            order, tokens = next(self._orders), list(prompt)
            guide = None if params.grammar is None else self.grammars.guide(params.grammar)
            request.sequences.append(
                Sequence(request, number, order, tokens, reader, text=echo, echo=echo, guide=guide)
            )
        if params.beams > 1:
            self._chooser.search(request)
            return request
        if params.prompt_logprobs is not None:
            request.prompt_scores = [(float("nan"), -1)] * (len(prompt) - 1)
            request.prompt_top = [()] * (len(prompt) - 1)
        for sequence in request.sequences:
            self.scheduler.add(sequence)
        return request

    def cancel(self, request: Request) -> None:
        """Ends what is left of a request; its continuations end with the next ``step``."""
        self._chooser.forget(request)
        for sequence in request.sequences:
            if sequence.finish is None:
                piece = self._end(sequence, "cancelled", (), "")
                if not request.internal:
                    self._cancelled.append(piece)

    @functools.cached_property
    def grammars(self) -> Grammars:
        """What is known of forms of texts; ready for the next request with the same."""
        return Grammars(self.tokenizer, self.device.spec.vocab)

    @property
    def busy(self) -> bool:
        """Whether ``step`` has something to do."""
        return bool(self._flights or self._cancelled) or not (self.paused or self.scheduler.idle)

    def follow(self, weights: Callable[[], Any] | None = None) -> None:
        """Where the mesh has devices of several processes, what all but process 0 do: its steps, until its ``close``.

        Args:
            weights: gives this process's hold of the weights that process 0 swaps in; None: they never change.

        Raises:
            RuntimeError: this is process 0, or the engine is of one process.
        """
        if not (isinstance(self.device, Device) and self.device.spans):
            raise RuntimeError("this engine follows nobody: it takes requests itself.")
        follow(self.device, weights)

    def close(self) -> None:
        """Lets processes that follow this one go on; of one process, nothing."""
        if isinstance(self.device, Leading):
            self.device.close()

    def pause(self) -> None:
        """Sends nothing to the device any more; what is there stays there, and requests are still taken in."""
        self.paused = True

    def resume(self) -> None:
        """Goes on."""
        self.paused = False

    def swap(self, params: Any) -> None:
        """Goes on with other weights, without compiling anything, from the next token of everybody on.

        What was computed with the old ones is forgotten: prompts and texts so far are computed again, so every token is
        made by one set of weights over all that is before it. Which one is in ``Sequence.versions``, that count from 0.

        Args:
            params: of the same tree, shapes and dtypes, such as a training state's; on any devices.

        Raises:
            ValueError: names what differs; nothing is changed then.
        """
        if not isinstance(self.device, (Device, Leading)):
            raise ValueError("only an engine of a real model has weights.")
        self.device.swap(params)
        while self._flights:
            self._cancelled += self._land(self._flights.popleft())
        self.scheduler.restart()
        self.version += 1

    def step(self) -> list[Piece]:
        """Sends the next step to the device and gives what the one before it has made."""
        out, self._cancelled = self._cancelled, []
        if self.paused and not (out or self._flights or self.scheduler.idle):
            raise RuntimeError("the engine is paused: call resume() first.")
        plans = [] if self.paused or self.scheduler.idle else self.scheduler.plans()
        for replica, plan in enumerate(plans):
            self._move(replica, plan)
        sent = 0
        if any(plan.entries for plan in plans):
            if not self._flights:
                self._landed = self.scheduler.ranking.clock()
            self._flights.append(self._dispatch(plans))
            sent = 1
        if len(self._flights) > sent:
            out += self._land(self._flights.popleft())
        elif not (plans or self.paused or out or self.scheduler.idle):
            raise RuntimeError("the engine has requests and cannot go on with any: this is a mistake in its scheduler.")
        given = self._chooser.choose(out)
        for piece in given:
            if piece.finish is not None:
                self.metrics.finished[piece.finish] = self.metrics.finished.get(piece.finish, 0) + 1
        return given

    # A step

    def _move(self, replica: int, plan: Plan) -> None:
        """Keys and values to the host and back."""
        device = self.device
        for sequence, held in plan.leaving:
            sequence.saved = [(columns, device.read(replica, g, pages)) for g, (columns, pages) in enumerate(held)]
        for sequence, held in plan.returning:
            assert sequence.saved is not None
            for group, ((_, pages), (_, content)) in enumerate(zip(held, sequence.saved, strict=True)):
                device.write(replica, group, pages, content)
            sequence.saved = None
        for sequence in plan.seated:
            if sequence.request.params.shapes:
                device.seat(replica, step_inputs.seat_row(sequence, device.spec.vocab))

    def _dispatch(self, plans: list[Plan]) -> _Flight:
        device, metrics = self.device, self.metrics
        many, tokens = max(len(plan.entries) for plan in plans), max(plan.tokens for plan in plans)
        shape = device.choose(many, tokens, **step_inputs.needs(plans))
        packed = np.zeros((len(plans), shape.inputs.size), np.int32)
        schedulers = self.scheduler.each if isinstance(self.scheduler, Replicas) else [self.scheduler]
        for own, plan, scheduler in zip(packed, plans, schedulers, strict=True):
            step_inputs.fill(plan, shape, scheduler.tables, shape.inputs.views(own))
            metrics.prompt_tokens += sum(e.count for e in plan.entries if e.start < len(e.sequence.request.prompt))
            metrics.padding_tokens += shape.tokens - plan.tokens
        metrics.steps += 1
        legal = step_inputs.masks(plans, shape, mask_width(device.spec.vocab)) if shape.full else None
        return _Flight(plans, shape, device.run(shape, packed) if legal is None else device.run(shape, packed, legal))

    def _land(self, flight: _Flight) -> list[Piece]:
        """Hands out what a step has made."""
        rows = np.asarray(flight.result)
        ranking = self.scheduler.ranking
        now = ranking.clock()
        if not flight.shape.decode:
            ranking.times = ranking.times.after(flight.shape.tokens, now - self._landed)
        out: list[Piece] = []
        work: list[tuple[int, int, int]] = []
        for plan, own in zip(flight.plans, rows, strict=True):
            out += self._hand_out(plan, flight.shape, flight.shape.outputs.views(own), work)
        windows = [group.window for group in self.device.spec.groups]
        self.metrics.landed(flight.shape.name, now - self._landed, work, windows, decode=flight.shape.decode)
        self._landed = now
        return out

    def _hand_out(
        self, plan: Plan, shape: Shape, made: Mapping[str, np.ndarray], work: list[tuple[int, int, int]]
    ) -> list[Piece]:
        """What a replica has made; adds what it has done to ``work``, see ``Metrics.landed``."""
        out, at = [], 0
        tokens = made["tokens"].tolist()
        for row, entry in enumerate(plan.entries):
            sequence, request = entry.sequence, entry.sequence.request
            if request.params.prompt_logprobs is not None and sequence.number == 0 and "scores" in made:
                step_outputs.score(entry, made, at)
            at += entry.count
            gained = 0
            if entry.samples and sequence.finish is None:
                sequence.pending -= plan.steps
                fresh = [tokens[step][row] for step in range(plan.steps)]
                out.append(self._gain(sequence, fresh, made, row))
                gained = len(out[-1].tokens)
            work.append((entry.start, gained if shape.decode else entry.count, gained))
        return out

    def _gain(self, sequence: Sequence, fresh: list[int], made: Mapping[str, np.ndarray], row: int) -> Piece:
        """Adds tokens to a continuation, up to where it ends."""
        new, text, finish = step_outputs.gain(sequence, fresh, made, row, self.version)
        self.metrics.made_tokens += len(new)
        if finish is None:
            sequence.text += text
            return piece_of(sequence, new, text)
        return self._end(sequence, finish, new, text)

    def _end(self, sequence: Sequence, finish: Finish, tokens: tuple[int, ...], text: str) -> Piece:
        sequence.finish = finish
        text += "" if sequence.reader is None else sequence.reader.end()
        sequence.text += text
        self.scheduler.finish(sequence)
        return piece_of(sequence, tokens, text, finish)

    def check(self, prompt: list[int], params: SamplingParams) -> tuple[tuple[tuple[int, ...], ...], frozenset[int]]:
        """Raises ValueError for what ``submit`` would refuse; for any thread.

        Returns:
            bad words and stop tokens of the request.
        """
        words = bad_words(params, self.tokenizer)
        ends = () if params.ignore_eos or self.tokenizer is None else self.tokenizer.stop_ids
        stops = frozenset((*params.stop_ids, *ends))
        check(prompt, params, words, stops, self.config, self.vocab_size, self.max_len, self.tokenizer)
        if params.grammar is not None:
            self.grammars.guide(params.grammar)
        return words, stops
