"""Policy state: arrival times, served tokens, predictions and step times that scheduling policies need."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from jaxllm.infer.scheduling import sequence
from jaxllm.infer.scheduling.length_classifier import LengthClassifier
from jaxllm.infer.scheduling.policies import (
    GENERATED_TOKEN_COST,
    Job,
    LengthPredictor,
    Policy,
    StepTimes,
    View,
    raise_new_key,
)

Sequences = Sequence["sequence.Sequence"]


class PolicyState:
    """Policy of a scheduler with the state that it needs; ranks the scheduler's sequences.

    Args:
        policy: scheduling policy; None: first come, first served.
        tpot: target time per output token in seconds: while sequences decode, the token budget of steps is reduced to
            meet it; None: no target.
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
        tpot: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        predict: Callable[[int, int], float] | None = None,
    ):
        self.policy, self.tpot, self.clock, self._predict = policy, tpot, clock, predict
        self.step_times, self.lengths, self.served = StepTimes(), LengthPredictor(), dict[str, float]()
        self.classifier = LengthClassifier() if getattr(policy, "by_prompt", False) else None

    @property
    def holds_prefixes(self) -> bool:
        """Whether waiting sequences hold pages of their prefix, see ``Policy``."""
        return hasattr(self.policy, "holds")

    @property
    def reserves_predicted(self) -> bool:
        """Whether a sequence is admitted by the pages that it is predicted to need, see ``Policy``."""
        return getattr(self.policy, "reserves_predicted", False)

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
        if old.finish in ("stop", "length"):
            self.lengths = self.lengths.with_completion(len(old.request.prompt), old.generated)
            if self.classifier is not None:
                self.classifier.learn(old.request.prompt, old.generated)

    def charge(self, one: sequence.Sequence, prompt: int, generated: int) -> None:
        """Charges a sequence's account for prompt tokens and generated tokens."""
        if self.policy is not None:
            key = one.request.service.account
            self.served[key] = self.served.get(key, 0.0) + prompt + GENERATED_TOKEN_COST * generated

    def rank(self, running: Sequences, waiting: Sequences, page_size: int) -> int:
        """Sets the rank of every sequence; returns how many of the waiting ones may be admitted."""
        if self.policy is None:
            for one in running:
                one.rank = one.order
            return len(waiting)
        jobs = [
            Job(
                s.order, s.arrived, s.request.prompt, s.computed, s.generated, s.predicted, s.slot >= 0,
                s.request.service,
            )
            for s in (*running, *waiting)
        ]  # fmt: skip
        view = View(self.clock(), jobs, self.served, self.step_times.line[1], page_size)
        order, holds = self.policy.order(view), set(getattr(self.policy, "holds", lambda view: ())(view))
        ranks = {number: rank for rank, number in enumerate(order)}
        for one in (*running, *waiting):
            one.rank = ranks.get(one.order, len(jobs) + one.order)
            one.holds = one.order in holds
        return sum(one.order in ranks for one in waiting)

    def token_budget(self, decodes: int, sizes: Sequence[int], chunk: int | None) -> int:
        """Token budget of the next step: the largest padded size that meets ``tpot``, but enough for all decodes."""
        if self.tpot is None or not decodes:
            return sizes[-1]
        least = min(decodes + (chunk or 1), sizes[-1])
        found = self.step_times.tokens_within(self.tpot, least, sizes[-1])
        return max(least, *(size for size in (0, *sizes) if size <= found))
