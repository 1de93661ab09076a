"""Continuous-batching scheduler: chunked prefill and decode share one token budget per step.

Decode never waits for prefill: prompts are split into chunks that fill the budget that decode leaves (chunked prefill,
Sarathi, arXiv:2403.02310). A policy (``jaxllm.infer.scheduling.policies``) decides which sequence is next. Preemption:
when the KV cache has no free page, the sequence of the lowest priority leaves the batch; its KV cache is recomputed
later (recompute) or copied to the host (swap) (arXiv:2309.06180, section 4.5). A plan is made while the step before it
runs: it knows how many tokens that step generates, but not which. Only a sequence with a grammar (guided decoding), a
proposer (speculative decoding) or subtasks waits for its last token, from which its next token mask or proposal is
made, or with which a subtask ends. Proposed tokens are scheduled as if all were accepted; ``settle`` takes back the
others when their step has landed.

Under a retention rule a page table lists a sequence's pages in no order of positions: there are as many as hold the
tokens that the rule keeps, and those of the next chunk. Under a rule that chooses by scores, chunks end where entries
leave, and how many have left is known when the step has landed: ``settle_evictions`` then releases pages.
"""

from __future__ import annotations

import bisect
import sys
from collections import deque

import numpy as np

from jaxllm.infer.chunks.chunk_moves import ChunkMove
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.page_store import PageStore
from jaxllm.infer.scheduling.adapter_slots import AdapterSlots
from jaxllm.infer.scheduling.page_allocator import NO_PAGE, PageAllocator
from jaxllm.infer.scheduling.page_needs import PageNeeds
from jaxllm.infer.scheduling.policy_state import PolicyState
from jaxllm.infer.scheduling.prefix_cache import PrefixCache
from jaxllm.infer.scheduling.proposer import AnyProposer, proposals
from jaxllm.infer.scheduling.sequence import Sequence
from jaxllm.infer.scheduling.step_plan import ScheduledChunk, StepPlan
from jaxllm.infer.speculate.draft_length import DraftLength, FixedDraftLength
from jaxllm.infer.speculate.draft_tree import NO_DRAFT, DraftTree
from jaxllm.infer.stages.draft_runs import DraftRun, DraftRuns
from pallas_kernels.paged_attention.retention import RetentionRule, by_scores


