"""Data mixture: several sources in one batch, in exact proportions at every step. Legend: B batch, S sequence.

Tijdeman's algorithm for the chairman assignment problem (Discrete Mathematics 32, 1980) decides which source is at each
position of the endless sequence of rows: before any position n, each source has given n * weight rows, with an error
below one. The order of sources has the period of the weights' common denominator, so the source at a position is a
table look-up, and the number of rows that it has given before is arithmetic. The step is the only state.

Each source has its own epochs and its own shuffle. A source with `max_epochs` is exhausted at some position; according
to `when_exhausted`, the run is refused before it begins, or the other sources continue with weights in the same
proportion.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxllm.data.batch import Batch
from jaxllm.data.dataset import ResumableDataset, batch_positions, gather, shuffled_rows
from jaxllm.data.sequence_packing import PackingPlan
from jaxllm.data.token_files import TokenDocuments
from jaxllm.files import DataError, digest

NAME = "tijdeman-1"  # part of fingerprints: it must change if the assignment ever changes
MAX_PERIOD = 100_000  # positions after which the order of sources must repeat


def exact_shares(weights: Sequence[float]) -> list[Fraction]:
    """Weights as exact fractions of their sum; 0.1 counts as one tenth.

    Raises ValueError for weights that are not positive numbers, or whose common denominator exceeds `MAX_PERIOD`.
    """
    if not weights or any(not 0 < weight < float("inf") for weight in weights):
        raise ValueError(f"mixture weights are {list(weights)}; each is a positive number")
    exact = [Fraction(repr(weight)) for weight in weights]
    found = [weight / sum(exact) for weight in exact]
    if (period := _period(found)) > MAX_PERIOD:
        raise ValueError(
            f"mixture weights {list(weights)} have the common denominator {period:,}; at most {MAX_PERIOD:,} is "
            "supported. Write them as whole numbers or short decimals, for example 2, 1 or 0.67, 0.33"
        )
    return found


def _period(found: Sequence[Fraction]) -> int:
    return int(np.lcm.reduce(np.array([share.denominator for share in found], object)))


def source_order(found: Sequence[Fraction]) -> Int[np.ndarray, " period"]:
    """Source at each position of one period, int64.

    Among the sources that one more row would not put too far ahead, the one whose next row is due first is chosen.
    """
    period, sources = _period(found), range(len(found))
    weight = [int(share * period) for share in found]
    if len(found) == 1:
        return np.zeros(period, np.int64)
    # Tijdeman's bound is 1 - 1 / (2n - 2); everything is in units of 1 / (period * (2n - 2)).
    slack = 2 * len(found) - 2
    had, out = [0] * len(found), np.empty(period, np.int64)
    for place in range(1, period + 1):
        # Eligible: share * place - had >= 1 / (2n - 2). Due when share * t - had reaches 1 - 1 / (2n - 2).
        open_to = [k for k in sources if slack * (weight[k] * place - had[k] * period) >= period]
        k = min(open_to, key=lambda k: (-(-(period * (slack * (had[k] + 1) - 1)) // (slack * weight[k])), k))
        out[place - 1] = k
        had[k] += 1
    return out


@dataclass(frozen=True, eq=False)
class MixtureSource:
    """Source of a mixture. max_epochs: epochs after which it is exhausted; None is no limit."""

    name: str
    documents: TokenDocuments
    plan: PackingPlan
    weight: float
    max_epochs: float | None = None

    @property
    def max_rows(self) -> int | None:
        """Rows that the source may give in all; None is no limit."""
        return None if self.max_epochs is None else int(Fraction(repr(self.max_epochs)) * self.plan.rows)


@dataclass(frozen=True, eq=False)
class MixturePhase:
    """Phase of a mixture: a range of positions in which the same sources take part.

    first, end: positions; end None is no end. rows_at_start: rows that each source has given before the phase.
    sources: indices of the sources that take part. order: the source at each position of a period, as an index into
    `sources`.
    """

    first: int
    end: int | None
    rows_at_start: tuple[int, ...]
    sources: tuple[int, ...]
    order: Int[np.ndarray, " period"]

    @cached_property
    def counts(self) -> Int[np.ndarray, "period_plus_one sources"]:
        """Rows of each source before each position of a period."""
        chosen = self.order[:, None] == np.arange(len(self.sources))
        return np.concatenate([np.zeros((1, len(self.sources)), np.int64), np.cumsum(chosen, axis=0)])

    def rows_before(self, place: int) -> dict[int, int]:
        """Rows that each source of this phase has given before position `place`, earlier phases included."""
        periods, rest = divmod(place - self.first, len(self.order))
        whole, part = self.counts[-1].tolist(), self.counts[rest].tolist()
        return {k: self.rows_at_start[k] + periods * whole[i] + part[i] for i, k in enumerate(self.sources)}

    def source_at(self, place: int) -> int:
        """Index of the source that position `place` belongs to."""
        return self.sources[int(self.order[(place - self.first) % len(self.order)])]

    def position_of_row(self, number: int, rows: int) -> int:
        """Position at which source `number` gives its row number `rows` (counted from 0, earlier phases included)."""
        index = self.sources.index(number)
        periods, rest = divmod(rows - self.rows_at_start[number], int(self.counts[-1, index]))
        return self.first + periods * len(self.order) + int(np.searchsorted(self.counts[:, index], rest, "right")) - 1


def mixture_phases(sources: Sequence[MixtureSource]) -> list[MixturePhase]:
    """Phases of a mixture, until all sources are exhausted or without end; each begins where a source is exhausted."""
    found: list[MixturePhase] = []
    alive, first, before = list(range(len(sources))), 0, [0] * len(sources)
    while alive:
        order = source_order(exact_shares([sources[k].weight for k in alive]))
        phase = MixturePhase(first, None, tuple(before), tuple(alive), order)
        limits = {k: limit for k in alive if (limit := sources[k].max_rows) is not None}
        ends = {k: phase.position_of_row(k, limit) for k, limit in limits.items()}
        if not ends:
            return [*found, phase]
        end = min(ends.values())
        if end > first:
            found.append(MixturePhase(first, end, tuple(before), tuple(alive), order))
            for k, had in phase.rows_before(end).items():
                before[k] = had
        alive, first = [k for k in alive if ends.get(k) != end], end
    return found


@dataclass(frozen=True, eq=False)
class MixtureDataset(ResumableDataset):
    """Training data set of a data mixture: rows of several sources in exact proportions.

    renormalise: whether the other sources continue when a source is exhausted; False refuses the run.
    """

    sources: tuple[MixtureSource, ...]
    batch_size: int
    seed: int
    identity: dict[str, Any]
    renormalise: bool = False

    @property
    def tokens_per_step(self) -> int:
        """Positions in a batch, B * S, padding included."""
        return self.batch_size * self.sources[0].plan.seq_len

    @property
    def rows_per_epoch(self) -> int:
        """Rows of all sources together."""
        return sum(source.plan.rows for source in self.sources)

    @property
    def documents(self) -> Any:
        """Tokens of each document of each source."""
        return (one for source in self.sources for one in source.documents)

    @property
    def files(self) -> list[dict[str, Any]]:
        """Documents read from each file, as in `ResumableDataset.files`."""
        return [one for source in self.sources for one in source.documents.about.get("files", [])]

    @cached_property
    def phases(self) -> list[MixturePhase]:
        """Phases of the run; without `renormalise` only the one of all sources, if each has a row to give."""
        found = mixture_phases(self.sources)
        return found if self.renormalise else [phase for phase in found[:1] if len(phase.sources) == len(self.sources)]

    @cached_property
    def _seeds(self) -> list[int]:
        return [int(digest([self.seed, source.name])[:16], 16) for source in self.sources]

    def exhausted_sources(self) -> list[tuple[str, int]]:
        """(name, step in which it gives its last row) of each source that is exhausted, in order."""
        out = []
        for phase in self.phases:
            if phase.end is None:
                continue
            given = phase.rows_before(phase.end)
            for k in phase.sources:
                if phase.rows_at_start[k] < given[k] == self.sources[k].max_rows:
                    out.append((phase.position_of_row(k, given[k] - 1), self.sources[k].name))
        return [(name, place // self.batch_size) for place, name in sorted(out)]

    def check_steps(self, steps: int) -> None:
        """Raises DataError, naming the source, if a run of `steps` steps needs more rows than `max_epochs` allows."""
        end = self.phases[-1].end if self.phases else 0
        if end is None or steps * self.batch_size <= end:
            return
        none = [number for number, source in enumerate(self.sources) if source.max_rows == 0]
        source = self.sources[self.phases[-1].source_at(end) if self.phases else none[0]]
        rest = (
            " (all other sources are exhausted before)."
            if self.renormalise
            else ", or set data.when_exhausted='renormalise' to continue without it."
        )
        raise DataError(
            f"mixture: {source.name!r} ({source.plan.rows:,} rows, max_epochs {source.max_epochs:g}) is exhausted "
            f"after {end // self.batch_size:,} of {steps:,} steps. Lower its weight, raise its max_epochs, train for "
            f"fewer steps{rest}"
        )

    def rows_consumed(self, step: int) -> dict[str, int]:
        """Rows that each source has given before `step`, by name."""
        place = step * self.batch_size
        phase = self._phase(place) if place == 0 or place < (self.phases[-1].end or place + 1) else self.phases[-1]
        had = dict(enumerate(phase.rows_at_start)) | phase.rows_before(place)
        return {source.name: had[k] for k, source in enumerate(self.sources)}

    def rows_at(
        self, step: int, *, shard: int = 0, num_shards: int = 1
    ) -> tuple[Int[np.ndarray, " rows"], Int[np.ndarray, " rows"]]:
        """(source index, row index in that source) of each row of the batch at `step`, int64."""
        first, count = batch_positions(step, self.batch_size, shard, num_shards)
        part, row, done = np.empty(count, np.int64), np.empty(count, np.int64), 0
        while done < count:
            phase = self._phase(first + done)
            many = count - done if phase.end is None else min(count - done, phase.end - first - done)
            here = (first + done - phase.first) % len(phase.order) + np.arange(many)
            part[done : done + many] = np.array(phase.sources)[phase.order[here % len(phase.order)]]
            had = phase.rows_before(first + done)
            for k in np.unique(part[done : done + many]).tolist():
                there = done + np.flatnonzero(part[done : done + many] == k)
                row[there] = shuffled_rows(had[k], len(there), self.sources[k].plan.rows, self._seeds[k])
            done += many
        return part, row

    def _phase(self, place: int) -> MixturePhase:
        index = bisect_right([phase.first for phase in self.phases], place) - 1
        phase = self.phases[index] if index >= 0 else None
        if phase is None or (phase.end is not None and place >= phase.end):
            self.check_steps(place // self.batch_size + 1)
            raise DataError("mixture: max_epochs leaves no row of any source")
        return phase

    def batch_at(self, step: int, *, shard: int = 0, num_shards: int = 1) -> Batch:
        """Global batch of `step`, or the rows of one of `num_shards` processes (contiguous, in order of shard)."""
        parts = [(source.documents, source.plan) for source in self.sources]
        return gather(parts, *self.rows_at(step, shard=shard, num_shards=num_shards))
