"""Step plan: what the scheduler decides for one step, and the protocol that all schedulers have."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from jaxllm.infer.chunks.chunk_moves import ChunkMove
from jaxllm.infer.page_store import Page
from jaxllm.infer.scheduling.page_allocator import PageAllocator
from jaxllm.infer.scheduling.policy_state import PolicyState
from jaxllm.infer.scheduling.prefix_cache import PrefixCache
from jaxllm.infer.scheduling.sequence import Sequence
from jaxllm.infer.speculate.draft_tree import NO_DRAFT, DraftTree
from jaxllm.infer.stages.draft_runs import DraftRun


@dataclass(frozen=True)
class ScheduledChunk:
    """Chunk of a sequence in a step: a prefill chunk of ``count`` tokens, or one token to decode.

    Attributes:
        sequence: the sequence.
        start: position of the first token.
        count: number of tokens.
        samples: whether a token is sampled after the chunk.
        tree: tokens of a draft, of which the last are the chunk's last ones: what a step verifies is the sequence's
            last token and all of them, what a draft model reads is some after others that it has read before.
        proposed: those of the chunk.
        fresh: of each layer group with a retention rule: (first, stop) of the sequence's pages that are new since its
            last chunk.
        life: see ``Sequence``, when it was planned.
        run: run of the sequence that the chunk is, see ``draft_runs``: it samples after all of its tokens.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    proposed: tuple[int, ...] = ()
    tree: DraftTree = NO_DRAFT
    fresh: tuple[tuple[int, int], ...] = ()
    life: int = 0
    run: DraftRun | None = None

    def accepted(self, sampled: list[int]) -> int:
        """Number of the proposed tokens that were sampled: those before the first that differs from all drafts."""
        return min(self.tree.accepted(sampled), len(self.proposed))


@dataclass
class StepPlan:
    """Plan of one step of one replica.

    Attributes:
        chunks: in the order of the flat batch.
        steps: tokens that each chunk decodes on the device before the host reads them; 1 if there is prefill.
        copies: per layer group: (page, its copy), made in order before anything is computed (copy-on-write).
        swap_out: preempted sequences to copy to the host first: (sequence, per group: columns and pages).
        swap_in: sequences to copy back after that: the same.
        spills: evicted pages to copy to the page store before anything else: (layer group, page, hash).
        restores: pages to copy from the page store after that: (layer group, page, contents).
        moves: copies of cached chunks into sequences' pages, after that.
        admitted: sequences that got a slot.
        speculates: tokens were to be proposed for some of its sequences.
        drafting_seconds: time that the proposer took.
        replica: data-parallel replica that computes it, or engine of disaggregated pools.
    """

    chunks: list[ScheduledChunk] = field(default_factory=list)
    steps: int = 1
    copies: list[list[tuple[int, int]]] = field(default_factory=list)
    swap_out: list[tuple[Sequence, list[tuple[list[int], list[int]]]]] = field(default_factory=list)
    swap_in: list[tuple[Sequence, list[tuple[list[int], list[int]]]]] = field(default_factory=list)
    spills: list[tuple[int, int, bytes]] = field(default_factory=list)
    restores: list[tuple[int, int, Page]] = field(default_factory=list)
    moves: list[ChunkMove] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    speculates: bool = False
    drafting_seconds: float = 0.0
    replica: int = 0

    @property
    def is_stale(self) -> bool:
        """Whether nothing needs what the step computes: runs that have become invalid, and no copies of pages."""
        runs = [chunk.run for chunk in self.chunks]
        return not any(self.copies) and all(run is not None and not run.valid for run in runs)

    @property
    def tokens(self) -> int:
        """Number of rows of the flat batch."""
        return sum(chunk.count for chunk in self.chunks)


@runtime_checkable
class StepScheduler(Protocol):
    """Scheduler of an engine: ``Scheduler`` for one replica, ``ReplicaSchedulers`` for several."""

    policy_state: PolicyState
    """Scheduling policy and its state."""

    @property
    def idle(self) -> bool:
        """Whether there is no sequence to work on."""
        ...

    @property
    def pages(self) -> list[PageAllocator]:
        """Page allocators of all pools."""
        ...

    @property
    def page_tables(self) -> list[list[np.ndarray]]:
        """Page tables by replica (or engine of the pools) and layer group, int32[R, J]."""
        ...

    @property
    def prefix_caches(self) -> list[PrefixCache]:
        """Prefix caches by replica."""
        ...

    @property
    def running(self) -> list[Sequence]:
        """Sequences in the batch."""
        ...

    @property
    def waiting(self) -> list[Sequence] | deque[Sequence]:
        """Sequences that wait for a slot."""
        ...

    @property
    def forks(self) -> list[Sequence]:
        """Further completions of requests, which wait for the prefill of their request's first."""
        ...

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens found in the prefix cache."""
        ...

    @property
    def preemptions(self) -> int:
        """Number of preemptions so far."""
        ...

    @property
    def returned_pages(self) -> int:
        """Number of pages that evictions by scores, and finished subtasks, have emptied so far."""
        ...

    def sequences(self) -> list[Sequence]:
        """All sequences that have not ended."""
        ...

    def add(self, sequence: Sequence) -> None:
        """Adds a new sequence."""
        ...

    def finish(self, sequence: Sequence) -> None:
        """Removes a sequence that has ended, and frees its slot and pages."""
        ...

    def settle(self, sequence: Sequence, refused: int) -> None:
        """Takes back the proposed tokens that a verification has refused, once its step has landed."""
        ...

    def settle_evictions(self, chunk: ScheduledChunk, most: list[int]) -> None:
        """Releases the pages that an eviction by scores has emptied, once its step has landed.

        Args:
            chunk: chunk that began with the eviction.
            most: of each page table with a retention rule, the most entries of a layer and kv head that have stayed.
        """
        ...

    def cut(self, sequence: Sequence, start: int, stop: int) -> None:
        """Takes generated tokens out of a sequence without pending ones; those behind them are computed again."""
        ...

    def restart(self) -> None:
        """Drops the whole KV cache and queues all sequences again; no step may be in flight."""
        ...

    def plans(self) -> list[StepPlan]:
        """Plans of the next step, one per replica, or that of one engine of pools; none if nothing can be computed."""
        ...
