"""What policies need to know, kept for a scheduler: arrivals, shares, predictions, how long steps take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from jaxllm.infer.engine import sequence
from jaxllm.infer.engine.policies import MADE, Job, Lengths, Policy, StepTimes, View, lifted

Sequences = Sequence["sequence.Sequence"]


class Ranking:
    """The order of an engine's sequences.

    Args:
        policy: who is next; None: first come, first served.
        tpot: seconds that a token of a text is to take at most, which the tokens of a step are cut down to while texts
            are written; None: any.
        clock: seconds.
        predict: tokens that a text is likely to have, of the length of its prompt and the most it may have; None: the
            mean of those that ended.

    Attributes:
        times: of steps, as the engine tells.
        lengths: of texts that ended.
        served: what each key has had.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        tpot: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        predict: Callable[[int, int], float] | None = None,
    ):
        self.policy, self.tpot, self.clock, self._predict = policy, tpot, clock, predict
        self.times, self.lengths, self.served = StepTimes(), Lengths(), dict[str, float]()

    @property
    def saves(self) -> bool:
        """Whether those who wait hold pages, see ``Policy``."""
        return hasattr(self.policy, "holds")

    def come(self, new: sequence.Sequence, others: Sequences) -> None:
        """A sequence has come."""
        new.rank, new.arrived = new.order, self.clock()
        request = new.request
        new.predicted = (self._predict or self.lengths.predict)(len(request.prompt), request.params.max_tokens)
        active = {one.request.service.key for one in others}
        if self.policy is not None and request.service.key not in active:
            self.served = lifted(self.served, request.service.key, sorted(active))

    def go(self, old: sequence.Sequence) -> None:
        """A sequence has ended."""
        if old.finish in ("stop", "length"):
            self.lengths = self.lengths.after(len(old.request.prompt), old.made)

    def charge(self, one: sequence.Sequence, prompt: int, made: int) -> None:
        """A sequence gets tokens of its prompt computed and others made."""
        if self.policy is not None:
            key = one.request.service.key
            self.served[key] = self.served.get(key, 0.0) + prompt + MADE * made

    def rank(self, running: Sequences, waiting: Sequences, page_size: int) -> int:
        """Sets everybody's rank; how many of those who wait may come in."""
        if self.policy is None:
            for one in running:
                one.rank = one.order
            return len(waiting)
        jobs = [
            Job(
                s.order, s.arrived, s.request.prompt, s.computed, s.made, s.predicted, s.slot >= 0, s.request.service
            )
            for s in (*running, *waiting)
        ]  # fmt: skip
        view = View(self.clock(), jobs, self.served, self.times.line[1], page_size)
        order, holds = self.policy.order(view), set(getattr(self.policy, "holds", lambda view: ())(view))
        ranks = {number: rank for rank, number in enumerate(order)}
        for one in (*running, *waiting):
            one.rank = ranks.get(one.order, len(jobs) + one.order)
            one.holds = one.order in holds
        return sum(one.order in ranks for one in waiting)

    def budget(self, decodes: int, sizes: Sequence[int], piece: int | None) -> int:
        """Tokens of the next step: a size that steps are padded to, unless the texts alone need more than it."""
        if self.tpot is None or not decodes:
            return sizes[-1]
        least = min(decodes + (piece or 1), sizes[-1])
        found = self.times.budget(self.tpot, least, sizes[-1])
        return max(least, *(size for size in (0, *sizes) if size <= found))