class Scheduler:
    """Scheduler of one replica: decides what each step computes, and keeps its slots, page tables and pages.

    Args:
        config: configuration of the engine.
        windows: sliding window of each layer group, or None.
        counts: number of pages of each pool.
        page_size: positions of a page.
        columns: columns of a page table: pages of the longest sequence.
        policy_state: scheduling policy; None: first come, first served.
        rules: retention rule of each layer group, or None; None: no group has one.
        proposer: proposes tokens to verify; None: no speculative decoding.
        adapters: slots of adapters, those of all replicas; None: the engine serves none.
        draft_length: how many tokens are proposed for each sequence; None: ``config.verify_tokens``.
        residual: latest tokens of a sequence that are not in pages, see ``residual_window``.
        store: tiers behind the device for pages of the prefix cache; None: there are none.
        pools: pool of each layer group; None: each has its own.
        draft_runs: runs in flight; None: the next draft of a sequence waits for the verification of the one before.

    Attributes:
        pages: page allocator of each pool.
        needs: what sequences need of them.
        running: sequences in the batch.
        waiting: sequences that wait for a slot, preempted ones included.
        forks: further completions of a request; they wait until the request's first has its prompt in pages. Also
            requests whose cached chunks are being computed.
        preemptions: number of preemptions so far.
        hit_tokens: prompt tokens found in the prefix cache so far.
        returned_pages: pages that evictions by scores, and finished subtasks, have emptied so far.
        max_steps: upper limit of decode steps in the next plan; the replicas of an engine run equally many.
    """

    def __init__(
        self,
        config: EngineConfig,
        windows: list[int | None],
        counts: list[int],
        page_size: int,
        columns: int,
        policy_state: PolicyState | None = None,
        rules: list[RetentionRule | None] | None = None,
        proposer: AnyProposer | None = None,
        adapters: AdapterSlots | None = None,
        draft_length: DraftLength | None = None,
        residual: int = 0,
        store: PageStore | None = None,
        pools: tuple[int, ...] | None = None,
        draft_runs: DraftRuns | None = None,
    ):
        self.draft_runs = draft_runs
        self.draft_length = draft_length or FixedDraftLength(config.verify_tokens)
        self._draft_counts: dict[Sequence, int] = {}
        self._drafts_chosen = False  # for the next plan
        self.policy_state, self.proposer, self.adapters = policy_state or PolicyState(), proposer, adapters
        self.rules = rules or [None] * len(windows)
        self._interval = next((rule.interval for one in self.rules if (rule := by_scores(one)) is not None), None)
        self._pools = tuple(range(len(counts))) if pools is None else pools
        self.config, self.windows, self.page_size = config, windows, page_size
        self.pages = [PageAllocator(count) for count in counts]
        self._allocators = [self.pages[pool] for pool in self._pools]
        self.needs = PageNeeds(self.pages, self._pools, windows, self.rules, page_size)
        self.tables = [np.zeros((config.max_sequences, columns), np.int32) for _ in self._pools]
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.forks: list[Sequence] = []
        self.preemptions = self.hit_tokens = self.returned_pages = 0
        self._prefix_cache = PrefixCache(config, windows, self._allocators, page_size, residual, store)
        for pages in self.pages if store is not None else ():
            pages.evicted = []
        self._slots = list(range(config.max_sequences - 1, -1, -1))
        self.max_steps = config.decode_steps
        self._spare = max(1, min(counts) // 64)  # pages that admission leaves to running sequences

    @property
    def idle(self) -> bool:
        """Whether there is no sequence to work on."""
        return not (self.waiting or self.running or self.forks)

    @property
    def page_tables(self) -> list[list[np.ndarray]]:
        """Page tables by replica (there is one) and layer group, int32[R, J]."""
        return [self.tables]

    @property
    def prefix_caches(self) -> list[PrefixCache]:
        """Prefix caches by replica (there is one)."""
        return [self._prefix_cache]

    def sequences(self) -> list[Sequence]:
        """All sequences that have not ended."""
        return [*self.running, *self.waiting, *self.forks]

    def add(self, sequence: Sequence) -> None:
        """Adds a new sequence."""
        self.policy_state.add(sequence, self.sequences())
        self.enqueue(sequence)

    def enqueue(self, sequence: Sequence) -> None:
        """Queues a sequence; a request's further completions share the prompt of its first."""
        groups = len(self._pools)
        sequence.pages, sequence.cleared, sequence.entries = [[] for _ in range(groups)], [0] * groups, [0] * groups
        (self.forks if sequence.number or sequence.request.awaits else self.waiting).append(sequence)

    def plans(self) -> list[StepPlan]:
        """Plan of the one replica, or none; see ``ReplicaSchedulers``."""
        return [plan] if (plan := self.plan()) else []

    @property
    def next_steps(self) -> int:
        """Number of decode steps that the next plan can have; one if it drafts, which is decided here."""
        self._choose_drafts()
        self._drafts_chosen = True
        return self._decode_steps(*self._decodes_and_prefills(self.running))

    def plan(self) -> StepPlan | None:
        """Plans the next step and updates all sequences as if it had run; None if nothing can be computed now."""
        plan = StepPlan(copies=[[] for _ in self._pools])
        self._release: list[tuple[int, int]] = []
        self._start_forks()
        for sequence in self.running:
            self._prefix_cache.register(sequence)
            self._free_behind_window(sequence)
        self._admissible = self.policy_state.rank(
            self.running, self.waiting, self.page_size, lambda: self.needs.room(self.running, self._spare)
        )
        if self.policy_state.policy:
            self.waiting = deque(sorted(self.waiting, key=lambda s: s.rank))
        for sequence in self.waiting if self.policy_state.holds_prefixes else ():
            if sequence.swapped is None and sequence.number == 0 and (sequence.holds or any(sequence.pages)):
                self._free(sequence)
                if sequence.holds:
                    # It may find more than before, because other sequences have advanced.
                    self.hit_tokens += self._prefix_cache.reuse(sequence)
        if not self._drafts_chosen:
            self._choose_drafts()
        self._drafts_chosen = False
        decodes, prefills = self._decodes_and_prefills(sorted(self.running, key=lambda s: s.rank))
        if self.config.stages > 1 and self.draft_runs is None:
            decodes = self._micro_batch(decodes)
        alone = not (prefills or self.waiting or self.forks) and all(self._needs_last(s) for s in self.running)
        if alone and self.config.stages == 1 and any(s.pending for s in self.running):
            decodes = []  # wait for the pending tokens: a step for all sequences costs as much as one for some
        prompts = [*prefills, *self.waiting]
        budget = self.policy_state.token_budget(
            len(decodes), prompts, self.config.prompt_buckets, self.config.prefill_chunk
        )
        proposed = self._proposals(decodes, budget, plan)
        plan.steps = min(self.max_steps, self._decode_steps(decodes, prefills))
        if self.draft_runs is not None:
            decodes = self._schedule_runs(self.draft_runs, decodes, proposed, plan)
            budget -= plan.tokens
        for sequence in decodes:
            while sequence.slot >= 0 and not (reserved := self._reserve(sequence, plan.steps, plan)):
                self._make_room(plan)
            if sequence.slot >= 0 and reserved:
                draft = self._with_pages(sequence, proposed.get(sequence, NO_DRAFT), plan)
                run = None
                if self.draft_runs is not None and self.draft_runs.has(sequence):
                    run = self.draft_runs.start(sequence)
                self._schedule(plan, sequence, 1 + len(draft.tokens), draft, run)
                budget -= 1 + len(draft.tokens)
        for sequence in prefills:
            self._place_chunks(sequence, plan)
            while sequence.slot >= 0 and not (count := self._chunk(sequence, budget, 0)) and not plan.chunks:
                self._make_room(plan)
            if sequence.slot >= 0 and count and self._reserve(sequence, count, plan):
                self._schedule(plan, sequence, count)
                budget -= count
        if self.adapters is not None:
            self._prepare_adapters(self.adapters)
        while self._admissible and self._slots and budget > 0 and not plan.swap_out:
            if count := self._admit_pinned(self.waiting[0], budget, plan):
                budget -= count
                self._admissible -= 1
            elif self.running or not self._free_waiting(1):
                break
        for group, page in self._release:
            self._allocators[group].release(page)
        if not (plan.chunks or plan.swap_out or plan.moves):
            return None
        plan.spills, plan.restores = self._prefix_cache.take_transfers()
        return plan

    def finish(self, sequence: Sequence) -> None:
        """Removes a sequence and frees its slot and pages; its pages stay in the prefix cache."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.forks:
            self.forks.remove(sequence)
        else:
            return  # result of a beam search, whose rounds are requests of their own
        self.policy_state.finish(sequence)
        self._prefix_cache.register(sequence)
        self._free(sequence)
        sequence.swapped = None

    def settle(self, sequence: Sequence, refused: int) -> None:
        """Takes back the proposed tokens that a verification has refused, and the pages that only they needed.

        Pages that other requests may find hold known tokens only, see ``PrefixCache.register``: none is taken back.
        """
        self.policy_state.charge(sequence, 0, -refused)
        if sequence.unsettled:  # or it was preempted since, and its KV cache is gone
            self._take_back(sequence, refused)

    def _take_back(self, sequence: Sequence, refused: int) -> None:
        """Takes back the last computed tokens of a sequence, and their pages."""
        sequence.computed -= refused
        sequence.unsettled = 0
        for group, (pages, own) in enumerate(zip(self._allocators, sequence.pages, strict=True)):
            if self.rules[group] is None:
                for page in reversed(own[-(-(sequence.computed + 1) // self.page_size) :]):
                    pages.release(page)
                del own[-(-(sequence.computed + 1) // self.page_size) :]

    def settle_evictions(self, chunk: ScheduledChunk, most: list[int]) -> None:
        """Releases the pages that an eviction has emptied: entries are in front, and so are the tokens after it."""
        sequence = chunk.sequence
        if chunk.life != sequence.life:
            return  # preempted or ended since: its KV cache is gone
        tokens = sequence.computed - chunk.start
        retained = [group for group, rule in enumerate(self.rules) if rule is not None]
        for group, count in zip(retained, most, strict=True):
            if count < 0:
                continue
            own = sequence.pages[group]
            sequence.entries[group] = min(sequence.entries[group], count + tokens)
            needed = -(-sequence.entries[group] // self.page_size)
            if len(own) <= needed:
                continue  # or it is swapped out, and its pages are on the host
            for page in reversed(own[needed:]):
                self._allocators[group].release(page)
            self.returned_pages += len(own) - needed
            del own[needed:]
            sequence.cleared[group] = min(sequence.cleared[group], needed)

    def cut(self, sequence: Sequence, start: int, stop: int) -> None:
        """Takes generated tokens out of a sequence; those behind them are computed again, at their new positions.

        Pages of the tokens before them stay. All tokens are computed again where those pages do not have what they need
        any more: behind a sliding window, under a retention rule, with a format that has the latest tokens apart; and
        where the sequence is not in the batch.

        Args:
            sequence: sequence without pending tokens.
            start, stop: first token, and the one after the last.
        """
        sequence.cut(start, stop, self.page_size)
        if sequence.slot < 0:
            self._free(sequence)
            sequence.swapped = None
            return
        kept = min(start, sequence.computed) // (chunk := self.config.prefill_chunk or 1) * chunk
        if any(self.rules) or self._prefix_cache.residual or not self._has_windows(sequence, kept):
            kept = 0
        columns, needed = -(-kept // self.page_size), -(-sequence.length // self.page_size)
        for pages, own in zip(self._allocators, sequence.pages, strict=True):
            self.returned_pages += sum(page != NO_PAGE for page in own[needed:])
            for page in reversed(own[columns:]):
                if page != NO_PAGE:
                    pages.release(page)
            del own[columns:]
        sequence.computed, sequence.registered = kept, min(sequence.registered, kept // self.page_size)
        if not kept:
            self._forget(sequence)

    def _has_windows(self, sequence: Sequence, count: int) -> bool:
        """Whether the pages that the token after the first ``count`` sees through sliding windows are still there."""
        return all(
            NO_PAGE not in own[max(0, count - window + 1) // self.page_size : -(-count // self.page_size)]
            for own, window in zip(sequence.pages, self.windows, strict=True)
            if window is not None
        )

    def restart(self) -> None:
        """Drops the whole KV cache and queues all sequences again in the same order; no step may be in flight."""
        for sequence in sorted(self.running, key=lambda s: -s.order):
            self.waiting.appendleft(sequence)
        self.running.clear()
        for sequence in self.sequences():
            self._free(sequence)
            sequence.swapped = None
        self._prefix_cache.take_transfers()  # of the old weights
        for pages in self.pages:
            pages.clear_cache()

    # Token counts

    def _decodes_and_prefills(self, running: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Splits running sequences into those that decode next and those whose prefill is not complete."""
        decodes = [
            s for s in running
            if (s.length - s.computed == 1 and s.remaining > 0 and not (s.pending and self._needs_last(s)))
            or (self.draft_runs is not None and s.remaining > 0 and self.draft_runs.may_start(s))
        ]  # fmt: skip
        return decodes, [s for s in running if s.length - s.computed > 1]

    def _needs_last(self, sequence: Sequence) -> bool:
        """Whether the host has to know a sequence's last token before it decodes the next.

        If there are drafts for some of a batch, the others wait too, until they are verified: a step for all costs as
        much as one for some. With pipeline stages all wait, since the device that samples is not the one that looks
        tokens up.
        """
        waits = sequence.guide is not None or sequence.subtasks is not None
        drafts = bool(self._draft_counts) or any(one.unsettled for one in self.running)
        return self.config.stages > 1 or drafts or waits

    def _micro_batch(self, decodes: list[Sequence]) -> list[Sequence]:
        """Sequences that decode in the next step of a pipeline, of those that wait for nothing.

        A sequence is in one step at a time, so a step takes some of them alone: then there are steps for all stages,
        and one more, which the host prepares while the stages compute the others.
        """
        decoding = sum(s.length - s.computed == 1 and s.remaining > 0 for s in self.running)
        return decodes[: -(-decoding // (self.config.stages + 1))]

    def _choose_drafts(self) -> None:
        """Chooses the number of draft tokens of each decoding sequence."""
        if self.proposer is not None:
            decoding = [s for s in self.running if s.length - s.computed == 1 and s.remaining > 1]
            if (runs := self.draft_runs) is not None:
                decoding = [s for s in decoding if not runs.has(s)]
            self._draft_counts = self.draft_length.counts(decoding)

    def _proposals(self, decodes: list[Sequence], budget: int, plan: StepPlan) -> dict[Sequence, DraftTree]:
        """Tokens to verify with the next one of each sequence: as many as there are rows and tokens left for."""
        wanted, room = list[tuple[Sequence, int]](), budget - len(decodes)
        for sequence in decodes:
            if (count := min(room, self._draft_counts.get(sequence, 0), sequence.remaining - 1)) > 0:
                wanted.append((sequence, count))
                room -= count
        owners = [sequence for sequence, _ in wanted]
        for sequence in decodes:
            if (runs := self.draft_runs) is None or not sequence.pending:
                continue
            if (count := min(1 + room, runs.size, sequence.remaining)) > 0:
                wanted.append((runs.extended(sequence), count))
                owners.append(sequence)
                room -= count - 1
        if self.proposer is None or not wanted:
            return {}
        clock = self.policy_state.clock
        start = clock()
        found = proposals(self.proposer, wanted)
        plan.speculates, plan.drafting_seconds = True, clock() - start
        if None not in found:
            self.draft_length.record_drafting(max(count for _, count in wanted), plan.drafting_seconds)
        drafts = {sequence: draft for sequence, draft in zip(owners, found, strict=True) if draft is not None}
        for sequence, draft in drafts.items():
            if not draft.tokens:
                self.draft_length.record_draft(sequence, 0, 0)
        made = {sequence: len(draft.tokens) for sequence, draft in drafts.items() if draft.tokens}
        kept = self.draft_length.kept(decodes, made) if made else made
        if made and not kept:  # to verify them does not pay
            self._draft_counts, plan.speculates = {}, False
        return {sequence: drafts[sequence].first(count) for sequence, count in kept.items()}

    def _schedule_runs(
        self, runs: DraftRuns, decodes: list[Sequence], proposed: dict[Sequence, DraftTree], plan: StepPlan
    ) -> list[Sequence]:
        """Schedules runs of draft tokens behind those in flight, as there are pages; returns the other sequences."""
        for sequence in decodes:
            draft = proposed.get(sequence, NO_DRAFT) if sequence.pending else NO_DRAFT
            while draft.tokens and not self._reserve(sequence, len(draft.tokens), plan):
                draft = draft.first(len(draft.tokens) // 2)
            if draft.tokens:
                run = runs.start(sequence, draft.tokens)
                rest = DraftTree.chain(draft.tokens[1:])
                self._schedule(plan, sequence, len(draft.tokens), rest, run)
        return [sequence for sequence in decodes if not sequence.pending]

    def _with_pages(self, sequence: Sequence, draft: DraftTree, plan: StepPlan) -> DraftTree:
        """The first tokens of a draft, as many as there are pages for."""
        while draft.tokens and not self._reserve(sequence, 1 + len(draft.tokens), plan):
            draft = draft.first(len(draft.tokens) // 2)
        return draft

    def _decode_steps(self, decodes: list[Sequence], prefills: list[Sequence]) -> int:
        """Decode steps on the device before the host looks: several if no sequence waits and the pages suffice."""
        if prefills or self.waiting or self.forks or not decodes or not self.config.decode_buckets:
            return 1
        if any(self._needs_last(s) for s in decodes):
            return 1
        if self.config.mla != "exact" and any(s.computed < len(s.request.prompt) for s in decodes):
            return 1  # the last token of a prompt attends exactly, which programs that decode do not do
        steps = min(self.config.decode_steps, *(min(s.remaining, self._until_eviction(s)) for s in decodes))
        while steps > 1:
            if self.needs.suffices(self.needs.of_all([(s, steps) for s in decodes])):
                return steps
            steps //= 2
        return 1

    def _chunk(self, sequence: Sequence, budget: int, spare: int) -> int:
        """Length of the next prefill chunk that fits into the budget and the free pages; ``spare`` pages stay free."""
        left = min(sequence.length - sequence.computed, self._until_eviction(sequence), self._until_reuse(sequence))
        if (chunk := self.config.prefill_chunk) is not None:
            count = min(left, chunk - sequence.computed % chunk)
            return count if count <= budget and self.needs.suffices(self.needs.of(sequence, count), spare) else 0
        # The largest count that fits.
        counts = range(1, max(0, min(left, budget)) + 1)
        return bisect.bisect_left(
            counts, True, key=lambda count: not self.needs.suffices(self.needs.of(sequence, count), spare)
        )

    def _until_eviction(self, sequence: Sequence) -> int:
        """Tokens of a sequence until its next eviction by scores, where a chunk has to end."""
        return sys.maxsize if self._interval is None else self._interval - sequence.computed % self._interval

    @staticmethod
    def _until_reuse(sequence: Sequence) -> int:
        """Tokens of a sequence until the next ones that it reuses of a cached chunk, where a chunk has to end."""
        starts = (one.start - sequence.computed for one in sequence.request.reuses)
        return min((count for count in starts if count > 0), default=sys.maxsize)

    def _place_chunks(self, sequence: Sequence, plan: StepPlan) -> int:
        """Copies what a sequence reuses of cached chunks from here on, one behind the other; returns how many."""
        count = 0
        while self._place_chunk(sequence, plan):
            count += 1
        return count

    def _place_chunk(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Copies what a sequence reuses of a cached chunk, if that begins here, is cached, and there are pages for it.

        What is not copied is computed.
        """
        reuse = next((one for one in sequence.request.reuses if one.start <= sequence.computed < one.stop), None)
        if reuse is None:
            return False
        start, count = sequence.computed, reuse.stop - sequence.computed
        held = self._prefix_cache.chunk_pages(sequence, reuse)
        shared = any(self.needs.copies(*one, start) for one in zip(self._allocators, sequence.pages, strict=True))
        if held is None or shared:
            return False
        for group, own in enumerate(held):
            for page in own:
                if page != NO_PAGE:
                    # Released after planning: nothing else in this step may write to the page before it is read.
                    self._allocators[group].share(page)
                    self._release.append((group, page))
        if not self._reserve(sequence, count, plan):
            return False
        plan.moves.append(ChunkMove.of(sequence, reuse, start, held, self.page_size))
        sequence.computed = reuse.stop
        self.hit_tokens += count
        if sequence.number == 0 and sequence.length == len(sequence.request.prompt):
            sequence.request.cached_tokens += count
        return True

    def _fits_whole(self, sequence: Sequence) -> bool:
        """Whether all running sequences and this one can complete without a preemption."""
        whole = [(s, s.length - s.computed + s.remaining) for s in (*self.running, sequence)]
        return self.needs.suffices(self.needs.of_all(whole))

    def _fits_predicted(self, sequence: Sequence) -> bool:
        """Whether there are pages for all that the running sequences and this one are predicted to generate."""
        if not sequence.generated:  # others may have ended since it came
            sequence.predicted = self.policy_state.predict(sequence.request)
        return self.needs.suffices(self.needs.predicted([*self.running, sequence]), share=self.policy_state.kv_share)

    # Pages and preemption

    def _reserve(self, sequence: Sequence, count: int, plan: StepPlan) -> bool:
        """Allocates pages for ``count`` more tokens, copying a shared one; if there are too few, changes nothing."""
        if not self.needs.suffices(self.needs.of(sequence, count)):
            return False
        column = sequence.computed // self.page_size
        for group, (pages, own) in enumerate(zip(self._allocators, sequence.pages, strict=True)):
            first = len(own)
            if self.needs.copies(pages, own, sequence.computed):
                page = pages.allocate()
                plan.copies[group].append((own[column], page))
                # Released after planning: nothing else in this step may write to the page before it is copied.
                self._release.append((group, own[column]))
                own[column], first = page, column
            while len(own) * self.page_size < self.needs.entries(group, sequence) + count:
                own.append(pages.allocate())
            if sequence.slot >= 0:
                self.tables[group][sequence.slot, first : len(own)] = own[first:]
        return True

    def _make_room(self, plan: StepPlan) -> None:
        """Frees pages: those that a waiting sequence holds, else by preempting the sequence of lowest priority."""
        if not self._free_waiting(0):
            self._preempt(max(self.running, key=lambda s: s.rank), plan)

    def _free_waiting(self, after: int) -> bool:
        """Frees the pages of the last waiting sequence that has any, after the first ``after``; whether one had."""
        holder = next((s for s in reversed(list(self.waiting)[after:]) if any(s.pages)), None)
        if holder is not None:
            self._free(holder)
        return holder is not None

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        """Preempts a running sequence: swaps its KV cache out, or frees it to be recomputed."""
        self.preemptions += 1
        self._drop_runs(victim)
        self.running.remove(victim)
        self.waiting.appendleft(victim)
        # Copies of chunks are made after pages are swapped out, and what is freed may be another's by then.
        moves = [move for move in plan.moves if move.sequence is not victim]
        swap = self.config.preemption == "swap" and len(moves) == len(plan.moves)
        plan.moves = moves
        if swap:
            held = [
                ([c for c, page in enumerate(own) if page != NO_PAGE], [page for page in own if page != NO_PAGE])
                for own in victim.pages
            ]
            plan.swap_out.append((victim, held))
            victim.swapped = []  # filled by the engine
        self._free(victim, keep=swap)

    def _drop_runs(self, sequence: Sequence) -> None:
        """Makes the runs of a sequence invalid, and takes back what they were to compute and generate."""
        if self.draft_runs is not None and self.draft_runs.drop(sequence):
            self.policy_state.charge(sequence, 0, -sequence.pending)
            self._take_back(sequence, sequence.pending)
            sequence.pending = 0

    def _free(self, sequence: Sequence, keep: bool = False) -> None:
        """Frees slot and pages of a sequence; ``keep``: its KV cache is on the host."""
        self._drop_runs(sequence)
        for pages, own in zip(self._allocators, sequence.pages, strict=True):
            # Released last to first, so that the first pages, the most likely to be reused, are evicted last.
            for page in reversed(own):
                if page != NO_PAGE:
                    pages.release(page)
            own.clear()
        if sequence.slot >= 0:
            self._slots.append(sequence.slot)
            sequence.slot = -1
            if self.adapters is not None and sequence.request.adapter is not None:
                self.adapters.unpin(sequence.request.adapter)
        if not keep:
            self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        """Records that nothing of a sequence is in pages."""
        sequence.computed = sequence.registered = sequence.unsettled = sequence.found = 0
        sequence.cleared, sequence.entries = [0] * len(self._pools), [0] * len(self._pools)
        sequence.life += 1

    def _free_behind_window(self, sequence: Sequence) -> None:
        """Frees the pages that lie entirely behind the sliding window, however many proposed tokens are refused."""
        certain = sequence.computed - sequence.unsettled
        for pages, own, window in zip(self._allocators, sequence.pages, self.windows, strict=True):
            if window is None:
                continue
            for column in range(max(0, certain - window + 1) // self.page_size - 1, -1, -1):
                if own[column] == NO_PAGE:
                    break
                pages.release(own[column])
                own[column] = NO_PAGE

    # Admission

    def _schedule(
        self,
        plan: StepPlan,
        sequence: Sequence,
        count: int,
        draft: DraftTree = NO_DRAFT,
        run: DraftRun | None = None,
    ) -> None:
        """Adds a chunk to the plan and updates the sequence as if the step had run and all was accepted."""
        start, proposed = sequence.computed, draft.tokens
        samples = start + count - len(proposed) == sequence.length
        gained = (plan.steps + len(proposed)) * samples
        prefilled = min(count, max(0, len(sequence.request.prompt) - start))
        self.policy_state.charge(sequence, prefilled, gained)
        has_rule = [group for group, rule in enumerate(self.rules) if rule is not None]
        fresh = tuple((sequence.cleared[group], len(sequence.pages[group])) for group in has_rule)
        for group in has_rule:
            sequence.cleared[group] = len(sequence.pages[group])
        for group in has_rule:
            if by_scores(self.rules[group]) is not None:
                sequence.entries[group] = self.needs.entries(group, sequence) + count + plan.steps - 1
        plan.chunks.append(ScheduledChunk(sequence, start, count, samples, proposed, draft, fresh, sequence.life, run))
        sequence.computed += count + plan.steps - 1
        sequence.pending += gained
        sequence.unsettled = len(proposed)
        if run is not None and self.draft_runs is not None:
            sequence.unsettled = len(self.draft_runs.drafted(sequence))

    def _start_forks(self) -> None:
        """Queues requests whose cached chunks are there, and further completions whose first has its prompt in pages.

        The latter share those pages.

        Each computes the last token of the prompt again, to sample a token after it.
        """
        for sequence in list(self.forks):
            if any(s.finish is None for request in sequence.request.awaits for s in request.sequences):
                continue
            if sequence.number == 0:
                self.forks.remove(sequence)
                self.waiting.append(sequence)
                continue
            first, last = sequence.request.sequences[0], len(sequence.request.prompt) - 1
            if first.finish is None and first.slot >= 0 and first.computed <= last:
                continue
            if first.finish is None and first.slot < 0 and first.computed == 0 and first.swapped is None:
                continue  # the first waits for admission
            self.forks.remove(sequence)
            self.waiting.append(sequence)
            if first.slot >= 0 and first.computed > last > 0 and not any(self.rules):
                chunk = self.config.prefill_chunk
                sequence.computed = last if chunk is None else last // chunk * chunk
                if residual := self._prefix_cache.residual:  # only pages that are encoded by now
                    encoded = max(min(last, first.computed - residual) // self.page_size * self.page_size, first.found)
                    sequence.computed = min(encoded, last // self.page_size * self.page_size)
                sequence.found = sequence.computed
                for pages, own, theirs in zip(self._allocators, sequence.pages, first.pages, strict=True):
                    own += theirs[: -(-sequence.computed // self.page_size)]
                    for page in own:
                        if page != NO_PAGE:
                            pages.share(page)

    def _prepare_adapters(self, adapters: AdapterSlots) -> None:
        """Loads the adapters of waiting sequences; those whose adapter is being read let the others pass."""
        admissible = list(self.waiting)[: self._admissible]
        adapters.prepare(s.request.adapter for s in admissible if s.request.adapter is not None)
        ready = [s for s in admissible if s.request.adapter is None or adapters.is_ready(s.request.adapter)]
        if len(ready) < len(admissible):
            passed = {id(s) for s in ready}
            rest = [s for s in self.waiting if id(s) not in passed]
            self.waiting, self._admissible = deque([*ready, *rest]), len(ready)

    def _admit_pinned(self, sequence: Sequence, budget: int, plan: StepPlan) -> int:
        """``_admit`` for a sequence whose adapter, if it has one, gets a slot that it keeps while the sequence runs."""
        if self.adapters is None or (adapter := sequence.request.adapter) is None:
            return self._admit(sequence, budget, plan)
        if not self.adapters.pin(adapter):
            return 0
        if not (count := self._admit(sequence, budget, plan)):
            self.adapters.unpin(adapter)
        return count

    def _admit(self, sequence: Sequence, budget: int, plan: StepPlan) -> int:
        """Admits the first waiting sequence with a chunk that fits; returns its length, 0 if nothing fits."""
        if sequence.pending:
            return 0  # tokens that it generated before its preemption have not reached the host yet
        if sequence.swapped is not None:
            return self._swap_in(sequence, budget, plan)
        if found := not any(sequence.pages):
            self.hit_tokens += self._prefix_cache.reuse(sequence)
        if self.policy_state.reserves_whole and not self._fits_whole(sequence):
            return 0
        if self.policy_state.reserves_predicted and self.running and not self._fits_predicted(sequence):
            if found:
                self._free(sequence)
            return 0
        spare = self._spare if self.running else 0
        placed = self._place_chunks(sequence, plan)
        count = self._chunk(sequence, budget, spare)
        if not count or not self._reserve(sequence, count, plan):
            del plan.moves[len(plan.moves) - placed :]
            if found or placed:
                self._free(sequence)
            return 0
        self._take_slot(sequence, plan)
        self._schedule(plan, sequence, count)
        return count

    def _take_slot(self, sequence: Sequence, plan: StepPlan) -> None:
        """Moves the first waiting sequence into a slot."""
        self.waiting.popleft()
        plan.admitted.append(sequence)
        sequence.slot = self._slots.pop()
        self.running.append(sequence)
        for table, own in zip(self.tables, sequence.pages, strict=True):
            table[sequence.slot, : len(own)] = own

    def _swap_in(self, sequence: Sequence, budget: int, plan: StepPlan) -> int:
        """Admits a swapped-out sequence: allocates pages for its KV cache on the host; 0 if nothing fits."""
        assert sequence.swapped is not None
        columns = [-(-(self.needs.entries(g, sequence) + 1) // self.page_size) for g in range(len(self._pools))]
        needs = [
            len(held) + max(0, own - (held[-1] + 1 if held else 0))
            for own, (held, _) in zip(columns, sequence.swapped, strict=True)
        ]
        spare = self._spare if self.running else 0
        if not self.needs.suffices(needs, spare):
            return 0
        places = []
        for pages, own, (held, _) in zip(self._allocators, sequence.pages, sequence.swapped, strict=True):
            own += [NO_PAGE] * (held[-1] + 1 if held else 0)
            for column in held:
                own[column] = pages.allocate()
            places.append((list(held), [own[column] for column in held]))
        count = self._chunk(sequence, budget, 0)
        if not count or not self._reserve(sequence, count, plan):
            self._free(sequence, keep=True)
            return 0
        plan.swap_in.append((sequence, places))
        self._take_slot(sequence, plan)
        self._schedule(plan, sequence, count)
        return count
