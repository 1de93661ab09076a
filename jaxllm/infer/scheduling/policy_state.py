"""Policy state: arrival times, served tokens, predictions and step times that scheduling policies need."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from jaxllm.infer.scheduling import sequence
from jaxllm.infer.scheduling.length_classifier import LengthClassifier
from jaxllm.infer.scheduling.phase_split import PhaseSplit, StepDemand
from jaxllm.infer.scheduling.policies import (
    GENERATED_TOKEN_COST,
    Job,
    LengthPredictor,
    Policy,
    View,
    raise_new_key,
)
from jaxllm.infer.scheduling.prefix_groups import PrefixGroup, Row, prefix_groups
from jaxllm.infer.scheduling.step_times import StepTimes

Sequences = Sequence["sequence.Sequence"]


class PolicyState:
    """Policy of a scheduler with the state that it needs; ranks the scheduler's sequences.

    Args:
        policy: scheduling policy; None: first come, first served.
        split: chooses the token budget of steps while sequences decode; None: all that there is.
        clock: returns seconds.
        predict: predicts the number of generated tokens from prompt length and max_tokens; None: the mean of the
            completions that ended, or what the policy says.

    Attributes:
        step_times: model of step durations, updated by the engine.
        lengths: lengths of the completions that ended.
        classifier: predicts lengths from prompts, if the policy is one that does so by prompt.
        served: tokens served so far for each account, see ``GENERATED_TOKEN_COST``.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        split: PhaseSplit | None = None,
        clock: Callable[[], float] = time.monotonic,
        predict: Callable[[int, int], float] | None = None,
    ):
        self.policy, self.split, self.clock, self._predict = policy, split, clock, predict
        self.step_times, self.lengths, self.served = StepTimes(), LengthPredictor(), dict[str, float]()
        self.classifier = LengthClassifier() if getattr(policy, "by_prompt", False) else None
        self._pages, self._groups = dict[int, Row](), list[PrefixGroup]()
        self._grouped: frozenset[int] = frozenset()
        self._ended = 0  # completions since all predictions were made

    @property
    def holds_prefixes(self) -> bool:
        """Whether waiting sequences hold pages of their prefix, see ``Policy``."""
        return hasattr(self.policy, "holds")

    @property
    def reserves_predicted(self) -> bool:
        """Whether a sequence is admitted by the pages that it is predicted to need, see ``Policy``."""
        return getattr(self.policy, "reserves_predicted", False)

    @property
    def reserves_whole(self) -> bool:
        """Whether a sequence is admitted by the pages of all that it may generate, see ``Policy``."""
        return self.holds_prefixes and not self.reserves_predicted

    @property
    def kv_share(self) -> float:
        """Share of the pages that running sequences may be predicted to need, see ``Policy``."""
        share = getattr(self.policy, "kv_share", None)
        return 1.0 if share is None else share

    def add(self, new: sequence.Sequence, others: Sequences) -> None:
        """Records the arrival of a sequence."""
        new.rank, new.arrived = new.order, self.clock()
        request = new.request
        new.predicted = self.predict(request)
        active = {one.request.service.account for one in others}
        if self.policy is not None and request.service.account not in active:
            self.served = raise_new_key(self.served, request.service.account, sorted(active))

    def predict(self, request: sequence.Request) -> float:
        """Predicted number of tokens that a completion of a request has, by what is known now."""
        most = request.params.max_tokens
        if self._predict is None and self.classifier is not None:
            return self.classifier.predict(request.prompt, most)
        return (self._predict or self.lengths.predict)(len(request.prompt), most)

    def finish(self, old: sequence.Sequence) -> None:
        """Records the length of a sequence that has ended."""
        self._pages.pop(old.order, None)
        self._ended += 1
        if old.finish in ("stop", "length"):
            self.lengths = self.lengths.with_completion(len(old.request.prompt), old.generated)
            if self.classifier is not None:
                self.classifier.learn(old.request.prompt, old.generated)

    def charge(self, one: sequence.Sequence, prompt: int, generated: int) -> None:
        """Charges a sequence's account for prompt tokens and generated tokens."""
        if self.policy is not None:
            key = one.request.service.account
            self.served[key] = self.served.get(key, 0.0) + prompt + GENERATED_TOKEN_COST * generated

    def rank(
        self, running: Sequences, waiting: Sequences, page_size: int, room: Callable[[], int] = lambda: sys.maxsize
    ) -> int:
        """Sets the rank of every sequence; returns how many of the waiting ones may be admitted.

        Args:
            running, waiting: sequences.
            page_size: positions of a page.
            room: see ``View``; called if the policy asks for it.
        """
        if self.policy is None:
            for one in running:
                one.rank = one.order
            return len(waiting)
        if getattr(self.policy, "groups_prompts", False):
            self._group([*running, *waiting], page_size)
        self._predict_again(waiting)
        jobs = [
            Job(
                s.order, s.arrived, s.request.prompt, s.computed, s.generated, s.predicted, s.slot >= 0,
                s.request.service, self._pages.get(s.order, ()),
            )
            for s in (*running, *waiting)
        ]  # fmt: skip
        view = View(
            self.clock(), jobs, self.served, self.step_times.line[1], page_size, self._groups,
            room() if self.reserves_predicted else sys.maxsize,
        )  # fmt: skip
        order, holds = self.policy.order(view), set(getattr(self.policy, "holds", lambda view: ())(view))
        ranks = {number: rank for rank, number in enumerate(order)}
        for one in (*running, *waiting):
            one.rank = ranks.get(one.order, len(jobs) + one.order)
            one.holds = one.order in holds
        return sum(one.order in ranks for one in waiting)

    def _group(self, sequences: Sequences, page_size: int) -> None:
        """Makes the groups of prompts again, once an eighth of the sequences is in none."""
        for one in sequences:
            if one.order not in self._pages:
                self._pages[one.order] = _prompt_pages(one, page_size)
        new = sum(one.order not in self._grouped for one in sequences)
        if new * 8 >= len(sequences) > 0 < new:
            self._groups = prefix_groups({one.order: self._pages[one.order] for one in sequences})
            self._grouped = frozenset(one.order for one in sequences)

    def _predict_again(self, waiting: Sequences) -> None:
        """Predicts the lengths of waiting sequences by what has ended since, once that is a sixteenth of them."""
        if self._ended * 16 < len(waiting):
            return
        self._ended = 0
        for one in waiting:
            if not one.generated:
                one.predicted = self.predict(one.request)

    def token_budget(self, decodes: int, prompts: Sequences, sizes: Sequence[int], chunk: int | None) -> int:
        """Token budget of the next step: the size that the split chooses, with room for all decodes and a chunk.

        Args:
            decodes: tokens of sequences that decode.
            prompts: sequences whose prompts are not yet computed.
            sizes: rows that there are programs for, ascending.
            chunk: least tokens of a prompt in a step; None: any number.
        """
        if self.split is None or not decodes or not prompts:
            return sizes[-1]
        least = min(decodes + (chunk or 1), sizes[-1])
        fitting = [size for size in sizes if size >= least and size > decodes]
        if not fitting:
            return sizes[-1]
        tokens = sum(one.length - one.computed for one in prompts)
        return self.split.size(StepDemand(decodes, len(prompts), tokens, fitting), self.step_times)


def _prompt_pages(one: sequence.Sequence, page_size: int) -> Row:
    """Digests of the whole pages of a sequence's prompt; none if it takes no pages of others."""
    request = one.request
    if request.params.prompt_logprobs is not None and one.number == 0:  # every token is computed
        return ()
    return tuple(one.page_hash(column, page_size) for column in range(len(request.prompt) // page_size))
