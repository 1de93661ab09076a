"""Scheduling policies: pure functions that order waiting and running sequences.

A policy has one method, ``order``: the ids of the jobs that may get tokens in the next step, the first to be served
first. It has no state; what it needs to remember is in the view it is given, so that a simulator can use it too. No
policy delays the decoding of running sequences: it decides admission, the order of prefill, and preemption.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, runtime_checkable

from jaxllm.infer.scheduling.prefix_groups import PrefixGroup

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
        pages: for a policy that groups prompts, digests of the prompt's whole pages, see ``prefix_groups``; none where
            it shares no pages.
    """

    id: int
    arrived: float
    prompt: Sequence[int]
    computed: int = 0
    generated: int = 0
    predicted: float = 0.0
    running: bool = False
    service: Service = Service()
    pages: Sequence[bytes] = ()


@dataclass(frozen=True)
class View:
    """View of the scheduler that a policy decides by.

    Attributes:
        now: seconds.
        jobs: waiting and running jobs.
        served: tokens served for each account, see ``GENERATED_TOKEN_COST``.
        token_seconds: seconds per prompt token; 0 while unknown.
        page_size: tokens of a page, the unit of prefix sharing.
        groups: for a policy that groups prompts, groups of the jobs, and of others that may have ended.
        room: pages for each layer group that the running jobs are not predicted to need.
    """

    now: float
    jobs: Sequence[Job]
    served: Mapping[str, float] = field(default_factory=dict)
    token_seconds: float = 0.0
    page_size: int = 1
    groups: Sequence[PrefixGroup] = ()
    room: int = sys.maxsize


@runtime_checkable
class Policy(Protocol):
    """Scheduling policy.

    A policy may also have ``holds(view) -> ids``, to save pages: these jobs hold references to the cached pages of
    their prefix while they wait, and a job is admitted only if there are pages for all tokens that it and the running
    jobs may generate, so that nothing is preempted or recomputed. With ``reserves_predicted = True`` that is for the
    tokens that they are predicted to generate, and with ``kv_share`` such a share of all pages is for that. With
    ``groups_prompts = True`` its view has groups of prompts with common prefixes.
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
class Packed:
    """Bin packing of the KV caches that jobs are predicted to need: decreasing first fit (S3, arXiv:2306.06000).

    Jobs that wait are taken in the order of their sizes, the largest first, and each is admitted that the pages which
    are left have room for: a smaller one passes one that does not fit. Predictions and what happens to wrong ones are
    as with ``Predicted``.

    Attributes:
        patience: seconds after which nothing passes a job; they are taken first, in the order of their arrival.
        by_prompt: see ``Predicted``.
    """

    patience: float = 30.0
    by_prompt: bool = True
    reserves_predicted: ClassVar[bool] = True

    def order(self, view: View) -> list[int]:
        """Running jobs, then those that wait and fit beside them."""

        def size(job: Job) -> float:
            return len(job.prompt) + revise_prediction(job.predicted, job.generated)

        def is_due(job: Job) -> bool:
            return job.generated > 0 or view.now - job.arrived > self.patience

        def rank(job: Job) -> tuple[bool, float, int]:
            return not is_due(job), 0.0 if is_due(job) else -size(job), job.id

        out, room = sorted(job.id for job in view.jobs if job.running), view.room
        for job in sorted((job for job in view.jobs if not job.running), key=rank):
            pages = math.ceil(size(job) / view.page_size)
            if pages <= room or not out:
                out.append(job.id)
                room -= pages
            elif is_due(job):
                break
        return out


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

    Groups are those of ``prefix_groups``. Groups with many generated tokens per computed prompt token come first, so
    that there are decodes to batch with the prefill of the others (BatchLLM, arXiv:2412.03594); in a group prompts are
    in the order of a walk through their prefix tree. A job waits while a running one computes pages that both have. The
    next job of a group holds the shared pages while it waits.

    Attributes:
        kv_share: share of the pages that running jobs may be predicted to need: batches are formed by memory, not by
            numbers of requests and tokens, and what is predicted wrongly finds the rest. None: jobs are admitted as far
            as there are pages for all that they may generate, and nothing is ever preempted.
    """

    kv_share: float | None = None
    groups_prompts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.kv_share is not None and not 0 < self.kv_share <= 1:
            raise ValueError(f"kv_share = {self.kv_share}; give a share above 0, at most 1, or None.")

    @property
    def reserves_predicted(self) -> bool:
        """Whether jobs are admitted by what they are predicted to generate."""
        return self.kv_share is not None

    def order(self, view: View) -> list[int]:
        """Orders by group, then by place in the prefix tree."""
        size = view.page_size

        def rank(found: tuple[PrefixGroup, list[Job]]) -> tuple[bool, float, int]:
            group, jobs = found
            prefix = group.pages * size
            cached = any(job.computed >= prefix for job in jobs)
            begun = any(job.running for job in jobs) or (len(group.members) > 1 and cached)
            computed = sum(len(job.prompt) - prefix for job in jobs) + (0 if cached else prefix)
            ratio = sum(job.predicted for job in jobs) / max(1, computed)
            return not begun, -ratio, min(job.id for job in jobs)

        there = {page for job in view.jobs for page in job.pages[: job.computed // size]}
        busy = {page for job in view.jobs if job.running for page in job.pages[job.computed // size :]} - there
        out = []
        for _, jobs in sorted(self._groups(view), key=rank):
            for job in sorted(jobs, key=lambda job: not job.running):
                rest = job.pages[job.computed // size :]
                if not job.running and not busy.isdisjoint(rest):
                    continue
                out.append(job.id)
                busy.update(page for page in rest if page not in there)
        return out

    def holds(self, view: View) -> list[int]:
        """Next waiting job of each group, if it shares pages."""
        waiting = [[job for job in jobs if not job.running] for group, jobs in self._groups(view) if group.pages]
        return [jobs[0].id for jobs in waiting if jobs]

    @staticmethod
    def _groups(view: View) -> list[tuple[PrefixGroup, list[Job]]]:
        """Groups with those of their jobs that have not ended; a job that is in none is alone."""
        jobs = {job.id: job for job in view.jobs}
        found = [(group, [jobs.pop(one) for one in group.members if one in jobs]) for group in view.groups]
        found += [(PrefixGroup((job.id,), 0), [job]) for job in jobs.values()]
        return [(group, own) for group, own in found if own]


POLICIES: dict[str, Policy | None] = {
    "first-come": None,
    "priority": Priority(),
    "fair": Fair(),
    "shortest": Shortest(),
    "grouped": Grouped(),
    "grouped-predicted": Grouped(kv_share=0.9),
    "predicted": Predicted(),
    "learned": Predicted(by_prompt=True),
    "packed": Packed(),
}
"""Scheduling policies by the names that commands have for them; None is first come, first served without a view."""
BatchPolicyName = Literal["first-come", "shortest", "grouped", "grouped-predicted", "predicted", "learned", "packed"]
PolicyName = Literal[
    "first-come", "priority", "fair", "shortest", "grouped", "grouped-predicted", "predicted", "learned", "packed"
]
"""Names of policies: for one client's batch, and for a server."""


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
