"""Slow processes: which process makes the others of a step wait, from the times of each process by itself.

A step of SPMD training takes equally long in all processes, because the collectives of a step wait for the slowest. So
the time of a step names nobody. What a process spends by itself does: the wait for its batch, the work of its host
between two steps, and time in which it was ready to run and did not. The process with the longest own time, if that is
longer than the median of the others by a share of the step, in several consecutive steps, is slow.

    C4: Boosting Large-scale Parallel Training Efficiency with Fault Detection (arXiv:2406.04594), which compares the
    arrival of ranks at collectives; here own times of hosts are compared, because a step is one program.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import NamedTuple

STEPS = 3
"""Consecutive steps in which a process has to be behind before it is named."""
WARMUP = 2
"""First steps of a generation that are not compared: caches are cold and programs are loaded."""
SHARE = 0.4
"""Share of a step by which a process has to be behind, by default."""
FLOOR = 0.05
"""Seconds that a process has to be behind in a step, however short the step is."""


class RankStepTimes(NamedTuple):
    """Times of one step in one process, in seconds.

    Attributes:
        step: number of the step, from 1.
        batch: wait for the batch.
        host: work of the host between two waits.
        devices: wait for the devices, collectives included.
        late: time in which a thread of the process was due to run and did not: the process was stopped or throttled.
    """

    step: int
    batch: float
    host: float
    devices: float
    late: float

    @property
    def total(self) -> float:
        """Duration of the step."""
        return self.batch + self.host + self.devices

    @property
    def own(self) -> float:
        """Time that the process spent by itself, while the others waited for it if theirs was shorter."""
        return min(self.total, self.batch + self.host + self.late)


class SlowRank(NamedTuple):
    """Finding: a process that is slow.

    Attributes:
        rank: the process.
        step: last of the compared steps.
        behind: seconds that it was behind the median of the others in that step.
        lasting: duration of the compared steps, in seconds.
        phase: "batch", "host" or "stopped", by which it was behind most.
    """

    rank: int
    step: int
    behind: float
    lasting: float
    phase: str

    def __str__(self) -> str:
        """The finding in words, without the process."""
        what = {"batch": "it waits for its batches", "host": "its host is busy", "stopped": "it does not run"}
        return (
            f"was {self.behind:.2f} s behind the others in each of {STEPS} steps up to {self.step}: {what[self.phase]}"
        )


class SlowRanks:
    """Comparison of the own times of all processes, step by step.

    Args:
        ranks: number of processes; with fewer than three nobody is named.
        share: of the step that a process has to be behind; 0: nobody is named.
    """

    def __init__(self, ranks: int, share: float):
        self._ranks, self._share = ranks, share
        self._steps: dict[int, dict[int, RankStepTimes]] = {}
        self._compared = 0
        self._strikes: tuple[int, list[float]] = (0, [])  # rank, and durations of the steps in which it was behind

    def add(self, rank: int, times: RankStepTimes) -> SlowRank | None:
        """Adds the times of a step in one process; names a process once the times of its last steps show it."""
        if not self._share or self._ranks < 3:
            return None
        of_step = self._steps.setdefault(times.step, {})
        of_step[rank] = times
        if len(of_step) < self._ranks:
            return None
        for step in [step for step in self._steps if step <= times.step]:
            del self._steps[step]
        self._compared += 1
        return self._compare(times.step, of_step) if self._compared > WARMUP else None

    def _compare(self, step: int, times: Mapping[int, RankStepTimes]) -> SlowRank | None:
        duration = statistics.median(one.total for one in times.values())
        slowest = max(times, key=lambda rank: times[rank].own)
        others = [one for rank, one in times.items() if rank != slowest]
        behind = times[slowest].own - statistics.median(one.own for one in others)
        before = self._strikes[1] if self._strikes[0] == slowest else []
        strikes = [*before, duration] if behind > max(FLOOR, self._share * duration) else []
        self._strikes = slowest, strikes
        if len(strikes) < STEPS:
            return None
        gaps = {
            name: getattr(times[slowest], field) - statistics.median(getattr(one, field) for one in others)
            for field, name in (("batch", "batch"), ("host", "host"), ("late", "stopped"))
        }
        return SlowRank(slowest, step, behind, sum(strikes), max(gaps, key=lambda name: gaps[name]))
