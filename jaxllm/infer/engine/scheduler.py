"""What the next step computes: decoded tokens first, then pieces of prompts, in one budget of tokens.

Decodes never wait for a prompt: prompts are cut into pieces that fill what decodes leave (Sarathi, arXiv:2403.02310).
Who comes first is a policy's to say (``jaxllm.infer.engine.policies``); where pages run out, the last gives way, and is computed
again later or waits on the host (arXiv:2309.06180, section 4.5). A plan is made while the step before it runs: it knows
how many tokens that makes, not which. Only a text with a grammar waits for its last token, which decides what may come
next.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from jaxllm.infer.engine.page_allocator import NONE, Pages
from jaxllm.infer.engine.policy_state import Ranking
from jaxllm.infer.engine.prefix_cache import Prefixes
from jaxllm.infer.engine.sequence import Sequence
from jaxllm.infer.engine.step_plan import Entry, Plan
from jaxllm.infer.engine_config import EngineConfig


class Scheduler:
    """Chooses what is computed, and keeps the books of pages and slots.

    Args:
        config: of the engine.
        windows: of each group of layers: its sliding window, or None.
        counts: pages of each group's pool.
        page_size: positions of a page.
        columns: pages of the longest sequence.
        ranking: who is next; None: first come, first served.
    """

    def __init__(
        self,
        config: EngineConfig,
        windows: list[int | None],
        counts: list[int],
        page_size: int,
        columns: int,
        ranking: Ranking | None = None,
    ):
        self.ranking = ranking or Ranking()
        self.config, self.windows, self.page_size = config, windows, page_size
        self.pages = [Pages(count) for count in counts]
        self.tables = [np.zeros((config.sequences, columns), np.int32) for _ in counts]
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.forks: list[Sequence] = []  # wait for the first of their request to have the prompt in pages
        self.preemptions = self.hit_tokens = 0
        self._prefixes = Prefixes(config, windows, self.pages, page_size)
        self._slots = list(range(config.sequences - 1, -1, -1))
        self.most = config.loop  # steps on the device at once, where others have to make as many
        self._spare = max(1, min(counts) // 64)  # pages that admission leaves to those who run

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.waiting or self.running or self.forks)

    def sequences(self) -> list[Sequence]:
        """All that have not ended."""
        return [*self.running, *self.waiting, *self.forks]

    def add(self, sequence: Sequence) -> None:
        """Takes a new sequence in."""
        self.ranking.come(sequence, self.sequences())
        self.enter(sequence)

    def enter(self, sequence: Sequence) -> None:
        """Queues a sequence; continuations of a request after its first share the first's prompt."""
        sequence.pages = [[] for _ in self.pages]
        (self.forks if sequence.number else self.waiting).append(sequence)

    def plans(self) -> list[Plan]:
        """``plan``, of the one replica that there is; see ``Replicas``."""
        return [plan] if (plan := self.plan()) else []

    @property
    def ahead(self) -> int:
        """Steps that the next plan can have."""
        return self._steps(*self._parts(self.running))

    def plan(self) -> Plan | None:
        """What to do next, already entered into the books; None where nothing can be done now."""
        plan = Plan(copies=[[] for _ in self.pages])
        self._release: list[tuple[int, int]] = []
        self._fork()
        for sequence in self.running:
            self._prefixes.register(sequence)
            self._trim(sequence)
        self._coming = self.ranking.rank(self.running, self.waiting, self.page_size)
        self.waiting = deque(sorted(self.waiting, key=lambda s: s.rank)) if self.ranking.policy else self.waiting
        for sequence in self.waiting if self.ranking.saves else ():
            if sequence.saved is None and sequence.number == 0 and (sequence.holds or any(sequence.pages)):
                self._drop(sequence)
                if sequence.holds:
                    self.hit_tokens += self._prefixes.find(sequence)  # more than before, where others have gone on
        decodes, prompts = self._parts(sorted(self.running, key=lambda s: s.rank))
        alone = not (prompts or self.waiting or self.forks) and all(s.guide for s in self.running)
        if alone and any(s.pending for s in self.running):
            decodes = []  # a step for all of them costs what one for some does: the others' tokens are on their way
        plan.steps = min(self.most, self._steps(decodes, prompts))
        budget = self.ranking.budget(len(decodes), self.config.prompt_buckets, self.config.piece)
        for sequence in decodes:
            while sequence.slot >= 0 and not (taken := self._reserve(sequence, plan.steps, plan)):
                self._make_room(plan)
            if sequence.slot >= 0 and taken:
                self._enter(plan, sequence, 1)
                budget -= 1
        for sequence in prompts:
            while sequence.slot >= 0 and not (count := self._piece(sequence, budget, 0)) and not plan.entries:
                self._make_room(plan)
            if sequence.slot >= 0 and count and self._reserve(sequence, count, plan):
                self._enter(plan, sequence, count)
                budget -= count
        while self._coming and self._slots and budget > 0 and not plan.leaving:
            if count := self._admit(self.waiting[0], budget, plan):
                budget -= count
                self._coming -= 1
            elif self.running or not self._drop_holder(1):
                break
        for group, page in self._release:
            self.pages[group].release(page)
        return plan if plan.entries or plan.leaving else None

    def finish(self, sequence: Sequence) -> None:
        """Forgets a sequence; its pages may still be found by others."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.forks:
            self.forks.remove(sequence)
        else:
            return  # of a search, which has requests of its own here
        self.ranking.go(sequence)
        self._prefixes.register(sequence)
        self._drop(sequence)
        sequence.saved = None

    def restart(self) -> None:
        """Forgets all that is computed; nothing may be on its way. Everybody comes in again, in the same order."""
        for sequence in sorted(self.running, key=lambda s: -s.order):
            self.waiting.appendleft(sequence)
        self.running.clear()
        for sequence in self.sequences():
            self._drop(sequence)
            sequence.saved = None
        for pages in self.pages:
            pages.forget()

    # How much

    def _parts(self, running: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Those that make a token next, and those that still read."""
        decodes = [s for s in running if s.length - s.computed == 1 and s.room > 0 and not (s.guide and s.pending)]
        return decodes, [s for s in running if s.length - s.computed > 1]

    def _steps(self, decodes: list[Sequence], prompts: list[Sequence]) -> int:
        """Tokens a sequence makes before the host looks: many where nobody waits and pages suffice."""
        if prompts or self.waiting or self.forks or not decodes or self.config.batch_invariant:
            return 1
        if any(s.guide for s in decodes):
            return 1
        steps = min(self.config.loop, *(s.room for s in decodes))
        while steps > 1:
            needs = np.sum([self._need(s, steps) for s in decodes], axis=0)
            if all(need <= pages.available for need, pages in zip(needs, self.pages, strict=True)):
                return steps
            steps //= 2
        return 1

    def _piece(self, sequence: Sequence, budget: int, spare: int) -> int:
        """How much of a prompt fits into the budget and the free pages."""
        left = sequence.length - sequence.computed
        if (piece := self.config.piece) is not None:
            count = min(left, piece - sequence.computed % piece)
            fits = count <= budget and all(
                n <= p.available - spare for n, p in zip(self._need(sequence, count), self.pages, strict=True)
            )
            return count if fits else 0
        count = min(left, budget)
        for pages, own in zip(self.pages, sequence.pages, strict=True):
            free = pages.available - spare - self._copies(pages, own, sequence.computed)
            count = min(count, (len(own) + max(free, 0)) * self.page_size - sequence.computed if free >= 0 else 0)
        return max(count, 0)

    def _need(self, sequence: Sequence, count: int) -> list[int]:
        """Pages of each group to take for ``count`` more tokens."""
        columns = -(-(sequence.computed + count) // self.page_size)
        return [
            max(0, columns - len(own)) + self._copies(pages, own, sequence.computed)
            for pages, own in zip(self.pages, sequence.pages, strict=True)
        ]

    def _fits_whole(self, sequence: Sequence) -> bool:
        """Whether there are pages for the rest of its text, and for those of all who run: nobody will give way."""
        needs = np.sum([self._need(s, s.length - s.computed + s.room) for s in (*self.running, sequence)], axis=0)
        return all(need <= pages.available for need, pages in zip(needs, self.pages, strict=True))

    def _copies(self, pages: Pages, own: list[int], position: int) -> int:
        """1 where the page to be written is somebody else's too."""
        column = position // self.page_size
        return int(column < len(own) and not pages.writable(own[column]))

    # Pages

    def _reserve(self, sequence: Sequence, count: int, plan: Plan) -> bool:
        """Takes the pages for ``count`` more tokens, copying one that others hold; False and nothing if too few."""
        needs = self._need(sequence, count)
        if any(need > pages.available for need, pages in zip(needs, self.pages, strict=True)):
            return False
        column = sequence.computed // self.page_size
        for group, (pages, own) in enumerate(zip(self.pages, sequence.pages, strict=True)):
            first = len(own)
            if self._copies(pages, own, sequence.computed):
                page = pages.take()
                plan.copies[group].append((own[column], page))
                # Held until the plan is made: nothing else of this step may be written there before it is copied.
                self._release.append((group, own[column]))
                own[column], first = page, column
            while len(own) * self.page_size < sequence.computed + count:
                own.append(pages.take())
            if sequence.slot >= 0:
                self.tables[group][sequence.slot, first : len(own)] = own[first:]
        return True

    def _make_room(self, plan: Plan) -> None:
        """Frees pages: of one who waits and holds a prompt it was to share, else of the last to come."""
        if not self._drop_holder(0):
            self._preempt(max(self.running, key=lambda s: s.rank), plan)

    def _drop_holder(self, after: int) -> bool:
        holder = next((s for s in reversed(list(self.waiting)[after:]) if any(s.pages)), None)
        if holder is not None:
            self._drop(holder)
        return holder is not None

    def _preempt(self, victim: Sequence, plan: Plan) -> None:
        self.preemptions += 1
        self.running.remove(victim)
        self.waiting.appendleft(victim)
        swap = self.config.preemption == "swap"
        if swap:
            held = [
                ([c for c, page in enumerate(own) if page != NONE], [page for page in own if page != NONE])
                for own in victim.pages
            ]
            plan.leaving.append((victim, held))
            victim.saved = []  # the engine puts them here
        self._drop(victim, keep=swap)

    def _drop(self, sequence: Sequence, keep: bool = False) -> None:
        """Gives back slot and pages; ``keep``: what was computed is kept elsewhere."""
        for pages, own in zip(self.pages, sequence.pages, strict=True):
            # The first pages are the likeliest to be found again: they become the youngest.
            for page in reversed(own):
                if page != NONE:
                    pages.release(page)
            own.clear()
        if sequence.slot >= 0:
            self._slots.append(sequence.slot)
            sequence.slot = -1
        if not keep:
            sequence.computed = sequence.registered = 0

    def _trim(self, sequence: Sequence) -> None:
        """Gives back pages that lie before all that a window still reaches."""
        for pages, own, window in zip(self.pages, sequence.pages, self.windows, strict=True):
            if window is None:
                continue
            for column in range(max(0, sequence.computed - window + 1) // self.page_size - 1, -1, -1):
                if own[column] == NONE:
                    break
                pages.release(own[column])
                own[column] = NONE

    # Coming in

    def _enter(self, plan: Plan, sequence: Sequence, count: int) -> None:
        """Adds an entry and moves the sequence's books on, as if the step had run."""
        start = sequence.computed
        samples = start + count == sequence.length
        read = min(count, max(0, len(sequence.request.prompt) - start))
        self.ranking.charge(sequence, read, plan.steps * samples)
        plan.entries.append(Entry(sequence, start, count, samples))
        sequence.computed += count + plan.steps - 1
        sequence.pending += plan.steps if samples else 0

    def _fork(self) -> None:
        """Continuations whose prompt is in the pages of their request's first: they hold those pages too.

        The last token of the prompt is computed again by each, for the token that comes after it.
        """
        for sequence in list(self.forks):
            first, last = sequence.request.sequences[0], len(sequence.request.prompt) - 1
            if first.finish is None and first.slot >= 0 and first.computed <= last:
                continue
            if first.finish is None and first.slot < 0 and first.computed == 0 and first.saved is None:
                continue  # it waits to be admitted
            self.forks.remove(sequence)
            self.waiting.append(sequence)
            if first.slot >= 0 and first.computed > last > 0:
                sequence.computed = last if self.config.piece is None else last // self.config.piece * self.config.piece
                for pages, own, theirs in zip(self.pages, sequence.pages, first.pages, strict=True):
                    own += theirs[: -(-sequence.computed // self.page_size)]
                    for page in own:
                        if page != NONE:
                            pages.hold(page)

    def _admit(self, sequence: Sequence, budget: int, plan: Plan) -> int:
        """Lets the first who waits in, with as many tokens as there is room for; 0 if there is none."""
        if sequence.pending:
            return 0  # tokens it made before it gave way are still to come
        if sequence.saved is not None:
            return self._return(sequence, budget, plan)
        if found := not any(sequence.pages):
            self.hit_tokens += self._prefixes.find(sequence)
        if self.ranking.saves and not self._fits_whole(sequence):
            return 0
        spare = self._spare if self.running else 0
        count = self._piece(sequence, budget, spare)
        if not count or not self._reserve(sequence, count, plan):
            if found:
                self._drop(sequence)
            return 0
        self._seat(sequence, plan)
        self._enter(plan, sequence, count)
        return count

    def _seat(self, sequence: Sequence, plan: Plan) -> None:
        self.waiting.popleft()
        plan.seated.append(sequence)
        sequence.slot = self._slots.pop()
        self.running.append(sequence)
        for table, own in zip(self.tables, sequence.pages, strict=True):
            table[sequence.slot, : len(own)] = own

    def _return(self, sequence: Sequence, budget: int, plan: Plan) -> int:
        """Swaps a sequence in: new pages for what is on the host."""
        assert sequence.saved is not None
        columns = -(-(sequence.computed + 1) // self.page_size)
        needs = [len(held) + columns - (held[-1] + 1 if held else 0) for held, _ in sequence.saved]
        spare = self._spare if self.running else 0
        if any(need > pages.available - spare for need, pages in zip(needs, self.pages, strict=True)):
            return 0
        places = []
        for pages, own, (held, _) in zip(self.pages, sequence.pages, sequence.saved, strict=True):
            own += [NONE] * (held[-1] + 1 if held else 0)
            for column in held:
                own[column] = pages.take()
            places.append((list(held), [own[column] for column in held]))
        count = self._piece(sequence, budget, 0)
        if not count or not self._reserve(sequence, count, plan):
            self._drop(sequence, keep=True)
            return 0
        plan.returning.append((sequence, places))
        self._seat(sequence, plan)
        self._enter(plan, sequence, count)
        return count
