"""Membership: which slots of an elastic run may have a process; a slot that failed stays out for a time."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from jaxllm.parallel.elastic.slow_ranks import SHARE

LEAST = {"away": 0, "longest": 0, "least": 1, "spares": 0, "gather": 0, "hung_after": 0.5, "slow": 0}
"""Least value of each number of the policy."""


@dataclass(frozen=True)
class ElasticPolicy:
    """Policy of an elastic supervisor: what counts as a failure, and how long a failed slot stays out.

    Attributes:
        away: seconds that a slot stays out after its process was lost, hung or slow; each further failure doubles it.
        longest: longest such time, in seconds.
        least: processes with which the run goes on at least; with fewer it waits until slots return.
        spares: slots that are held in addition, without a process until another slot is out.
        exclude: slots that get no process at all: numbers, or names of hosts, with commas between them.
        gather: seconds to wait for all hosts at the start of a run over several machines.
        hung_after: seconds without a heartbeat, or in which all processes wait for one that is not in its step, after
            which that process counts as hung.
        slow: share of the step by which a process must be behind the others in each of three steps to count as slow;
            0: slow processes are not looked for.
    """

    away: float = 60.0
    longest: float = 3600.0
    least: int = 1
    spares: int = 0
    exclude: str = ""
    gather: float = 120.0
    hung_after: float = 5.0
    slow: float = SHARE

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"elastic.{name} = {getattr(self, name)}; give {least} or more.")

    @property
    def excluded(self) -> tuple[str, ...]:
        """Words of ``exclude``."""
        return tuple(word.strip() for word in self.exclude.split(",") if word.strip())


class Membership:
    """Slots that are in and out of an elastic run. Times are those of one clock, in seconds.

    Args:
        slots: number of slots, with those that are held.
        policy: how long a slot stays out, and how many are held.

    Attributes:
        wanted: number of processes of the whole run.

    Raises:
        ValueError: all slots would be held.
    """

    def __init__(self, slots: int, policy: ElasticPolicy):
        if policy.spares >= slots:
            raise ValueError(f"elastic.spares = {policy.spares} of {slots} slots; leave 1 or more for the processes.")
        self.slots, self.wanted, self._policy = slots, slots - policy.spares, policy
        self._failures = [0] * slots
        self._until = [0.0] * slots

    def exclude(self, slot: int, now: float) -> float:
        """Puts a slot out after a failure; returns for how many seconds."""
        self._failures[slot] += 1
        out = min(self._policy.longest, self._policy.away * 2.0 ** (self._failures[slot] - 1))
        self._until[slot] = now + out
        return out

    def present(self, now: float) -> tuple[int, ...]:
        """Slots that are in, ascending."""
        return tuple(slot for slot in range(self.slots) if self._until[slot] <= now)

    def choose(self, present: Collection[int], before: Collection[int]) -> tuple[int, ...]:
        """Slots of the next generation, ascending: those of the one before first, then the lowest."""
        order = sorted(present, key=lambda slot: (slot not in before, slot))
        return tuple(sorted(order[: self.wanted]))
