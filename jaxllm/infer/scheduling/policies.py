"""Scheduling policies: pure functions that order waiting and running sequences.

A policy has one method, ``order``: the ids of the jobs that may get tokens in the next step, the first to be served
first. It has no state; what it needs to remember is in the view it is given, so that a simulator can use it too. No
policy delays the decoding of running sequences: it decides admission, the order of prefill, and preemption.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, runtime_checkable

GENERATED_TOKEN_COST = 2.0
"""Cost of a generated token for a key, relative to a prompt token (arXiv:2401.00588, section 3)."""


@dataclass(frozen=True)
class Service:
    """Service level of a request.

    Attributes:
        priority: a higher one is served first.
        key: client that the tokens are charged to.
        ttft: target time to first token in seconds; None: no target.
        tpot: target time per output token after the first, in seconds; None: no target.
        adapter: name of the request's adapter; each adapter of a key is an account of its own.
    """

    priority: int = 0
    key: str = ""
    ttft: float | None = None
    tpot: float | None = None
    adapter: str = ""

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} = {value!r}; give seconds above 0, or None.")

    @property
    def account(self) -> str:
        """Account that the tokens are charged to."""
        return f"{self.key} {self.adapter}" if self.adapter else self.key


@dataclass(frozen=True)
class Job:
    """Job: a sequence as a policy sees it.

    Attributes:
        id: rises with arrival.
        arrived: arrival time in seconds, by the clock of the view.
        prompt: token ids.
        computed: tokens whose KV cache is computed.
        generated: tokens generated so far.
        predicted: predicted number of generated tokens.
        running: it has a slot.
        service: service level.
    """

    id: int
    arrived: float
    prompt: Sequence[int]
    computed: int = 0
    generated: int = 0
    predicted: float = 0.0
    running: bool = False
    service: Service = Service()


@dataclass(frozen=True)
class View:
    """View of the scheduler that a policy decides by.

    Attributes:
        now: seconds.
        jobs: waiting and running jobs.
        served: tokens served for each account, see ``GENERATED_TOKEN_COST``.
        token_seconds: seconds per prompt token; 0 while unknown.
        page_size: tokens of a page, the unit of prefix sharing.
    """

    now: float
    jobs: Sequence[Job]
    served: Mapping[str, float] = field(default_factory=dict)
    token_seconds: float = 0.0
    page_size: int = 1


@runtime_checkable
class Policy(Protocol):
    """Scheduling policy.

    A policy may also have ``holds(view) -> ids``, to save pages: these jobs hold references to the cached pages of
    their prefix while they wait, and a job is admitted only if there are pages for all tokens that it and the running
    jobs may generate, so that nothing is preempted or recomputed. With ``reserves_predicted = True`` that is for the
    tokens that they are predicted to generate.
    """

    def order(self, view: View) -> list[int]:
        """Ids in the order of service; a waiting job that is left out keeps waiting."""
        ...


@dataclass(frozen=True)
class FirstCome:
    """First come, first served."""

    def order(self, view: View) -> list[int]:
        """Orders by id."""
        return sorted(job.id for job in view.jobs)


@dataclass(frozen=True)
class Priority:
    """Highest priority first.

    Attributes:
        age: seconds of waiting that are worth one level of priority, so that no job starves.
    """

    age: float = 30.0

    def order(self, view: View) -> list[int]:
        """Orders by priority and age."""

        def rank(job: Job) -> tuple[float, int]:
            return -(job.service.priority + (view.now - job.arrived) / self.age), job.id

        return [job.id for job in sorted(view.jobs, key=rank)]


@dataclass(frozen=True)
class Fair:
    """Fair sharing: next is the account with the fewest served tokens (virtual token counter, arXiv:2401.00588)."""

    def order(self, view: View) -> list[int]:
        """Takes the next job of the account with the smallest counter, and adds its prompt to the counter."""
        queues: dict[str, list[Job]] = {}
        for job in sorted(view.jobs, key=lambda job: (not job.running, job.id)):
            queues.setdefault(job.service.account, []).append(job)
        counts = {key: view.served.get(key, 0.0) for key in queues}
        out = []
        while queues:
            key = min(queues, key=lambda key: (counts[key], queues[key][0].id))
            job = queues[key].pop(0)
            counts[key] += 0 if job.running else len(job.prompt) - job.computed
            out.append(job.id)
            if not queues[key]:
                del queues[key]
        return out


def raise_new_key(served: Mapping[str, float], key: str, active: Sequence[str]) -> dict[str, float]:
    """Counters when an idle key becomes active: at least the smallest of the active keys, so no credit accumulates."""
    least = min((served.get(one, 0.0) for one in active), default=0.0)
    return {**served, key: max(served.get(key, 0.0), least)}


def revise_prediction(predicted: float, generated: int) -> float:
    """Prediction after ``generated`` tokens: doubled until it exceeds them (S3, arXiv:2306.06000)."""
    predicted = max(predicted, 1.0)
    while predicted <= generated:
        predicted *= 2
    return predicted


@dataclass(frozen=True)
class Shortest:
    """Shortest predicted remaining work first.

    Attributes:
        patience: tokens that a second of waiting is worth, so that long jobs are served too.
    """

    patience: float = 20.0

    def order(self, view: View) -> list[int]:
        """Orders by remaining tokens, less the value of the time waited."""

        def rank(job: Job) -> tuple[float, int]:
            left = (
                max(0, len(job.prompt) - job.computed) + revise_prediction(job.predicted, job.generated) - job.generated
            )
            return left - self.patience * (view.now - job.arrived), job.id

        return [job.id for job in sorted(view.jobs, key=rank)]


@dataclass(frozen=True)
class Predicted:
    """First come, first served, admitted by the KV cache that jobs are predicted to need (S3, arXiv:2306.06000).

    A job is admitted if there are pages for the tokens that it and the running jobs are predicted to generate. A job
    that generates more has its prediction doubled, and reserves that from then on; where pages run out all the same,
    the last to arrive is preempted and waits with its new prediction.

    Attributes:
        by_prompt: lengths are predicted from the tokens of prompts, see ``LengthClassifier``, and not as means by
            prompt length.
    """

    by_prompt: bool = False
    reserves_predicted: ClassVar[bool] = True

    def order(self, view: View) -> list[int]:
        """Orders by id."""
        return sorted(job.id for job in view.jobs)


@dataclass(frozen=True)
class Deadline:
    """Earliest deadline first among those that can still be met, to meet the targets of the most requests.

    Attributes:
        patience: seconds after which a request without a target, or with a missed one, is as urgent as one whose
            deadline is now.
    """

    patience: float = 30.0

    def order(self, view: View) -> list[int]:
        """Orders by the time at which the first token is due."""

        def rank(job: Job) -> tuple[float, int]:
            if job.service.ttft is None:
                return job.arrived + self.patience, job.id
            due = job.arrived + job.service.ttft
            needs = max(0, len(job.prompt) - job.computed) * view.token_seconds
            late = job.generated == 0 and view.now + needs > due
            return due + (self.patience if late else 0), job.id

        return [job.id for job in sorted(view.jobs, key=rank)]


@dataclass(frozen=True)
class Grouped:
    """Prefix grouping for many prompts known ahead: prompts with a common prefix run together; it is computed once.

    Prompts are in the order of their tokens, which walks the tree of their prefixes. Groups with many generated tokens
    per prompt token come first, so that there are decodes to batch with the prefill of the others (BatchLLM,
    arXiv:2412.03594). A job waits while a running one computes their common prefix. The next job of a group holds the
    shared pages while it waits.
    """

    def order(self, view: View) -> list[int]:
        """Orders by group, then by prompt."""
        size = view.page_size
        groups = self._groups(view)

        def ratio(jobs: list[Job]) -> float:
            return sum(job.predicted for job in jobs) / sum(len(job.prompt) for job in jobs)

        running = [job for job in view.jobs if job.running]
        held_keys = {tuple(job.prompt[:size]) for job in view.jobs if job.computed and not job.running}
        running_keys = {tuple(job.prompt[:size]) for job in running}
        ranked = sorted(
            groups,
            key=lambda key: (key not in held_keys, key not in running_keys, -ratio(groups[key]), groups[key][0].id),
        )
        out = []
        for key in ranked:
            mine = [job for job in running if tuple(job.prompt[:size]) == key]
            last: list[Job] = []  # the job before, in the order of tokens, has the longest common prefix
            for job in sorted(groups[key], key=lambda job: (not job.running, _prompt_order(job))):
                if not job.running and any(self._waits_for(job, other, size) for other in (*mine, *last)):
                    continue
                out.append(job.id)
                last = [job]
        return out

    def holds(self, view: View) -> list[int]:
        """Next waiting job of each group."""
        waiting = [[job for job in jobs if not job.running] for jobs in self._groups(view).values()]
        return [min(jobs, key=_prompt_order).id for jobs in waiting if jobs]

    @staticmethod
    def _groups(view: View) -> dict[tuple[int, ...], list[Job]]:
        groups: dict[tuple[int, ...], list[Job]] = {}
        for job in view.jobs:
            groups.setdefault(tuple(job.prompt[: view.page_size]), []).append(job)
        return groups

    @staticmethod
    def _waits_for(job: Job, other: Job, size: int) -> bool:
        """Whether the other job has yet to compute pages of their common prefix."""
        shared = 0
        for mine, theirs in zip(job.prompt, other.prompt, strict=False):
            if mine != theirs:
                break
            shared += 1
        return other.computed < shared // size * size and job.computed < shared // size * size


POLICIES: dict[str, Policy | None] = {
    "first-come": None,
    "priority": Priority(),
    "fair": Fair(),
    "shortest": Shortest(),
    "grouped": Grouped(),
    "predicted": Predicted(),
    "learned": Predicted(by_prompt=True),
}
"""Scheduling policies by the names that commands have for them; None is first come, first served without a view."""
BatchPolicyName = Literal["first-come", "shortest", "grouped", "predicted", "learned"]
PolicyName = Literal["first-come", "priority", "fair", "shortest", "grouped", "predicted", "learned"]
"""Names of policies: for one client's batch, and for a server."""


