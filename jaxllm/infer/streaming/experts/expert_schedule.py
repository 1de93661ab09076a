"""Expert schedule: which of a layer's experts the host's processor computes, and which the device, by their costs.

For an expert that is in no slot either its weights are copied to the device, or its tokens are sent to the host's
processor, whose memory has the weights (Fiddler, arXiv:2402.07033). The link, the device and the host's processor work
at the same time, so the layer ends when the last of them does (HybriMoE, arXiv:2504.05897).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

AbsentExperts = Literal["load", "host", "by_cost", "schedule"]


@dataclass(frozen=True)
class ExpertCosts:
    """Seconds of one expert of a mixture layer.

    Attributes:
        load: the copy of its weights to the device.
        device: its computation on the device, which reads its weights: the same for any number of rows.
        rows: numbers of rows that the host's processor has programs for, ascending; it computes as many as the next of
            them.
        host: the computation of so many rows on the host's processor, with the copies of the rows.

    Raises:
        ValueError: a time is below 0, or the rows are not ascending, or not as many as their times.
    """

    load: float
    device: float
    rows: tuple[int, ...]
    host: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.host) or list(self.rows) != sorted(set(self.rows)):
            raise ValueError(f"costs of experts: rows = {self.rows}, host = {self.host}; give as many, rows ascending.")
        if min(self.load, self.device, *self.host) < 0:
            raise ValueError(f"costs of experts: {self}; give seconds of 0 or more.")

    def on_host(self, rows: int) -> float:
        """Seconds of an expert with so many rows on the host's processor; more than the last of ``rows``: in turns."""
        turns, rest = divmod(rows, self.rows[-1])
        return turns * self.host[-1] + (self.host[bisect.bisect_left(self.rows, rest)] if rest else 0.0)

    def layer(self, here: int, loads: int, on_host: Collection[int]) -> float:
        """Seconds of a layer: those of the device with the link, or of the host's processor if it needs longer.

        The device computes the experts that are there while the first loads are under way, then each as it arrives.

        Args:
            here: experts that are in slots, and compute there.
            loads: experts that are copied to slots, and compute there.
            on_host: rows of each expert that computes on the host's processor.
        """
        device = (here + loads) * self.device
        if loads:
            device = max(device, self.load + loads * self.device, loads * self.load + self.device)
        return max(device, sum(map(self.on_host, on_host)))


def never(rows: Mapping[int, int], here: Collection[int], costs: ExpertCosts) -> set[int]:
    """No expert: the weights of all absent ones are copied."""
    return set()


def always(rows: Mapping[int, int], here: Collection[int], costs: ExpertCosts) -> set[int]:
    """All absent experts: none is copied."""
    return {expert for expert in rows if expert not in here}


def by_cost(rows: Mapping[int, int], here: Collection[int], costs: ExpertCosts) -> set[int]:
    """Absent experts that the host's processor computes sooner than they are copied and computed (Fiddler).

    Each is weighed alone, so that the sum of all experts' seconds is the least.
    """
    return {e for e, n in rows.items() if e not in here and costs.on_host(n) < costs.load + costs.device}


def schedule(rows: Mapping[int, int], here: Collection[int], costs: ExpertCosts) -> set[int]:
    """Experts with which ``ExpertCosts.layer`` is the least, so that it is never above that of another choice.

    Experts in slots may be among them, where the device is late. The device's and the link's seconds depend on numbers
    of experts alone. So of each number that computes on the host's processor those with the fewest rows are best, and
    all pairs of numbers are tried.
    """
    order = sorted(rows, key=lambda e: (rows[e], e))
    present, absent = [e for e in order if e in here], [e for e in order if e not in here]

    def seconds(of_present: int, of_absent: int) -> float:
        chosen = [*present[:of_present], *absent[:of_absent]]
        return costs.layer(len(present) - of_present, len(absent) - of_absent, [rows[e] for e in chosen])

    ways = [(p, a) for p in range(len(present) + 1) for a in range(len(absent) + 1)]
    best = min(ways, key=lambda way: (seconds(*way), sum(way)))
    return {*present[: best[0]], *absent[: best[1]]}


SCHEDULES: dict[str, Callable[[Mapping[int, int], Collection[int], ExpertCosts], set[int]]] = {
    "load": never,
    "host": always,
    "by_cost": by_cost,
    "schedule": schedule,
}
"""Choices of the experts that the host's processor computes: of rows by wanted expert, experts in slots, and costs."""
