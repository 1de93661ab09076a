"""One scheduler for several replicas of a model, each with sequences and pages of its own.

A request waits in one line for all, and is handed to a replica when that has a place for it: to one that knows its
beginning, unless that has clearly more to do than another. All run one program, so all make as many tokens a step.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxllm.infer.engine.page_allocator import Pages
from jaxllm.infer.engine.policy_state import Ranking
from jaxllm.infer.engine.scheduler import Scheduler
from jaxllm.infer.engine.sequence import Sequence
from jaxllm.infer.engine.step_plan import Plan
from jaxllm.infer.engine_config import EngineConfig


class Replicas:
    """What ``Scheduler`` is, for several of them.

    Args:
        config: of the engine.
        each: makes the scheduler of a replica.
        count: of them.
        ranking: who is next, of all.
    """

    def __init__(self, config: EngineConfig, each: Callable[[], Scheduler], count: int, ranking: Ranking):
        self.config, self.ranking = config, ranking
        self.each = [each() for _ in range(count)]
        self.lobby: list[Sequence] = []  # handed to no replica yet

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.lobby and all(one.idle for one in self.each)

    @property
    def pages(self) -> list[Pages]:
        """Of all replicas' pools."""
        return [pages for one in self.each for pages in one.pages]

    @property
    def running(self) -> list[Sequence]:
        """That have slots."""
        return [s for one in self.each for s in one.running]

    @property
    def waiting(self) -> list[Sequence]:
        """That have none."""
        return [*self.lobby, *(s for one in self.each for s in one.waiting)]

    @property
    def forks(self) -> list[Sequence]:
        """That wait for the first of their request."""
        return [s for one in self.each for s in one.forks]

    @property
    def hit_tokens(self) -> int:
        """Tokens of prompts that were found computed."""
        return sum(one.hit_tokens for one in self.each)

    @property
    def preemptions(self) -> int:
        """How often one gave way."""
        return sum(one.preemptions for one in self.each)

    def sequences(self) -> list[Sequence]:
        """All that have not ended."""
        return [*self.lobby, *(s for one in self.each for s in one.sequences())]

    def add(self, sequence: Sequence) -> None:
        """Takes a new sequence in."""
        self.ranking.come(sequence, self.sequences())
        self.lobby.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Forgets a sequence."""
        if sequence in self.lobby:
            self.lobby.remove(sequence)
        else:
            self.each[sequence.replica].finish(sequence)

    def restart(self) -> None:
        """Forgets all that is computed; nothing may be on its way."""
        for one in self.each:
            one.restart()

    def plans(self) -> list[Plan]:
        """What each replica does next, perhaps nothing; none at all where nobody can do anything now."""
        self._hand_out()
        # One that has to stop after a step stops all; one that can go on has no prompts to read and nobody waiting.
        most = 1 if self.lobby else min((one.ahead for one in self.each if not one.idle), default=1)
        found = []
        for one in self.each:
            one.most = most
            found.append(one.plan() or Plan(copies=[[] for _ in one.pages]))
        return found if any(plan.entries or plan.leaving for plan in found) else []

    def _hand_out(self) -> None:
        """Gives those who are next, with all of their request, to replicas that have free slots."""
        if self.lobby and self.ranking.policy is not None:
            others = self.waiting[len(self.lobby) :]
            many = len(self.lobby) + len(others) + len(self.running)
            self.ranking.rank(self.running, self.waiting, self.each[0].page_size)
            self.lobby.sort(key=lambda s: s.rank)
            coming = [s for s in self.lobby if s.rank < many]  # the policy lets these in
        else:
            coming = list(self.lobby)
        while coming and (replica := self._place(coming[0])) is not None:
            for sequence in [s for s in self.lobby if s.request is coming[0].request]:
                sequence.replica = replica
                self.lobby.remove(sequence)
                self.each[replica].enter(sequence)
            coming = [s for s in coming if s in self.lobby]

    def _place(self, sequence: Sequence) -> int | None:
        """The replica for a sequence; None where all are full."""
        loads, slots = [len(one.sequences()) for one in self.each], self.config.sequences
        there = [r for r, load in enumerate(loads) if load < slots and load - min(loads) <= max(1, slots // 4)]
        return min(there, key=lambda r: (-self._known(self.each[r], sequence), loads[r]), default=None)

    def _known(self, one: Scheduler, sequence: Sequence) -> int:
        """Pages of its beginning that a replica has."""
        if not self.config.prefix_cache:
            return 0
        whole = [pages for pages, window in zip(one.pages, one.windows, strict=True) if window is None]
        columns = len(sequence.tokens) // one.page_size if whole else 0
        for column in range(columns):
            digest = sequence.hash_of(column, one.page_size)
            if any(pages.find(digest) is None for pages in whole):
                return column
        return columns
