"""Page needs: pages of the KV cache that sequences will need, and whether the pools have them; nothing is changed."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from jaxllm.infer.scheduling.page_allocator import PageAllocator
from jaxllm.infer.scheduling.policies import revise_prediction
from jaxllm.infer.scheduling.sequence import Sequence
from pallas_kernels.paged_attention.retention import RetentionRule, by_scores


@dataclass(frozen=True)
class PageNeeds:
    """Page needs of an engine's sequences.

    Attributes:
        pages: page allocator of each pool.
        pools: pool of each layer group.
        windows: sliding window of each layer group, or None.
        rules: retention rule of each layer group, or None.
        page_size: tokens of a page.
    """

    pages: list[PageAllocator]
    pools: tuple[int, ...]
    windows: Many[int | None]
    rules: Many[RetentionRule | None]
    page_size: int

    def of(self, sequence: Sequence, count: int) -> list[int]:
        """Pages of each group to allocate for ``count`` more tokens."""
        return [
            max(0, -(-(self.entries(group, sequence) + count) // self.page_size) - len(own))
            + self.copies(self.pages[pool], own, sequence.computed)
            for group, (pool, own) in enumerate(zip(self.pools, sequence.pages, strict=True))
        ]

    def of_all(self, counts: Iterable[tuple[Sequence, int]]) -> list[int]:
        """Pages of each group to allocate for more tokens of several sequences."""
        needs = [self.of(sequence, count) for sequence, count in counts]
        return np.sum(needs, axis=0, dtype=int).tolist() if needs else [0] * len(self.pools)

    def predicted(self, sequences: Iterable[Sequence]) -> list[int]:
        """Pages of each group for all that sequences are predicted to generate.

        A prediction is doubled where a sequence has generated more.
        """
        return self.of_all(
            (one, one.length - one.computed + min(one.remaining, math.ceil(left)))
            for one in sequences
            for left in (revise_prediction(one.predicted, one.generated) - one.generated,)
        )

    def suffices(self, needs: Iterable[int], spare: int = 0, share: float = 1.0) -> bool:
        """Whether so many pages of each layer group can be allocated, and ``spare`` of each pool stay free, and all of
        it but a share."""
        total = [0] * len(self.pages)
        for pool, need in zip(self.pools, needs, strict=True):
            total[pool] += need
        return all(
            need <= pages.available - spare - math.ceil((1 - share) * pages.count)
            for need, pages in zip(total, self.pages, strict=True)
        )

    def room(self, running: list[Sequence], spare: int) -> int:
        """Pages for each group that keeps all tokens which the running sequences are not predicted to need."""
        whole = zip(self.pools, self.windows, self.rules, strict=True)
        pools = [pool for pool, window, rule in whole if window is None and rule is None]
        left = [pages.available - (spare if running else 0) for pages in self.pages]
        for pool, need in zip(self.pools, self.predicted(running), strict=True):
            left[pool] -= need
        return min((left[pool] // pools.count(pool) for pool in set(pools)), default=sys.maxsize)

    def entries(self, group: int, sequence: Sequence) -> int:
        """Slots of a layer group that the computed tokens of a sequence take: those that its rule keeps, or all."""
        rule = self.rules[group]
        if rule is None:
            return sequence.computed
        if (scored := by_scores(rule)) is None:
            return rule.capacity(sequence.computed)
        evicts = sequence.computed % scored.interval == 0
        return min(sequence.entries[group], rule.capacity(sequence.computed)) if evicts else sequence.entries[group]

    def copies(self, pages: PageAllocator, own: list[int], position: int) -> int:
        """1 if the page of this position is shared, so that it has to be copied before a write; else 0."""
        column = position // self.page_size
        return int(column < len(own) and not pages.writable(own[column]))
