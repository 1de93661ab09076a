"""Prefill scheduler: computes prompts up to the token after them, and keeps their pages until they are fetched."""

from __future__ import annotations

import sys
from typing import Any

from jaxllm.infer.scheduling.scheduler import Scheduler
from jaxllm.infer.scheduling.sequence import Sequence
from jaxllm.infer.scheduling.step_plan import StepPlan
from jaxllm.infer.speculate.draft_tree import NO_DRAFT, DraftTree
from jaxllm.infer.stages.draft_runs import DraftRun


class PrefillScheduler(Scheduler):
    """Scheduler of an engine of the prefill pool, see ``Scheduler``; its sequences never decode.

    A preempted sequence of the decode pool comes here too: its prompt is then all of its tokens.

    Attributes:
        computed: sequences whose last prefill chunk has been planned, in that order. They keep slot and pages.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.computed: list[Sequence] = []

    @property
    def handed_over(self) -> list[Sequence]:
        """Computed sequences that may leave, in order.

        Not those whose first token is their last, nor those whose request has completions that wait for their pages.
        """
        needed = {one.request.id for one in self.forks}
        return [one for one in self.computed if one.remaining > 0 and one.request.id not in needed]

    def release(self, sequence: Sequence) -> None:
        """Frees slot and pages of a sequence that goes on elsewhere; its pages stay in the prefix cache."""
        self._prefix_cache.register(sequence)
        self.running.remove(sequence)
        self._free(sequence, keep=True)

    def _decodes_and_prefills(self, running: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        return [], [one for one in running if one not in self.computed]

    def _schedule(
        self,
        plan: StepPlan,
        sequence: Sequence,
        count: int,
        draft: DraftTree = NO_DRAFT,
        run: DraftRun | None = None,
    ) -> None:
        super()._schedule(plan, sequence, count, draft, run)
        if plan.chunks[-1].samples:
            self.computed.append(sequence)

    def _fits_whole(self, sequence: Sequence) -> bool:
        """Whether all prompts that are not computed, and this one, can complete: nothing is generated here."""
        prompts = [one for one in self.running if one not in self.computed]
        return self.needs.suffices(self.needs.of_all((one, one.length - one.computed) for one in (*prompts, sequence)))

    def _fits_predicted(self, sequence: Sequence) -> bool:
        return self._fits_whole(sequence)

    def _room(self) -> int:
        return sys.maxsize

    def _make_room(self, plan: StepPlan) -> None:
        """See ``Scheduler``; sequences that are about to leave are not preempted."""
        if not self._free_waiting(0):
            self._preempt(max((one for one in self.running if one not in self.computed), key=lambda s: s.rank), plan)

    def _free(self, sequence: Sequence, keep: bool = False) -> None:
        if sequence in self.computed:
            self.computed.remove(sequence)
        super()._free(sequence, keep)
