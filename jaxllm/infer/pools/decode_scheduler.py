"""Decode scheduler: takes sequences whose prompt was computed elsewhere, once their pages have arrived."""

from __future__ import annotations

from typing import Any

from jaxllm.infer.pools.page_transfer import PageTransfer
from jaxllm.infer.scheduling.page_allocator import NO_PAGE
from jaxllm.infer.scheduling.scheduler import Scheduler
from jaxllm.infer.scheduling.sequence import Sequence
from jaxllm.infer.scheduling.step_plan import StepPlan


class DecodeScheduler(Scheduler):
    """Scheduler of an engine of the decode pool, see ``Scheduler``; its sequences never prefill.

    A sequence that it preempts waits here if it was swapped out to the host; otherwise the prefill pool computes it
    again.

    Attributes:
        arriving: sequences that have pages here, with the transfer that fills them.
        shared_pages: pages that did not have to be moved so far, because they were here already.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.arriving: dict[Sequence, PageTransfer] = {}
        self.shared_pages = 0
        self._seated: list[Sequence] = []  # in a slot, and in no plan yet

    @property
    def idle(self) -> bool:
        """Whether there is no sequence to work on."""
        return super().idle and not self.arriving

    @property
    def awaited(self) -> list[PageTransfer]:
        """Transfers that alone keep a sequence from its slot."""
        return [one for sequence, one in self.arriving.items() if not sequence.pending] if self._slots else []

    def sequences(self) -> list[Sequence]:
        """All sequences that have not ended."""
        return [*super().sequences(), *self.arriving]

    def reserve(self, sequence: Sequence) -> list[list[tuple[int, int]]] | None:
        """Gives a sequence pages here instead of those that it has elsewhere; None if there is no room.

        Pages that the prefix cache has under the same hash are shared.

        Returns:
            per layer group: (page there, page here) of those whose contents have to come.
        """
        if self.waiting or len(self.running) + len(self.arriving) >= self.config.max_sequences:
            return None
        there, sequence.pages = sequence.pages, [[] for _ in self._pools]
        found = [self._found(sequence, group, own) for group, own in enumerate(there)]
        if not self._has_room(sequence, there, found):
            sequence.pages = there
            return None
        for pages, here in zip(self._allocators, found, strict=True):
            for page in here.values():
                pages.share(page)
        moves: list[list[tuple[int, int]]] = [[] for _ in there]
        for group, (pages, own, here) in enumerate(zip(self._allocators, there, found, strict=True)):
            self.shared_pages += len(here)
            for column, page in enumerate(own):
                if page != NO_PAGE and column not in here:
                    moves[group].append((page, pages.allocate()))
                    sequence.pages[group].append(moves[group][-1][1])
                else:
                    sequence.pages[group].append(here.get(column, NO_PAGE))
        sequence.registered = 0
        return moves

    def _found(self, sequence: Sequence, group: int, there: list[int]) -> dict[int, int]:
        """Pages here, by column, with the contents that a sequence's pages elsewhere have."""
        whole = min(sequence.computed, len(sequence.tokens)) // self.page_size if self.config.prefix_cache else 0
        pages = [
            (column, self._allocators[group].find(sequence.page_hash(column, self.page_size)))
            for column in range(min(whole, len(there)))
            if there[column] != NO_PAGE
        ]
        return {column: page for column, page in pages if page is not None}

    def _has_room(self, sequence: Sequence, there: list[list[int]], found: list[dict[int, int]]) -> bool:
        """Whether there are pages for what a sequence has computed and its next token, and for what its policy asks."""
        others = bool(self.running or self.arriving)
        if self.policy_state.reserves_whole and not self._fits_whole(sequence):
            return False
        if self.policy_state.reserves_predicted and others and not self._fits_predicted(sequence):
            return False
        columns = sequence.computed // self.page_size + 1
        # A found page that no sequence has stops being available too.
        needs = [
            sum(page != NO_PAGE for page in own) - sum(pages.ref_counts[page] > 0 for page in here.values())
            + max(0, columns - len(own))
            for pages, own, here in zip(self._allocators, there, found, strict=True)
        ]  # fmt: skip
        return self.needs.suffices(needs, self._spare if others else 0)

    def plan(self) -> StepPlan | None:
        """See ``Scheduler``; first takes the sequences whose pages have arrived."""
        for sequence in [one for one, transfer in self.arriving.items() if not one.pending and transfer.has_arrived]:
            if self._slots:
                self.arriving.pop(sequence).land()
                sequence.slot = self._slots.pop()
                self.running.append(sequence)
                self._seated.append(sequence)
                for table, own in zip(self.tables, sequence.pages, strict=True):
                    table[sequence.slot, : len(own)] = own
        plan = super().plan()
        self._seated = [one for one in self._seated if one in self.running]
        if plan is not None:
            plan.admitted += self._seated
            self._seated.clear()
        return plan

    def finish(self, sequence: Sequence) -> None:
        """See ``Scheduler``; the contents of pages that are on their way are dropped."""
        if (transfer := self.arriving.pop(sequence, None)) is None:
            super().finish(sequence)
            return
        transfer.drop()
        self.policy_state.finish(sequence)
        self._free(sequence)

    def restart(self) -> None:
        """See ``Scheduler``."""
        for transfer in self.arriving.values():
            transfer.drop()
        self.waiting.extend(self.arriving)
        self.arriving.clear()
        super().restart()

    def preempted(self) -> list[Sequence]:
        """Removes and returns the preempted sequences that are to be computed again, the first to arrive last."""
        found = [one for one in self.waiting if one.swapped is None]
        for sequence in found:
            self.waiting.remove(sequence)
        return sorted(found, key=lambda one: -one.order)

    def _decode_steps(self, decodes: list[Sequence], prefills: list[Sequence]) -> int:
        return 1 if self.arriving else super()._decode_steps(decodes, prefills)

    def _admit(self, sequence: Sequence, budget: int, plan: StepPlan) -> int:
        """Admits a waiting sequence that was swapped out; another is not for this pool."""
        return 0 if sequence.swapped is None else super()._admit(sequence, budget, plan)
