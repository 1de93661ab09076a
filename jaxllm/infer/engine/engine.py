"""Inference engine: continuous batching over a paged KV cache, with a prefix cache and chunked prefill.

    engine = Engine.of(loaded.model, loaded.params, tokenizer=loaded.tokenizer)
    request = engine.submit(ids, SamplingParams(max_tokens=20))
    while engine.busy:
        for delta in engine.step():
            ...

A call of ``step`` starts the next step on the device and then processes the result of the step before it, so the device
never waits for the host. The scheduler (``scheduler``) plans steps of prefill and decode, preempts sequences when the
KV cache is full, and uses the page allocator; the runner (``jaxllm.infer.runner``) computes them, with the sampler and
the logits processors on the device; the detokenizer turns tokens into text on the host. Beam search and best_of are in
``candidates``, guided decoding by a grammar in ``jaxllm.infer.grammar``, tensor parallel serving over a mesh in
``jaxllm.infer.runner.serving_mesh``. One thread calls the methods of an engine; ``AsyncEngine`` serves several.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import secrets
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, SupportsIndex

import jax
import numpy as np

from jaxllm.config import ConfigError
from jaxllm.infer.adapter_catalogue import AdapterCatalogue, AdapterRevision, Source
from jaxllm.infer.attention_pool.offloaded_runner import OffloadedRunner
from jaxllm.infer.chunks.chunk_moves import ChunkMover, check_chunk_cache
from jaxllm.infer.chunks.chunk_requests import await_chunks
from jaxllm.infer.engine import step_inputs, step_outputs
from jaxllm.infer.engine.candidates import CandidateSelector
from jaxllm.infer.engine.engine_metrics import EngineMetrics
from jaxllm.infer.engine.served_adapters import ServedAdapters
from jaxllm.infer.engine.stream_output import OutputDelta, output_delta
from jaxllm.infer.engine.validation import bad_word_tokens, check_request
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.grammar import Grammars, mask_width
from jaxllm.infer.page_tiers import PageTiers
from jaxllm.infer.pools.decode_listener import DecodeListener
from jaxllm.infer.pools.pool_schedulers import PoolSchedulers
from jaxllm.infer.pools.pooled_runner import PooledRunner
from jaxllm.infer.runner.model_runner import ModelRunner
from jaxllm.infer.runner.multihost import MultihostRunner
from jaxllm.infer.runner.paged_cache import with_whole_tiles
from jaxllm.infer.runner.runner_protocol import Runner, StepFailedError
from jaxllm.infer.runner.step.step_shape import StepShape
from jaxllm.infer.sampling_params import SEEDS, SamplingParams
from jaxllm.infer.scheduling.phase_split import phase_split
from jaxllm.infer.scheduling.policies import Policy, Service
from jaxllm.infer.scheduling.policy_state import PolicyState
from jaxllm.infer.scheduling.prefix_cache import prefix_salt
from jaxllm.infer.scheduling.proposer import AnyProposer, BatchProposer, check_proposer
from jaxllm.infer.scheduling.replica_schedulers import ReplicaSchedulers
from jaxllm.infer.scheduling.scheduler import Scheduler
from jaxllm.infer.scheduling.sequence import Finish, Request, Sequence
from jaxllm.infer.scheduling.step_plan import ScheduledChunk, StepPlan, StepScheduler
from jaxllm.infer.scheduling.subtasks import SubtaskStack
from jaxllm.infer.side_work import SideWork, StepRoom
from jaxllm.infer.speculate.draft_length import length_of_drafts
from jaxllm.infer.speculate.draft_model import ServedModel
from jaxllm.infer.speculate.head_draft import HeadProposer
from jaxllm.infer.speculate.proposer_table import configured, make_proposer
from jaxllm.infer.stages.draft_runs import DraftRun, DraftRuns
from jaxllm.infer.stages.pipeline_stage import stage_mesh
from jaxllm.infer.stages.staged_runner import StagedRunner, with_stages
from jaxllm.infer.start_progress import Listener
from jaxllm.infer.streaming.blocks.block_runner import BlockRunner, check_blocks
from jaxllm.infer.streaming.streamed_runner import StreamedRunner, check_streamed
from jaxllm.infer.streaming.streamed_weights import StreamedWeights
from jaxllm.infer.weight_folding import Folding, folding_of
from jaxllm.models import Functional
from jaxllm.parallel import distributed
from jaxllm.text import Tokenizer
from jaxllm.text.detokenizer import Detokenizer
from pallas_kernels._compat import target_device
from pallas_kernels.paged_attention.retention import by_scores


@dataclass(eq=False)
class _StepInFlight:
    """Step that the device has been told to run, with the plan of each replica, and the side work before it."""

    plans: list[StepPlan]
    shape: StepShape
    result: Any
    room: StepRoom
    beside: Any = None


class Engine:
    """Inference engine with continuous batching; ``Engine.of`` builds one for a model.

    Args:
        runner: runs the steps.
        config: sizes, those of the runner.
        vocab_size: tokens from here on are never sampled.
        tokenizer: for text, stop strings and end-of-text tokens; None: token ids only.
        policy: scheduling policy, see ``jaxllm.infer.scheduling.policies``; None: first come, first served.
        proposer: proposes up to ``config.verify_tokens`` tokens to verify (speculative decoding); None: none. ``of``
            makes the one that ``config.speculate`` names.
        predict, clock: see ``PolicyState``.
        adapters: catalogue of the adapters that requests may name, if ``config.adapter_slots``; None: an empty one.
        virtual_tokens: number of places that each sequence begins with, whose tokens the model replaces by its own.

    Attributes:
        folding: what has been folded into the weights, which ``swap`` folds into others; None: nothing.
        chunk_mover: copies cached chunks, with ``config.chunk_cache``; None: there are none.
        side_work: work that shares the devices with the steps; None: none. Set it before the first step.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        vocab_size: int,
        tokenizer: Tokenizer | None = None,
        *,
        policy: Policy | None = None,
        proposer: AnyProposer | None = None,
        predict: Callable[[int, int], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
        adapters: AdapterCatalogue | None = None,
        virtual_tokens: int = 0,
    ):
        self.runner, self.config, self.vocab_size, self.tokenizer = runner, config, vocab_size, tokenizer
        spec = runner.spec
        self.virtual_tokens, self.max_len = virtual_tokens, spec.max_len - virtual_tokens
        if self.max_len < 1:
            raise ConfigError(f"engine: max_len = {spec.max_len} has no room after {virtual_tokens} virtual tokens.")
        state = PolicyState(policy, phase_split(config.phase_split), clock, predict)
        check_proposer(config, proposer)
        self.proposer, self.draft_length = proposer, length_of_drafts(config, runner.params)
        self.adapters = AdapterCatalogue() if adapters is None else adapters
        self._served_adapters = ServedAdapters(self.adapters, runner)
        self.adapter_slots = self._served_adapters.slots
        self.draft_runs = DraftRuns(config) if config.draft_runs > 1 else None
        windows = [spec.groups[group].window for group in spec.tables]
        rules = [rule for group in spec.groups for rule in group.rules]
        self.page_tiers = PageTiers(runner, config)
        self.folding: Folding | None = None
        self.chunk_mover: ChunkMover | None = None
        self.metrics = EngineMetrics()
        self._in_flight: deque[_StepInFlight] = deque()

        def one(kind: type[Scheduler] = Scheduler, pages: tuple[int, ...] = spec.pages) -> Scheduler:
            return kind(
                config, windows, list(pages), spec.page_size, spec.columns, state, rules, proposer,
                self.adapter_slots, self.draft_length, max(group.residual for group in spec.groups),
                self.page_tiers.store, spec.tables, self.draft_runs,
            )  # fmt: skip

        self.pools: PoolSchedulers | None = None
        if isinstance(runner, PooledRunner):
            flying = lambda: [step.plans[0].replica for step in self._in_flight]  # noqa: E731
            self.pools = PoolSchedulers(config, one, runner, self.metrics, state, flying)
        self.scheduler: StepScheduler = self.pools or (
            ReplicaSchedulers(config, one, spec.replicas, state) if spec.replicas > 1 else one()
        )
        self._last_result_times: dict[int, float] = {}
        self.paused, self.version = False, 0
        self.side_work: SideWork | None = None
        self._cancelled: list[OutputDelta] = []
        self._selector = CandidateSelector(self.submit, self.cancel)
        self._request_ids = itertools.count()
        self._arrivals = itertools.count()

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
        proposer: AnyProposer | None = None,
        predict: Callable[[int, int], float] | None = None,
        adapters: AdapterCatalogue | None = None,
        background: bool = False,
        plain_first: bool = False,
        shipped: Path | None = None,
        trusted: bool = False,
        layers: Literal["given", "auto"] = "given",
        progress: Listener | None = None,
        reserved_bytes: int = 0,
        path: Path | None = None,
        decode_listener: DecodeListener | None = None,
    ) -> Engine:
        """Builds an engine for a model and compiles its programs.

        Args:
            model, params: trained model and its weights, as ``load_model`` returns them; or ``StreamedWeights``, with
                ``config.layer_window``.
            config: sizes of the engine.
            tokenizer: see ``Engine``.
            vocab_size: tokens from here on are never sampled; None: the tokenizer's vocabulary, or the model's.
            longest: sequence length that the model was trained on: the default of ``config.max_len``.
            mesh: mesh to serve on (tensor parallel serving, data-parallel replicas); None for one device.
            manifest: folder that compiled programs are kept in; None: nowhere.
            policy, proposer, predict, adapters: see ``Engine``.
            strict: a program that would be compiled later raises ``RecompileError``; otherwise it is counted.
            background: return as soon as the engine can run every step, with its largest programs; the others are
                compiled in the background and used from then on. On a mesh over several processes all are compiled
                first.
            plain_first: with ``background``: the first programs have the plain sampler, which compiles in half the
                time; the first request that needs the other one waits for it.
            shipped, trusted: see ``ProgramCache``.
            layers: see ``ModelRunner``; speculation, and a KV cache format that orders channels or clusters heads,
                keep them as they are given.
            progress: called with "compiling" or "ready", the number of programs that are ready, and of all.
            reserved_bytes: device memory that is left to side work.
            path: directory or file that the model is from, for ``speculate = "mtp"``; None: unknown.
            decode_listener: with ``config.pools``: each decode engine is in a process of its own, which connects here;
                returns when all have come. None: in this process.

        Raises:
            ValueError: sizes that do not go together, or sequences longer than the model supports.
            ShardingError: the engine cannot serve the model on this mesh.
        """
        config = with_whole_tiles(with_stages(config or EngineConfig(), mesh), target_device().platform)
        most = model.config.vocab_size
        if config.speculate is None:
            check_proposer(config, proposer)
        elif proposer is not None:
            raise ConfigError(f"engine: speculate = {config.speculate!r} and proposer = {proposer}: give one of them.")
        else:
            config = configured(config)
        size = min(most, tokenizer.vocab_size if tokenizer else most) if vocab_size is None else vocab_size
        if not 1 <= size <= most:
            raise ValueError(f"vocab_size = {size}; give 1 to {most}, the size of the model's vocabulary.")
        if config.chunk_cache:
            check_chunk_cache(model.config, mesh)
        streamed: StreamedWeights | None = None
        staged = mesh if config.stages > 1 else None
        if isinstance(params, StreamedWeights):
            streamed, params = params, params.ends
        check_streamed(config, None if streamed is None else streamed.placement)
        if streamed is not None and streamed.placement.cache is not None:
            check_blocks(config, streamed.placement, proposer)
        folding = folding_of(config, model, params, size, tokenizer, mesh)
        if folding is not None:
            model, params = folding.model, folding.fold(params)
        if config.speculate is not None:
            # A draft model is on the device, and with pipeline stages on the first stage's.
            own = replace(config, layer_window=0, stages=1, draft_runs=1, two_phase=False)
            over = mesh if staged is None else stage_mesh(staged, 0)
            proposer = make_proposer(
                ServedModel(model, params, own, tokenizer, size, longest, over, manifest, strict, background, path)
            )
        reserved = reserved_bytes + getattr(proposer, "device_bytes", 0)
        may_choose = all(x is None for x in (config.speculate, proposer, folding, streamed, config.pools))
        make = ModelRunner if staged is None else StagedRunner
        if config.pools is not None:
            pooled = functools.partial(PooledRunner, decode_listener=decode_listener)
            make = OffloadedRunner if config.offloads_attention else pooled
        if decode_listener is not None and (config.pools is None or config.offloads_attention):
            raise ConfigError(
                f"engine: decode_listener is for prefill and decode pools, and pools = {config.pools!r}: leave it out."
            )
        if streamed is not None:
            kind = StreamedRunner if streamed.placement.cache is None else BlockRunner
            make = functools.partial(kind, weights=streamed)
        runner = make(
            model, params, config, vocab_size=size, longest=longest, mesh=mesh, manifest=manifest, strict=strict,
            reserved_bytes=reserved, background=background, plain_first=plain_first, shipped=shipped, trusted=trusted,
            layers=layers if may_choose else "given", progress=progress,
        )  # fmt: skip
        whole = MultihostRunner(runner) if isinstance(runner, ModelRunner) and runner.spans_processes else runner
        engine = cls(
            whole, config, size, tokenizer, policy=policy, proposer=proposer, predict=predict,
            adapters=adapters, virtual_tokens=model.config.virtual_tokens,
        )  # fmt: skip
        engine.folding = folding
        if config.chunk_cache:
            engine.chunk_mover = ChunkMover(runner)
        if isinstance(proposer, HeadProposer):
            proposer.attach(runner)
        return engine

    @property
    def device(self) -> Runner:
        """Deprecated name of ``runner``."""
        warnings.warn("Engine.device is now runner; the old name goes away in the next release.", FutureWarning, 2)
        return self.runner

    # Requests

    def submit(
        self,
        prompt: Iterable[SupportsIndex],
        params: SamplingParams | None = None,
        *,
        salt: str = "",
        service: Service | None = None,
        adapter: str | AdapterRevision | None = None,
        internal: bool = False,
    ) -> Request:
        """Submits a request; ``step`` returns its output.

        Args:
            prompt: token ids.
            params: sampling parameters.
            salt: requests share the prefix cache only with requests of the same salt.
            service: service level, for the engine's scheduling policy.
            adapter: name of an adapter of ``adapters``: the request is served by its newest revision, to its end; or a
                revision; None: the base.
            internal: part of another request (a beam search round); it has no output of its own.

        Raises:
            ValueError: the prompt is empty or too long, a token is outside the vocabulary, the engine was not built for
                these parameters, or there is no such adapter (``AdapterNotFoundError``) or it cannot be read.
        """
        if self.runner.follows:
            raise RuntimeError(
                f"process {distributed.group().rank} follows process 0, which takes the requests: call follow() here."
            )
        prompt, params = [int(token) for token in prompt], params or SamplingParams()
        bad_words, stops = self.check(prompt, params)
        seed = secrets.randbelow(SEEDS) if params.seed is None else params.seed
        request_id = next(self._request_ids)
        revision = self._served_adapters.newest(adapter) if isinstance(adapter, str) else adapter
        cache_salt = prefix_salt(self.config, client=salt, adapter="" if revision is None else revision.salt)
        echo = self.tokenizer.prompt_text(prompt) if params.echo and self.tokenizer is not None else ""
        # The tokens at the places of virtual ones are not read; the prompt's own changes no penalty.
        prompt = prompt[:1] * self.virtual_tokens + prompt
        request = Request(request_id, prompt, params, cache_salt, seed, stops, bad_words, internal=internal)
        request.virtual_tokens = self.virtual_tokens
        if params.subtasks is not None:
            request.longest = self.runner.spec.max_len
        request.service, request.client_salt, request.adapter = service or request.service, salt, revision
        if revision is not None:
            request.service = dataclasses.replace(request.service, adapter=revision.name)
        for number in range(params.n if params.beams > 1 else params.candidates):
            detokenizer = None
            if self.tokenizer is not None:
                detokenizer = Detokenizer(
                    self.tokenizer, params.stop, include=params.include_stop, earliest=params.min_tokens,
                    spelt=params.spelt,
                )  # fmt: skip
            order, tokens = next(self._arrivals), list(prompt)
            guide = None if params.grammar is None else self.grammars.guide(params.grammar)
            request.sequences.append(
                Sequence(request, number, order, tokens, detokenizer, text=echo, echo=echo, guide=guide)
            )
            if params.subtasks is not None:
                request.sequences[-1].subtasks = SubtaskStack(params.subtasks, read=len(prompt))
        if params.beams > 1:
            self._selector.search(request)
            return request
        if params.prompt_logprobs is not None:
            request.prompt_scores = [(float("nan"), -1)] * (len(prompt) - 1)
            request.prompt_top = [()] * (len(prompt) - 1)
        await_chunks(request, self.submit, self.scheduler, self.runner.spec.page_size)
        for sequence in request.sequences:
            self.scheduler.add(sequence)
        return request

    def cancel(self, request: Request) -> None:
        """Cancels the completions of a request that still run; the next ``step`` reports their end."""
        self._selector.forget(request)
        for sequence in request.sequences:
            if sequence.finish is None:
                delta = self._finish_sequence(sequence, "cancelled", (), "")
                if not request.internal:
                    self._cancelled.append(delta)

    @functools.cached_property
    def grammars(self) -> Grammars:
        """Compiled grammars for guided decoding, cached for later requests."""
        return Grammars(self.tokenizer, self.runner.spec.vocab)

    def check(self, prompt: list[int], params: SamplingParams) -> tuple[tuple[tuple[int, ...], ...], frozenset[int]]:
        """Checks a request as ``submit`` does; may be called from any thread.

        Returns:
            bad words and stop tokens of the request, as token ids.

        Raises:
            ValueError: ``submit`` would refuse the request.
        """
        bad_words = bad_word_tokens(params, self.tokenizer)
        ends = () if params.ignore_eos or self.tokenizer is None else self.tokenizer.stop_ids
        stops = frozenset((*params.stop_ids, *ends))
        check_request(prompt, params, bad_words, stops, self.config, self.vocab_size, self.max_len, self.tokenizer)
        if params.grammar is not None:
            self.grammars.guide(params.grammar)
        return bad_words, stops

    # Adapters

    def load_adapter(self, name: str, source: Source) -> AdapterRevision:
        """Adds an adapter, or a new revision of one, which the next requests get; may be called from any thread.

        Args:
            name: name of the adapter, for requests.
            source: directory in PEFT's format, or an adapter in memory.

        Raises:
            AdapterError: it is not an adapter of this model; says what and where. Nothing is changed then.
            ValueError: the name is not legal, or the engine serves no adapters.
        """
        return self._served_adapters.load({name: source})[0]

    def unload_adapter(self, name: str) -> None:
        """Removes an adapter; requests that use it go on to their end. May be called from any thread.

        Raises:
            AdapterNotFoundError: there is no such adapter.
        """
        self._served_adapters.unload(name)

    def rollback_adapter(self, name: str) -> AdapterRevision:
        """Revision before the newest one of an adapter, which the next requests get; may be called from any thread.

        Raises:
            AdapterNotFoundError: there is no such adapter.
            ValueError: it has no revision before.
        """
        return self._served_adapters.rollback(name)

    def retention_report(self) -> dict[str, Any]:
        """Entries of the KV cache that have stayed and left so far, and the pages that came back.

        Entries are counted by layer and kv head: whenever a rule chooses by scores; under a rule that chooses by
        position, when a sequence ends.
        """
        metrics = self.metrics
        return {
            "rule": self.config.retention,
            "kept_entries": metrics.kept_entries,
            "dropped_entries": metrics.dropped_entries,
            "returned_pages": self.scheduler.returned_pages,
        }

    def _end_unreadable(self) -> None:
        """Ends the sequences whose adapter could not be read, with "error"."""
        if not self._served_adapters.collect():
            return
        for sequence in [*self.scheduler.waiting, *self.scheduler.forks]:
            if (failure := self._served_adapters.failure(sequence.request.adapter)) is not None:
                self._cancelled += self._fail(sequence.request, failure)

    def _end_lost(self) -> None:
        """Ends the sequences of decode engines whose process has gone, and those that wait too long for one."""
        if self.pools is None:
            return
        for number, failure in self.pools.lost():
            gone = [step for step in self._in_flight if step.plans[0].replica == number]
            self._in_flight = deque(step for step in self._in_flight if step not in gone)
            of_steps = [chunk.sequence for step in gone for chunk in step.plans[0].chunks]
            for sequence in [*self.pools.schedulers[number].sequences(), *of_steps]:
                if sequence.finish is None:
                    self._cancelled += self._fail(sequence.request, failure)
            self.pools.forget(number)
        for request, failure in self.pools.stranded():
            self._cancelled += self._fail(request, failure)

    def _fail(self, request: Request, failure: Exception) -> list[OutputDelta]:
        """Ends all completions of a request, or of the one that it is a part of, with "error"."""
        request = self._selector.owner(request)
        self._selector.forget(request)
        running = [sequence for sequence in request.sequences if sequence.finish is None]
        if running:
            request.failure = failure
        return [self._finish_sequence(sequence, "error", (), "") for sequence in running]

    # Control

    @property
    def busy(self) -> bool:
        """Whether ``step`` has something to do."""
        beside = self.side_work is not None and self.side_work.has_work
        return bool(self._in_flight or self._cancelled) or not (self.paused or (self.scheduler.idle and not beside))

    def follow(self, weights: Callable[[], Any] | None = None) -> None:
        """Repeats the steps of process 0 until its ``close``: the call of every other process of a multi-host mesh.

        Args:
            weights: returns this process's shards of the weights that process 0 swaps in; None: they never change.

        Raises:
            RuntimeError: this is process 0, or the engine is of one process.
        """
        if not self.runner.follows:
            raise RuntimeError("this engine follows nobody: it takes requests itself; use submit() and step().")
        self.runner.follow(weights)

    def close(self) -> None:
        """Ends side work, and ``follow`` in other processes; writes the prefix cache to the disk tier, if any."""
        self.end_side_work()
        self.keep_pages()
        self.runner.close()

    def end_side_work(self) -> None:
        """Ends the side work in order, if there is any; nothing is done beside the steps from now on."""
        if (work := self.side_work) is not None:
            self.side_work = None
            work.close()

    def keep_pages(self) -> None:
        """Writes the prefix cache, and the pages in host memory, to the disk tier, where there is one."""
        self.page_tiers.keep(self.scheduler.prefix_caches)

    def wait_for_programs(self) -> None:
        """Waits until all programs are compiled, those of the background too; for measurements.

        Raises:
            Exception: a program could not be compiled.
        """
        for one in self.runner.engines if isinstance(self.runner, PooledRunner) else [self.runner]:
            if one.program_cache is not None:
                one.program_cache.wait()

    def pause(self) -> None:
        """Stops starting steps; the KV cache stays on the device, and requests can still be submitted."""
        self.paused = True

    def resume(self) -> None:
        """Starts steps again after ``pause``."""
        self.paused = False

    def swap(self, params: Any = None, *, adapter: Mapping[str, Source] | None = None) -> None:
        """Replaces the weights without compiling anything; they hold from the next token of every sequence.

        Adapters get a new revision each (``load_adapter``), which holds for the next requests: those that run keep the
        revision that they began with, and ``rollback_adapter`` goes back.

        The KV cache of the old weights is dropped and recomputed from the tokens so far, so that every token is
        generated by one set of weights over its whole context. ``Sequence.versions`` has the version of each token,
        counted from 0.

        Args:
            params: weights of the same structure, shapes and dtypes, such as a training state's; on any devices. None:
                they stay.
            adapter: adapters by name: directories in PEFT's format, or in memory, as training has them.

        Raises:
            ValueError: names what differs, or side work uses the weights; nothing is changed then.
        """
        if params is not None and self.side_work is not None:
            raise ConfigError(
                "engine: the work beside its steps uses these weights; call end_side_work() before swap()."
            )
        if adapter is not None:
            self._served_adapters.load(adapter)
        if params is None:
            return
        self.runner.swap(params if self.folding is None else self.folding.fold(params))
        self.page_tiers.restart()
        if isinstance(self.proposer, BatchProposer):
            self.proposer.swap(self.runner.params)
        while self._in_flight:
            self._cancelled += self._process_result(self._in_flight.popleft())
        self.scheduler.restart()
        self.version += 1

    def step(self) -> list[OutputDelta]:
        """Starts the next step on the device and returns the output of the step before it."""
        self._end_unreadable()
        self._end_lost()
        out, self._cancelled = self._cancelled, []
        if self.paused and not (out or self._in_flight or self.scheduler.idle):
            raise RuntimeError("the engine is paused: call resume() first.")
        while (landed := self._landed()) is not None:
            self._in_flight.remove(landed)
            out += self._process_result(landed)
        plans = [] if self.paused or self.scheduler.idle else self.scheduler.plans()
        for plan in plans:
            self.page_tiers.transfer(plan.replica, plan)
            if self.chunk_mover is not None:
                self.chunk_mover.move(plan.moves)
            self._seat(plan.replica, plan)
        started = 0
        if self.side_work is not None and self.scheduler.idle and not (out or self._in_flight or self.paused):
            self.side_work.run_alone()
        if any(plan.chunks for plan in plans):
            if all(step.plans[0].replica != plans[0].replica for step in self._in_flight):
                self._last_result_times[plans[0].replica] = self.scheduler.policy_state.clock()
            try:
                self._in_flight.append(self._start_step(plans))
                started = 1
            except StepFailedError as error:
                out += self._fail_step(plans, error)
        if self._is_due(started=started > 0, told=bool(out)):
            out += self._process_result(self._in_flight.popleft())
        elif self.pools and not (plans or out) and self.pools.wait_any(step.result for step in self._in_flight):
            pass  # the next call has something to do
        elif not (plans or self.paused or out or self.scheduler.idle or self._served_adapters.wait(0.05)):
            raise RuntimeError("the engine has requests but its scheduler found nothing to compute; this is a bug.")
        selected = self._selector.select(out)
        for delta in selected:
            if delta.finish is not None:
                self.metrics.finished[delta.finish] = self.metrics.finished.get(delta.finish, 0) + 1
        return selected

    # Parts of a step

    def _landed(self) -> _StepInFlight | None:
        """Oldest step whose result is there, where the host does not wait for it before it starts others."""
        if self.pools is None and self.draft_runs is None:
            return None
        oldest = {step.plans[0].replica: step for step in reversed(self._in_flight)}  # of each engine
        return next((step for step in oldest.values() if step.result.is_ready()), None)

    def _is_due(self, *, started: bool, told: bool) -> bool:
        """Whether to wait for the oldest step in flight: while the devices have another, or nothing else is to be done.

        Args:
            started: a step was started just now.
            told: there is output already.
        """
        if self.pools is not None:
            return False  # see ``PoolSchedulers.wait_any``
        if self.draft_runs is not None:
            # Where sequences are preempted and prefilled in turns there is always a step to start: no more than runs.
            many = len(self._in_flight) > self.config.draft_runs * self.config.max_sequences
            return many or (bool(self._in_flight) and not (started or told))
        return len(self._in_flight) > started * self.config.stages

    def _cancel_stale_steps(self) -> None:
        """Cancels the steps in flight whose runs have all become invalid."""
        for step in [step for step in self._in_flight if all(plan.is_stale for plan in step.plans)]:
            step.result.cancel()
            self._in_flight.remove(step)

    def _seat(self, replica: int, plan: StepPlan) -> None:
        """Writes the logits-processor state of admitted sequences into their slots."""
        for sequence in plan.admitted:
            if sequence.request.params.changes_logits:
                self.runner.seat(replica, step_inputs.slot_row(sequence, self.runner.spec.vocab))

    def _start_step(self, plans: list[StepPlan]) -> _StepInFlight:
        """Packs the inputs of all replicas and starts the step on the device."""
        runner, metrics = self.runner, self.metrics
        many, tokens = max(len(plan.chunks) for plan in plans), max(plan.tokens for plan in plans)
        where: dict[str, Any] = {} if self.pools is None else {"engine": plans[0].replica}
        shape = runner.choose(
            many, tokens, **step_inputs.program_kind(plans, exact_prompts=self.config.mla != "exact"), **where
        )
        packed, tables = np.zeros((len(plans), shape.inputs.size), np.int32), self.scheduler.page_tables
        for own, plan in zip(packed, plans, strict=True):
            views, size = shape.inputs.views(own), runner.spec.page_size
            step_inputs.fill(plan, shape, tables[plan.replica], views, self.adapter_slots, size)
            metrics.prompt_tokens += sum(c.count for c in plan.chunks if c.start < len(c.sequence.request.prompt))
            metrics.padding_tokens += shape.tokens - plan.tokens
        metrics.steps += 1
        most = self.config.prompt_buckets[-1]
        room = StepRoom(shape.name, max(0, most - tokens), max(plan.steps for plan in plans) if shape.decode else 1)
        beside = None if self.side_work is None else self.side_work.fill(room)
        masks = step_inputs.grammar_masks(plans, shape, mask_width(runner.spec.vocab)) if shape.full else None
        result = runner.run(shape, packed, *([] if masks is None else [masks]), **where)
        return _StepInFlight(plans, shape, result, room, beside)

    def _fail_step(self, plans: list[StepPlan], error: StepFailedError) -> list[OutputDelta]:
        """Ends the requests of a step that could not be computed; the KV cache of the others is computed again.

        The first layers have keys and values of the step, the others have not, so no page is to be found again.
        """
        out: list[OutputDelta] = []
        for chunk in [chunk for plan in plans for chunk in plan.chunks]:
            out += self._fail(chunk.sequence.request, error)
        while self._in_flight:
            out += self._process_result(self._in_flight.popleft())
        self.scheduler.restart()
        return out

    def _process_result(self, step: _StepInFlight) -> list[OutputDelta]:
        """Waits for a step's result, adds its tokens to their sequences, and returns the output."""
        rows = np.asarray(step.result)
        state = self.scheduler.policy_state
        now = state.clock()
        seconds = now - self._last_result_times[step.plans[0].replica]
        if self.side_work is not None:
            seconds = self.side_work.landed(step.room, step.beside, seconds)
        if step.shape.decode:
            state.step_times = state.step_times.with_decoding(seconds / max(plan.steps for plan in step.plans))
        else:
            state.step_times = state.step_times.with_step(step.shape.tokens, seconds)
        self._record_step(step, seconds)
        out: list[OutputDelta] = []
        work: list[tuple[int, int, int]] = []
        for plan, own in zip(step.plans, rows, strict=True):
            out += self._replica_outputs(plan, step.shape, step.shape.outputs.views(own), work)
        windows = [group.window for group in self.runner.spec.groups]
        self.metrics.add_step(step.shape.name, seconds, work, windows, decode=step.shape.decode)
        self._last_result_times[step.plans[0].replica] = now
        if self.draft_runs is not None:
            self._cancel_stale_steps()
        return out

    def _record_step(self, step: _StepInFlight, seconds: float) -> None:
        """Records the time of a step of plain decoding, or of a verification without prefill, for the draft length."""
        chunks = [chunk for plan in step.plans for chunk in plan.chunks]
        speculates = any(plan.speculates for plan in step.plans)
        if step.shape.decode or (speculates and all(c.count == 1 + len(c.proposed) for c in chunks)):
            kind = "verification" if not step.shape.decode else "undrafted" if speculates else "plain"
            seconds -= sum(plan.drafting_seconds for plan in step.plans)
            passes = max(plan.steps for plan in step.plans)
            rows = max(plan.tokens for plan in step.plans)
            self.draft_length.record_step(rows, seconds / passes, kind)

    def _replica_outputs(
        self, plan: StepPlan, shape: StepShape, outputs: Mapping[str, np.ndarray], work: list[tuple[int, int, int]]
    ) -> list[OutputDelta]:
        """Output of one replica's step; appends the computed chunks to ``work``, see ``EngineMetrics.add_step``."""
        out, at = [], 0
        tokens = outputs["tokens"].tolist()
        for row, chunk in enumerate(plan.chunks):
            sequence, request = chunk.sequence, chunk.sequence.request
            if "evictions" in outputs:
                self._record_eviction(chunk, outputs["evictions"][:, row])
            if request.params.prompt_logprobs is not None and sequence.number == 0 and "scores" in outputs:
                step_outputs.record_prompt_scores(chunk, outputs, at)
            at += chunk.count
            gained, computed = 0, chunk.count
            if chunk.run is not None:
                if chunk.run.valid and sequence.finish is None:
                    first = shape.rows - chunk.count
                    sampled = [tokens[first + step][row] for step in range(chunk.count)]
                    out.append(
                        self._append_tokens(sequence, self._land_run(chunk, chunk.run, sampled), outputs, row, first)
                    )
                    gained = computed = len(out[-1].tokens)
            elif chunk.samples and sequence.finish is None:
                rows, first = plan.steps + len(chunk.proposed), 0
                if not (shape.decode or shape.tree_words):
                    first = shape.rows - rows
                sampled = [tokens[first + step][row] for step in range(rows)]
                refused = len(chunk.proposed) - chunk.accepted(sampled)
                sequence.pending -= rows
                if chunk.proposed:
                    self.scheduler.settle(sequence, refused)
                    self.metrics.add_draft(len(chunk.proposed), len(chunk.proposed) - refused)
                    self.draft_length.record_draft(sequence, len(chunk.proposed), len(chunk.proposed) - refused)
                out.append(self._append_tokens(sequence, sampled[: rows - refused], outputs, row, first))
                gained, computed = len(out[-1].tokens), chunk.count - refused
            work.append((chunk.start, gained if shape.decode else computed, gained))
        return out

    def _land_run(self, chunk: ScheduledChunk, run: DraftRun, sampled: list[int]) -> list[int]:
        """Tokens of a sequence that a run has made known; takes back what the runs behind it were to generate."""
        assert self.draft_runs is not None
        sequence = chunk.sequence
        known, verified, right, refused = self.draft_runs.land(sequence, run, sampled)
        sequence.pending -= len(known) + refused
        if refused:
            self.scheduler.settle(sequence, refused)
        sequence.unsettled = len(self.draft_runs.drafted(sequence))
        if verified:
            self.metrics.add_draft(verified, right)
        return known

    def _record_eviction(self, chunk: ScheduledChunk, found: np.ndarray) -> None:
        """Counts the entries that have stayed and left before a chunk, and releases the pages that became empty."""
        most, kept, dropped = found.T.tolist()
        if max(most) >= 0:
            self.metrics.kept_entries += sum(kept)
            self.metrics.dropped_entries += sum(dropped)
            self.scheduler.settle_evictions(chunk, most)

    def _append_tokens(
        self, sequence: Sequence, sampled: list[int], outputs: Mapping[str, np.ndarray], row: int, first: int
    ) -> OutputDelta:
        """Appends sampled tokens to a sequence, up to its end."""
        new, text, finish = step_outputs.append_tokens(sequence, sampled, outputs, row, self.version, first)
        self.metrics.generated_tokens += len(new)
        if finish is None and sequence.subtasks is not None:
            finish = step_outputs.end_subtask(sequence, sequence.subtasks, self.scheduler, self.metrics)
        if finish is None:
            sequence.text += text
            return output_delta(sequence, new, text)
        return self._finish_sequence(sequence, finish, new, text)

    def _finish_sequence(self, sequence: Sequence, finish: Finish, tokens: tuple[int, ...], text: str) -> OutputDelta:
        """Ends a sequence: flushes its detokenizer and frees its slot and pages."""
        sequence.finish = finish
        text += "" if sequence.detokenizer is None else sequence.detokenizer.end()
        sequence.text += text
        for group in self.runner.spec.groups:
            if group.rule is not None and by_scores(group.rule) is None:
                heads, kept = len(group.layers) * group.kv_spec.kv_heads, group.rule.capacity(sequence.computed)
                self.metrics.kept_entries += heads * kept
                self.metrics.dropped_entries += heads * (sequence.computed - kept)
        self.scheduler.finish(sequence)
        return output_delta(sequence, tokens, text, finish)