def _prompt_order(job: Job) -> tuple[tuple[int, ...], int]:
    return tuple(job.prompt), job.id


@dataclass(frozen=True)
class StepTimes:
    """Model of step durations: seconds as a linear function of tokens, fitted with decaying weights.

    Attributes:
        weight, tokens, seconds, squares, products: decaying sums.
    """

    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def with_step(self, tokens: int, seconds: float, fade: float = 0.98) -> StepTimes:
        """Sums with one more step."""
        return StepTimes(
            self.weight * fade + 1,
            self.tokens * fade + tokens,
            self.seconds * fade + seconds,
            self.squares * fade + tokens * tokens,
            self.products * fade + tokens * seconds,
        )

    @property
    def line(self) -> tuple[float, float]:
        """(seconds per step, additional seconds per token); with steps of one size only, the first is 0."""
        if self.weight == 0:
            return 0.0, 0.0
        spread = self.weight * self.squares - self.tokens**2
        if spread <= 1e-6 * self.weight * self.squares:
            return 0.0, self.seconds / self.tokens
        slope = max((self.weight * self.products - self.tokens * self.seconds) / spread, 0.0)
        return max((self.seconds - slope * self.tokens) / self.weight, 0.0), slope

    def tokens_within(self, target: float, least: int, most: int) -> int:
        """Tokens of a step that is predicted to take no longer than ``target`` seconds, from ``least`` to ``most``."""
        base, slope = self.line
        if slope <= 0:
            return most
        return int(min(most, max(least, (target - base) / slope)))


@dataclass(frozen=True)
class LengthPredictor:
    """Predictor of completion lengths: the mean of those that ended, by prompt length in powers of two.

    Attributes:
        sums: (completions, tokens) by power of two.
        unknown: prediction without data, in tokens.
    """

    sums: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    unknown: float = 64.0

    def predict(self, prompt: int, most: int) -> float:
        """Predicted number of generated tokens, at most ``most``."""
        count, tokens = self.sums.get(prompt.bit_length(), (0, 0))
        return min(float(most), (tokens + self.unknown) / (count + 1))

    def with_completion(self, prompt: int, generated: int) -> LengthPredictor:
        """Predictor with one more completion that ended."""
        count, tokens = self.sums.get(prompt.bit_length(), (0, 0))
        return LengthPredictor({**self.sums, prompt.bit_length(): (count + 1, tokens + generated)}, self.unknown)
