"""Membership: which slots of an elastic run may have a process; a slot that failed stays out for a time."""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.parallel.elastic.slow_ranks import SHARE


@dataclass(frozen=True)
class ElasticPolicy:
    """Policy of an elastic supervisor: what counts as a failure, and how long a failed slot stays out.

    Attributes:
        away: seconds that a slot stays out after its process was lost, hung or slow; each further failure doubles it.
        longest: longest such time, in seconds.
        least: processes with which the run goes on at least; with fewer it waits until slots return.
        hung_after: seconds without a heartbeat, or in which all processes wait for one that is not in its step, after
            which that process counts as hung.
        slow: share of the step by which a process must be behind the others in each of three steps to count as slow;
            0: slow processes are not looked for.
    """

    away: float = 60.0
    longest: float = 3600.0
    least: int = 1
    hung_after: float = 5.0
    slow: float = SHARE

    def __post_init__(self) -> None:
        for name, least in (("away", 0), ("longest", 0), ("least", 1), ("hung_after", 0.5), ("slow", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"elastic.{name} = {getattr(self, name)}; give {least} or more.")


class Membership:
    """Slots that are in and out of an elastic run. Times are those of one clock, in seconds.

    Args:
        slots: number of slots.
        policy: how long a slot stays out.
    """

    def __init__(self, slots: int, policy: ElasticPolicy):
        self.slots, self._policy = slots, policy
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

    def next_return(self) -> float:
        """Time at which the last of the slots that are out returns, at the earliest."""
        return max(self._until)
