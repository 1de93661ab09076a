"""Who is next: pure functions of what waits and what runs.

A policy has one method, ``order``: the ids of the jobs that may have tokens in the next step, the first to be served
first. It keeps nothing; what it needs to remember is in the view it is given, so a simulator can share it.
Decodes of those who run are not held up by any: it decides who comes in, whose prompt is read first, and who gives way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

MADE = 2.0
"""What a token made costs a key, where one of a prompt costs 1 (arXiv:2401.00588, section 3)."""


@dataclass(frozen=True)
class Service:
    """What a request is to get, besides its tokens.

    Attributes:
        priority: higher comes first.
        key: on whose account it is.
        ttft: seconds until its first token; None: no target.
        tpot: seconds for each later one; likewise.
    """

    priority: int = 0
    key: str = ""
    ttft: float | None = None
    tpot: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} = {value!r}; give seconds above 0, or None.")


@dataclass(frozen=True)
class Job:
    """What a policy sees of a sequence.

    Attributes:
        id: rising with arrival.
        arrived: seconds, by the clock of the view.
        prompt: token ids.
        computed: tokens in pages.
        made: tokens made; ``predicted`` are expected in all.
        running: it has a slot.
        service: see there.
    """

    id: int
    arrived: float
    prompt: Sequence[int]
    computed: int = 0
    made: int = 0
    predicted: float = 0.0
    running: bool = False
    service: Service = Service()


@dataclass(frozen=True)
class View:
    """What there is.

    Attributes:
        now: seconds.
        jobs: that wait or run.
        served: what each key has had, see ``MADE``.
        token_seconds: that a token of a prompt takes; 0 where that is not known yet.
        page_size: tokens that are shared or not, as one.
    """

    now: float
    jobs: Sequence[Job]
    served: Mapping[str, float] = field(default_factory=dict)
    token_seconds: float = 0.0
    page_size: int = 1


@runtime_checkable
class Policy(Protocol):
    """See the module.

    One that has ``holds(view) -> ids`` besides saves pages for others: these jobs hold what they share with those
    before them while they wait, and a text comes in only where there are pages for all that it may become, beside those
    of all who run: nobody gives way, and nothing is computed again.
    """

    def order(self, view: View) -> list[int]:
        """Ids; a job that waits and is left out keeps waiting."""
        ...


@dataclass(frozen=True)
class FirstCome:
    """In order of arrival."""

    def order(self, view: View) -> list[int]:
        """By id."""
        return sorted(job.id for job in view.jobs)


@dataclass(frozen=True)
class Priority:
    """The highest priority first.

    Attributes:
        age: seconds of waiting that are worth one level, so that everybody's turn comes.
    """

    age: float = 30.0

    def order(self, view: View) -> list[int]:
        """By priority and age."""

        def rank(job: Job) -> tuple[float, int]:
            return -(job.service.priority + (view.now - job.arrived) / self.age), job.id

        return [job.id for job in sorted(view.jobs, key=rank)]


@dataclass(frozen=True)
class Fair:
    """Next is the key that has had least (virtual token counters, arXiv:2401.00588)."""

    def order(self, view: View) -> list[int]:
        """A job of the key with the smallest count, which its prompt then adds to."""
        queues: dict[str, list[Job]] = {}
        for job in sorted(view.jobs, key=lambda job: (not job.running, job.id)):
            queues.setdefault(job.service.key, []).append(job)
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


def lifted(served: Mapping[str, float], key: str, active: Sequence[str]) -> dict[str, float]:
    """Counts when a key comes that had nothing here: no less than the least of the others, so no credit is saved."""
    least = min((served.get(one, 0.0) for one in active), default=0.0)
    return {**served, key: max(served.get(key, 0.0), least)}


def revised(predicted: float, made: int) -> float:
    """A prediction that a text has outgrown is doubled until it has not (S3, arXiv:2306.06000)."""
    predicted = max(predicted, 1.0)
    while predicted <= made:
        predicted *= 2
    return predicted


@dataclass(frozen=True)
class Shortest:
    """The least work left first, by what is predicted.

    Attributes:
        patience: tokens that a second of waiting is worth, so that long ones come in too.
    """

    patience: float = 20.0

    def order(self, view: View) -> list[int]:
        """By tokens left, less what waiting is worth."""

        def rank(job: Job) -> tuple[float, int]:
            left = max(0, len(job.prompt) - job.computed) + revised(job.predicted, job.made) - job.made
            return left - self.patience * (view.now - job.arrived), job.id

        return [job.id for job in sorted(view.jobs, key=rank)]


@dataclass(frozen=True)
class Deadline:
    """The first deadline first, of those that can still be met: for the most requests within their targets.

    Attributes:
        patience: seconds that a request waits for which there is no target, or whose target is missed: it is then as
            urgent as one whose deadline is now.
    """

    patience: float = 30.0

    def order(self, view: View) -> list[int]:
        """By the time at which the first token is due."""

        def rank(job: Job) -> tuple[float, int]:
            if job.service.ttft is None:
                return job.arrived + self.patience, job.id
            due = job.arrived + job.service.ttft
            needs = max(0, len(job.prompt) - job.computed) * view.token_seconds
            late = job.made == 0 and view.now + needs > due
            return due + (self.patience if late else 0), job.id

        return [job.id for job in sorted(view.jobs, key=rank)]


@dataclass(frozen=True)
class Grouped:
    """For many prompts known ahead: those that begin alike one after the other, each common beginning computed once.

    Prompts are in the order of their tokens, which is that of a walk over the tree of their beginnings; groups that
    make many tokens for each of their prompts' come first, so that decodes are there to be mixed with the prompts of
    the others (BatchLLM, arXiv:2412.03594). A job waits while one that runs computes what they share. The next of a
    group holds what it shares while it waits.
    """

    def order(self, view: View) -> list[int]:
        """By group, then by prompt."""
        size = view.page_size
        groups = self._groups(view)

        def ratio(jobs: list[Job]) -> float:
            return sum(job.predicted for job in jobs) / sum(len(job.prompt) for job in jobs)

        running = [job for job in view.jobs if job.running]
        held = {tuple(job.prompt[:size]) for job in view.jobs if job.computed and not job.running}
        begun = {tuple(job.prompt[:size]) for job in running}
        ranked = sorted(
            groups, key=lambda key: (key not in held, key not in begun, -ratio(groups[key]), groups[key][0].id)
        )
        out = []
        for key in ranked:
            mine = [job for job in running if tuple(job.prompt[:size]) == key]
            last: list[Job] = []  # of those before, in the order of tokens, it shares most
            for job in sorted(groups[key], key=lambda job: (not job.running, _by_tokens(job))):
                if not job.running and any(self._waits(job, other, size) for other in (*mine, *last)):
                    continue
                out.append(job.id)
                last = [job]
        return out

    def holds(self, view: View) -> list[int]:
        """The next of each group."""
        waiting = [[job for job in jobs if not job.running] for jobs in self._groups(view).values()]
        return [min(jobs, key=_by_tokens).id for jobs in waiting if jobs]

    @staticmethod
    def _groups(view: View) -> dict[tuple[int, ...], list[Job]]:
        groups: dict[tuple[int, ...], list[Job]] = {}
        for job in view.jobs:
            groups.setdefault(tuple(job.prompt[: view.page_size]), []).append(job)
        return groups

    @staticmethod
    def _waits(job: Job, other: Job, size: int) -> bool:
        """Whether the other is yet to compute pages that both begin with."""
        shared = 0
        for mine, theirs in zip(job.prompt, other.prompt, strict=False):
            if mine != theirs:
                break
            shared += 1
        return other.computed < shared // size * size and job.computed < shared // size * size


def _by_tokens(job: Job) -> tuple[tuple[int, ...], int]:
    return tuple(job.prompt), job.id


@dataclass(frozen=True)
class StepTimes:
    """How long steps take: seconds as a line over their tokens, of recent steps most.

    Attributes:
        weight, tokens, seconds, squares, products: sums that fade.
    """

    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def after(self, tokens: int, seconds: float, fade: float = 0.98) -> StepTimes:
        """With one more step."""
        return StepTimes(
            self.weight * fade + 1,
            self.tokens * fade + tokens,
            self.seconds * fade + seconds,
            self.squares * fade + tokens * tokens,
            self.products * fade + tokens * seconds,
        )

    @property
    def line(self) -> tuple[float, float]:
        """(seconds of a step, seconds more for each token); of steps of one size all is put on the tokens."""
        if self.weight == 0:
            return 0.0, 0.0
        spread = self.weight * self.squares - self.tokens**2
        if spread <= 1e-6 * self.weight * self.squares:
            return 0.0, self.seconds / self.tokens
        slope = max((self.weight * self.products - self.tokens * self.seconds) / spread, 0.0)
        return max((self.seconds - slope * self.tokens) / self.weight, 0.0), slope

    def budget(self, target: float, least: int, most: int) -> int:
        """Tokens of a step that takes no longer than this, as far as is known."""
        base, slope = self.line
        if slope <= 0:
            return most
        return int(min(most, max(least, (target - base) / slope)))


@dataclass(frozen=True)
class Lengths:
    """How long texts become: the mean of those that ended, of prompts about as long (by powers of two).

    Attributes:
        sums: (texts, tokens) by power.
        unknown: tokens where nothing is known.
    """

    sums: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    unknown: float = 64.0

    def predict(self, prompt: int, most: int) -> float:
        """Tokens of a text that may have ``most``."""
        texts, tokens = self.sums.get(prompt.bit_length(), (0, 0))
        return min(float(most), (tokens + self.unknown) / (texts + 1))

    def after(self, prompt: int, made: int) -> Lengths:
        """With one more text that ended."""
        texts, tokens = self.sums.get(prompt.bit_length(), (0, 0))
        return Lengths({**self.sums, prompt.bit_length(): (texts + 1, tokens + made)}, self.unknown)
