"""Schedulers of data-parallel replicas: one queue for all; each replica has its own sequences and pages.

A request waits in the common queue and is assigned to a replica when that has a free slot: to the one with the longest
cached prefix, unless that one has clearly more load than another. All replicas run the same program, so all decode
equally many tokens per step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.scheduling.page_allocator import PageAllocator
from jaxllm.infer.scheduling.policy_state import PolicyState
from jaxllm.infer.scheduling.prefix_cache import PrefixCache
from jaxllm.infer.scheduling.scheduler import Scheduler
from jaxllm.infer.scheduling.sequence import Sequence
from jaxllm.infer.scheduling.step_plan import ScheduledChunk, StepPlan


class ReplicaSchedulers:
    """Scheduler of an engine with several replicas, see ``StepScheduler``.

    Args:
        config: configuration of the engine.
        make: makes the scheduler of one replica.
        count: number of replicas.
        policy_state: scheduling policy of all replicas.

    Attributes:
        schedulers: scheduler of each replica.
        unassigned: sequences that have no replica yet.
    """

    def __init__(self, config: EngineConfig, make: Callable[[], Scheduler], count: int, policy_state: PolicyState):
        self.config, self.policy_state = config, policy_state
        self.schedulers = [make() for _ in range(count)]
        self.unassigned: list[Sequence] = []

    @property
    def entrances(self) -> list[Scheduler]:
        """Schedulers that new requests are assigned to."""
        return self.schedulers

    @property
    def idle(self) -> bool:
        """Whether there is no sequence to work on."""
        return not self.unassigned and all(one.idle for one in self.schedulers)

    @property
    def pages(self) -> list[PageAllocator]:
        """Page allocators of all replicas."""
        return [pages for one in self.schedulers for pages in one.pages]

    @property
    def page_tables(self) -> list[list[np.ndarray]]:
        """Page tables by replica and layer group, int32[R, J]."""
        return [one.tables for one in self.schedulers]

    @property
    def running(self) -> list[Sequence]:
        """Sequences in the batches of all replicas."""
        return [s for one in self.schedulers for s in one.running]

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences that wait for a slot."""
        return [*self.unassigned, *(s for one in self.schedulers for s in one.waiting)]

    @property
    def forks(self) -> list[Sequence]:
        """Further completions of requests, which wait for the prefill of their request's first."""
        return [s for one in self.schedulers for s in one.forks]

    @property
    def prefix_caches(self) -> list[PrefixCache]:
        """Prefix cache of each replica."""
        return [cache for one in self.schedulers for cache in one.prefix_caches]

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return sum(one.hit_tokens for one in self.schedulers)

    @property
    def preemptions(self) -> int:
        """Number of preemptions so far."""
        return sum(one.preemptions for one in self.schedulers)

    @property
    def returned_pages(self) -> int:
        """Number of pages that evictions by scores, and finished subtasks, have emptied so far."""
        return sum(one.returned_pages for one in self.schedulers)

    def sequences(self) -> list[Sequence]:
        """All sequences that have not ended."""
        return [*self.unassigned, *(s for one in self.schedulers for s in one.sequences())]

    def add(self, sequence: Sequence) -> None:
        """Adds a new sequence to the common queue."""
        self.policy_state.add(sequence, self.sequences())
        self.unassigned.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Removes a sequence that has ended, and frees its slot and pages."""
        if sequence in self.unassigned:
            self.unassigned.remove(sequence)
        else:
            self.schedulers[sequence.replica].finish(sequence)

    def settle(self, sequence: Sequence, refused: int) -> None:
        """Takes back the proposed tokens that a verification has refused."""
        self.schedulers[sequence.replica].settle(sequence, refused)

    def settle_evictions(self, chunk: ScheduledChunk, most: list[int]) -> None:
        """Releases the pages that an eviction by scores has emptied."""
        self.schedulers[chunk.sequence.replica].settle_evictions(chunk, most)

    def cut(self, sequence: Sequence, start: int, stop: int) -> None:
        """Takes generated tokens out of a sequence."""
        self.schedulers[sequence.replica].cut(sequence, start, stop)

    def restart(self) -> None:
        """Drops the KV cache of all replicas and queues all sequences again; no step may be in flight."""
        for one in self.schedulers:
            one.restart()

    def plans(self) -> list[StepPlan]:
        """Plan of each replica, possibly empty; no plans if no replica can compute anything now."""
        self._assign()
        # All replicas run equally many decode steps: as many as the one that can run the fewest.
        most = 1 if self.unassigned else min((one.next_steps for one in self.schedulers if not one.idle), default=1)
        found = []
        for number, one in enumerate(self.schedulers):
            one.max_steps = most
            found.append(one.plan() or StepPlan(copies=[[] for _ in one.tables]))
            found[-1].replica = number
        return found if any(plan.chunks or plan.swap_out for plan in found) else []

    def _assign(self) -> None:
        """Assigns the next requests, each with all its completions, to replicas with free slots."""
        if self.unassigned and self.policy_state.policy is not None:
            others = self.waiting[len(self.unassigned) :]
            many = len(self.unassigned) + len(others) + len(self.running)
            self.policy_state.rank(self.running, self.waiting, self.schedulers[0].page_size)
            self.unassigned.sort(key=lambda s: s.rank)
            admissible = [s for s in self.unassigned if s.rank < many]  # the others are held back by the policy
        else:
            admissible = list(self.unassigned)
        while admissible and (replica := self._choose_replica(admissible[0])) is not None:
            for sequence in [s for s in self.unassigned if s.request is admissible[0].request]:
                sequence.replica = replica
                self.unassigned.remove(sequence)
                self.schedulers[replica].enqueue(sequence)
            admissible = [s for s in admissible if s in self.unassigned]

    def _choose_replica(self, sequence: Sequence) -> int | None:
        """Replica for a sequence; None if all are full."""
        loads, slots = [len(one.sequences()) for one in self.entrances], self.config.max_sequences
        free = [r for r, load in enumerate(loads) if load < slots and load - min(loads) <= max(1, slots // 4)]
        return min(free, key=lambda r: (-self._cached_columns(self.entrances[r], sequence), loads[r]), default=None)

    def _cached_columns(self, one: Scheduler, sequence: Sequence) -> int:
        """Number of pages of the sequence's prefix that a replica has in its prefix cache."""
        if not self.config.prefix_cache:
            return 0
        whole = [pages for pages, window in zip(one.pages, one.windows, strict=True) if window is None]
        columns = len(sequence.tokens) // one.page_size if whole else 0
        for column in range(columns):
            digest = sequence.page_hash(column, one.page_size)
            if any(pages.find(digest) is None for pages in whole):
                return column
        return columns
