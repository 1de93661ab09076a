"""Pool schedulers: one queue for all; a sequence is computed in the prefill pool, and goes on in the decode pool.

A request is assigned to a prefill engine as to a data-parallel replica. When its last prefill chunk has been started,
a decode engine gets it, as soon as one has room; of the least busy ones, the one with most of its prefix. The pages
that this engine lacks are read behind that chunk, before the next step of the prefill engine (DistServe,
arXiv:2401.09670; Splitwise, arXiv:2311.18677). Every engine has steps of its own, and up to two of them in flight, as
an engine without pools has.

Where decode engines have processes of their own, one may be lost: its sequences end, its page books are dropped, and
the next process that comes takes its place with empty pages. One that leaves gets no more sequences, and goes when its
own have ended. While there is none, computed sequences wait in the prefill pool, up to ``DecodeListener.patience``
seconds.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from jaxllm.infer.engine.engine_metrics import EngineMetrics
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.pools.decode_scheduler import DecodeScheduler
from jaxllm.infer.pools.page_transfer import PageTransfers
from jaxllm.infer.pools.pooled_runner import PooledRunner
from jaxllm.infer.pools.prefill_scheduler import PrefillScheduler
from jaxllm.infer.pools.remote_engine import DecodeProcessLostError, RemoteDecodeEngine
from jaxllm.infer.scheduling.policy_state import PolicyState
from jaxllm.infer.scheduling.replica_schedulers import ReplicaSchedulers
from jaxllm.infer.scheduling.sequence import Request, Sequence
from jaxllm.infer.scheduling.step_plan import StepPlan

LOG = logging.getLogger(__name__)
IN_FLIGHT = 2
"""Steps of an engine that may be in flight: one that its devices compute, and one that the host has prepared."""
POLL_SECONDS = 1e-4
PROCESS_SECONDS = 0.02
"""Longest wait for a decode process in ``wait_any``: requests are taken and cancelled between two calls."""


class PoolSchedulers(ReplicaSchedulers):
    """Schedulers of disaggregated pools, see ``ReplicaSchedulers``.

    Args:
        config: configuration of the engine.
        make: makes a scheduler of a class, for an engine that has so many pages in each of its page pools.
        runner: runner of both pools.
        metrics: counts the pages that are moved.
        policy_state: scheduling policy of all engines.
        in_flight: numbers of the engines of all steps in flight.

    Attributes:
        prefill, decode: schedulers of the engines of each pool.
        transfers: moves pages.
    """

    def __init__(
        self,
        config: EngineConfig,
        make: Callable[[type[Any], tuple[int, ...]], Any],
        runner: PooledRunner,
        metrics: EngineMetrics,
        policy_state: PolicyState,
        in_flight: Callable[[], Iterable[int]],
    ):
        self.config, self.policy_state, self._in_flight = config, policy_state, in_flight
        self.transfers = PageTransfers(runner, metrics)
        self.prefill: list[PrefillScheduler] = [make(PrefillScheduler, one.spec.pages) for one in runner.prefill]
        self.decode: list[DecodeScheduler] = [make(DecodeScheduler, one.spec.pages) for one in runner.decode]
        self.schedulers: list[Any] = [*self.prefill, *self.decode]
        self.unassigned: list[Sequence] = []
        self._make, self._runner = make, runner
        self._alone_since: float | None = None  # since when there is no decode process

    @property
    def idle(self) -> bool:
        """Whether there is no sequence to work on, and decode processes have been told so."""
        return super().idle and all(one.resting for one in self._runner.decode)

    @property
    def entrances(self) -> list[Any]:
        """Schedulers that new requests are assigned to."""
        return self.prefill

    @property
    def shared_pages(self) -> int:
        """Pages that did not have to be moved, because the decode engine had them already."""
        return sum(one.shared_pages for one in self.decode)

    @property
    def connected(self) -> int:
        """Decode engines that are there, or will be at the next step: all, unless they have processes of their own."""
        listener, found = self._runner.decode_listener, sum(one.connected for one in self._runner.decode)
        return found if listener is None else min(len(self.decode), found + listener.waiting)

    def plans(self) -> list[StepPlan]:
        """Plan of the next step of one engine, those of the decode pool first; none if no engine can start one."""
        self._replace_lost()
        self._take_back()
        self._assign()
        self._hand_over()
        flying = Counter(self._in_flight())
        for number, (one, engine) in enumerate(zip(self.decode, self._runner.decode, strict=True), len(self.prefill)):
            if one.idle and not flying[number]:
                engine.rest()
        for number in (*range(len(self.prefill), len(self.schedulers)), *range(len(self.prefill))):
            if flying[number] < IN_FLIGHT and (plan := self.schedulers[number].plan()) is not None:
                plan.replica = number
                return [plan]
        return []

    def wait_any(self, results: Iterable[Any]) -> bool:
        """Waits until the result of a step, or a sequence's pages, are there; False if there is nothing to wait for.

        Args:
            results: of the steps in flight.
        """
        flying, steps = Counter(self._in_flight()), list(results)
        transfers = [
            transfer
            for number, one in enumerate(self.decode, len(self.prefill))
            if flying[number] < IN_FLIGHT
            for transfer in one.awaited
        ]
        began = time.monotonic()
        while not (any(one.is_ready() for one in steps) or any(one.has_arrived for one in transfers)):
            if all(one.connected for one in self._runner.decode):
                if not (steps or transfers):
                    return False
            elif self.lost() or time.monotonic() > began + PROCESS_SECONDS:
                return True  # requests end, or a process may have come
            time.sleep(POLL_SECONDS)
        return True

    # Decode engines in other processes

    def lost(self) -> list[tuple[int, DecodeProcessLostError]]:
        """Numbers of the decode engines whose process has gone since, and the errors of their sequences."""
        return [
            (number, one.session.failure())
            for number, one in enumerate(self._runner.decode, len(self.prefill))
            if isinstance(one, RemoteDecodeEngine) and one.session is not None and one.session.lost
        ]

    def forget(self, number: int) -> None:
        """Drops the page books of a decode engine whose process has gone and whose sequences have ended."""
        one = self._runner.decode[number - len(self.prefill)]
        assert isinstance(one, RemoteDecodeEngine)
        assert one.session is not None
        log, what = (LOG.info, "has let go of") if one.session.leaving else (LOG.warning, "has lost")
        log("decode engine %d: %s the process at %s", number - len(self.prefill), what, one.session.link.peer)
        one.session = None
        self._renew(number)

    def stranded(self) -> list[tuple[Request, DecodeProcessLostError]]:
        """Requests that have waited too long for a decode process, and their errors."""
        listener = self._runner.decode_listener
        if listener is None or any(one.connected for one in self._runner.decode):
            self._alone_since = None
            return []
        now = time.monotonic()
        self._alone_since = self._alone_since or now
        if now - self._alone_since < listener.patience:
            return []
        error = DecodeProcessLostError(
            f"no decode process has been connected to {listener.address[0]}:{listener.address[1]} for "
            f"{listener.patience:g} s, and completions of more than one token need one: start it (jaxllm serve "
            "--disaggregation-mode decode) and send the request again."
        )
        return list({s.request.id: (s.request, error) for one in self.prefill for s in one.handed_over}.values())

    def _replace_lost(self) -> None:
        """Gives decode engines without a process one that has come."""
        for number, one in enumerate(self._runner.decode, len(self.prefill)):
            if isinstance(one, RemoteDecodeEngine) and one.session is None:
                assert self._runner.decode_listener is not None
                if (session := self._runner.decode_listener.take()) is not None:
                    one.use(session)
                    self._renew(number)
                    LOG.info("decode engine %d: has the process at %s", number - len(self.prefill), session.link.peer)

    def _renew(self, number: int) -> None:
        """Gives a decode engine a scheduler whose pages are empty; counts go on."""
        at = number - len(self.prefill)
        old, new = self.decode[at], self._make(DecodeScheduler, self._runner.decode[at].spec.pages)
        for count in ("shared_pages", "preemptions", "hit_tokens", "returned_pages"):
            setattr(new, count, getattr(old, count))
        self.decode[at] = self.schedulers[number] = new

    # Sequences between engines

    def restart(self) -> None:
        """Drops the KV cache of all engines and queues all sequences again; no step may be in flight."""
        super().restart()
        self._take_back()

    def _take_back(self) -> None:
        """Queues the preempted sequences of the decode pool again, in front: their KV cache is computed again."""
        for sequence in [sequence for one in self.decode for sequence in one.preempted()]:
            sequence.replica = min(range(len(self.prefill)), key=lambda n: len(self.prefill[n].sequences()))
            self.prefill[sequence.replica].waiting.appendleft(sequence)

    def _hand_over(self) -> None:
        """Hands computed sequences over to the decode pool, in order, while it has room."""
        for giver, one in enumerate(self.prefill):
            for sequence in one.handed_over:
                if not self._hand_over_one(giver, one, sequence):
                    break

    def _hand_over_one(self, giver: int, one: PrefillScheduler, sequence: Sequence) -> bool:
        there = sequence.pages
        engines = {id(one): engine for one, engine in zip(self.decode, self._runner.decode, strict=True)}
        for other in self._takers(sequence):
            if not engines[id(other)].enter() or (moves := other.reserve(sequence)) is None:
                continue
            taker, here = self.schedulers.index(other), sequence.pages
            transfer = self.transfers.start(giver, taker, moves)
            sequence.pages = there
            one.release(sequence)
            sequence.pages, sequence.registered, sequence.replica = here, 0, taker
            other.arriving[sequence] = transfer
            return True
        return False

    def _takers(self, sequence: Sequence) -> list[DecodeScheduler]:
        """Decode engines, the best for a sequence first: of the least busy ones, the one with most of its prefix."""
        loads = [len(one.sequences()) for one in self.decode]
        near = min(loads) + max(1, self.config.max_sequences // 4)
        columns = [
            self._cached_columns(one, sequence) if load <= near else 0
            for one, load in zip(self.decode, loads, strict=True)
        ]
        order = sorted(range(len(loads)), key=lambda n: (loads[n] > near, -columns[n], loads[n]))
        return [self.decode[n] for n in order]
