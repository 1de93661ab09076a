"""Simulation of a training run whose hosts fail: the share of its time that becomes progress, by mechanism of recovery.

A run needs all its hosts. Failures come at random, at a rate for each working host; the failed host is repaired, and
returns. What a failure costs is the work since the newest snapshot, the time to notice it, the restart, and the time
until there are hosts enough:

    spares   a host that stands by takes the failed one's place
    elastic  the run goes on with the hosts that are left, at their share of the speed, and takes in those that return
    neither  the run waits until a host is repaired

A second failure during a recovery begins it again. All times are in seconds. ``python -m benchmarks.replicas.failures``
compares mechanisms at the failure rate of a published run.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, fields

DAY = 86400.0


@dataclass(frozen=True)
class FailingCluster:
    """Hosts of a run and how they fail.

    Attributes:
        hosts: hosts that the run needs.
        failures: failures of a host in a second.
        hangs: share of the failures that are hangs, which end no process.
        repair: mean time until a failed host returns; exponential.
        spares: hosts that stand by.
    """

    hosts: int
    failures: float
    hangs: float
    repair: float
    spares: int = 0


@dataclass(frozen=True)
class Recovery:
    """Times of a run's recovery from a failure.

    Attributes:
        every: time between two snapshots.
        save: time that a snapshot holds the run up.
        crash: time until a crash is noticed.
        hang: time until a hang is noticed.
        restart: time from then to the next step.
        elastic: goes on without a failed host.
        rejoin: time that taking in returned hosts holds the run up.
    """

    every: float
    save: float
    crash: float
    hang: float
    restart: float
    elastic: bool = False
    rejoin: float = 0.0


@dataclass
class TimeSpent:
    """Time of a run by what became of it; of times in which only some hosts worked, the idle share is ``missing``.

    Attributes:
        progress: work that was kept.
        repeated: work that a failure lost.
        saving: snapshots.
        noticing, restarting: of failures.
        waiting: for a repaired host.
        missing: share of the hosts that a smaller run did not have.
    """

    progress: float = 0.0
    repeated: float = 0.0
    saving: float = 0.0
    noticing: float = 0.0
    restarting: float = 0.0
    waiting: float = 0.0
    missing: float = 0.0

    @property
    def total(self) -> float:
        """Time of the run."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def goodput(self) -> float:
        """Share of the time that is progress of the whole run."""
        return self.progress / self.total


class FailingRun:
    """One history of a run.

    Args:
        cluster, recovery: see there.
        seed: of the failures.
    """

    def __init__(self, cluster: FailingCluster, recovery: Recovery, seed: int = 0):
        self.cluster, self.recovery = cluster, recovery
        self.spent, self.failures = TimeSpent(), 0
        self._rng = random.Random(seed)
        self._now, self._hosts, self._spares = 0.0, cluster.hosts, cluster.spares
        self._returns: list[float] = []  # times at which failed hosts are repaired

    def run(self, until: float) -> TimeSpent:
        """Simulates so many seconds, or a little more: a recovery is completed."""
        while self._now < until:
            self._work(until)
        return self.spent

    def _work(self, until: float) -> None:
        """Works until the next failure, which it recovers from, the next return in an elastic run, or the end."""
        failure = self._now + self._rng.expovariate(self.cluster.failures * self._hosts)
        lacks = self.recovery.elastic and self._hosts < self.cluster.hosts  # else who returns stands by
        back = max(self._returns[0], self._now) if lacks else float("inf")
        end = min(failure, back, until)
        self._steps(end - self._now, kept=end < failure)
        self._now = end
        if end == failure:
            self._recover()
        elif end == back:
            self._return_hosts()
            if self._fails("restarting", self.recovery.rejoin):
                self._recover()

    def _steps(self, seconds: float, kept: bool) -> None:
        """Steps and snapshots of so long; without ``kept`` what is after the last snapshot is lost."""
        cycle = self.recovery.every + self.recovery.save
        whole = seconds // cycle
        rest = min(seconds - whole * cycle, self.recovery.every)  # a snapshot that is not complete is none
        self._add("progress", whole * self.recovery.every)
        self._add("progress" if kept else "repeated", rest)
        self._add("saving", seconds - whole * self.recovery.every - rest)

    def _recover(self) -> None:
        """Recovers from the failure of a host; from the beginning if another one fails meanwhile."""
        while not self._is_recovered():
            pass

    def _is_recovered(self) -> bool:
        """Notices that a host has failed, and restarts; False if another one failed meanwhile."""
        self.failures += 1
        heapq.heappush(self._returns, self._now + self._rng.expovariate(1 / self.cluster.repair))
        self._hosts -= 1
        hangs = self._rng.random() < self.cluster.hangs
        if self._fails("noticing", self.recovery.hang if hangs else self.recovery.crash):
            return False
        self._return_hosts()
        while self._hosts < (1 if self.recovery.elastic else self.cluster.hosts):
            self._pass("waiting", max(self._returns[0] - self._now, 0.0))
            self._return_hosts()
        return not self._fails("restarting", self.recovery.restart)

    def _fails(self, what: str, seconds: float) -> bool:
        """Lets time pass, but only until a host fails; returns whether one did."""
        failure = self._rng.expovariate(self.cluster.failures * self._hosts) if self._hosts else float("inf")
        self._pass(what, min(seconds, failure))
        return failure < seconds

    def _return_hosts(self) -> None:
        """Puts repaired hosts and spares to work, as many as the run needs; the others stand by."""
        while self._returns and self._returns[0] <= self._now:
            heapq.heappop(self._returns)
            self._spares += 1
        used = min(self._spares, self.cluster.hosts - self._hosts)
        self._hosts, self._spares = self._hosts + used, self._spares - used

    def _pass(self, what: str, seconds: float) -> None:
        setattr(self.spent, what, getattr(self.spent, what) + seconds)
        self._now += seconds

    def _add(self, what: str, seconds: float) -> None:
        """Adds time of steps, of which only the share of the hosts that are there counts."""
        share = self._hosts / self.cluster.hosts
        setattr(self.spent, what, getattr(self.spent, what) + share * seconds)
        self.spent.missing += (1 - share) * seconds
