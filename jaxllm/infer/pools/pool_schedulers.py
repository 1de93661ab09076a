"""Pool schedulers: one queue for all; a sequence is computed in the prefill pool, and goes on in the decode pool.

A request is assigned to a prefill engine as to a data-parallel replica. When its last prefill chunk has been started,
the decode engine with the fewest sequences gets it, as soon as one has room: the pages that this engine lacks are read
behind that chunk, before the next step of the prefill engine (DistServe, arXiv:2401.09670; Splitwise,
arXiv:2311.18677). Every engine has steps of its own, and up to two of them in flight, as an engine without pools has.
"""

from __future__ import annotations

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
from jaxllm.infer.scheduling.policy_state import PolicyState
from jaxllm.infer.scheduling.replica_schedulers import ReplicaSchedulers
from jaxllm.infer.scheduling.sequence import Sequence
from jaxllm.infer.scheduling.step_plan import StepPlan

IN_FLIGHT = 2
"""Steps of an engine that may be in flight: one that its devices compute, and one that the host has prepared."""
POLL_SECONDS = 1e-4


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

    @property
    def entrances(self) -> list[Any]:
        """Schedulers that new requests are assigned to."""
        return self.prefill

    @property
    def shared_pages(self) -> int:
        """Pages that did not have to be moved, because the decode engine had them already."""
        return sum(one.shared_pages for one in self.decode)

    def plans(self) -> list[StepPlan]:
        """Plan of the next step of one engine, those of the decode pool first; none if no engine can start one."""
        self._take_back()
        self._assign()
        self._hand_over()
        flying = Counter(self._in_flight())
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
        while not (any(one.is_ready() for one in steps) or any(one.has_arrived for one in transfers)):
            if not (steps or transfers):
                return False
            time.sleep(POLL_SECONDS)
        return True

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
        for other in sorted(self.decode, key=lambda other: len(other.sequences())):
            if (moves := other.reserve(sequence)) is None:
                continue
            taker, here = self.schedulers.index(other), sequence.pages
            transfer = self.transfers.start(giver, taker, moves)
            sequence.pages = there
            one.release(sequence)
            sequence.pages, sequence.registered, sequence.replica = here, 0, taker
            other.arriving[sequence] = transfer
            return True
        return False
