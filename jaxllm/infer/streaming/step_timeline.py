"""Step timeline: predicts how long a step with streamed weights takes, layer by layer, as the layer window works.

A unit computes when the one before has ended and its weights are there; the weights of a streamed unit are read when
the unit ``window`` streamed ones before it has computed and a loader is free. Reads from one tier share its rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from jaxllm.infer.streaming.tier_rates import TierRates

Tier = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class StreamedStepTime:
    """Predicted time of a step.

    Attributes:
        seconds: the step.
        stalled: of them, waiting for weights.
    """

    seconds: float
    stalled: float


@dataclass
class _Read:
    """Read of a unit that a loader is at: its tier, bytes that are left, and whether they are yet to leave the disk."""

    tier: Tier
    left: float
    copied: float
    number: int = 0


@dataclass
class _Timeline:
    """Progress of a step: the reads that wait or run, and the time."""

    rates: TierRates
    loaders: int
    reads: list[_Read] = field(default_factory=list)
    now: float = 0.0

    def advance(self, computing: float) -> float:
        """Goes on to the next event; returns the seconds of computing that are left of ``computing`` (0: none)."""
        on_disk = [read for read in self.reads[: self.loaders] if read.left > 0]
        copying = [read for read in self.reads[: self.loaders] if read.left <= 0]
        rates = self.rates
        per_read = min(rates.disk_thread, rates.disk / len(on_disk)) if on_disk else 0.0
        per_read *= rates.disk_share if computing else 1.0
        speed = 1 / rates.slowdown if on_disk else 1.0
        per_copy = rates.host / max(1, len(copying))
        times = [read.left / per_read for read in on_disk] + [read.copied / per_copy for read in copying]
        times += [computing / speed] if computing else []
        step = min(times)
        for read in on_disk:
            read.left = 0.0 if read.left / per_read <= step else read.left - step * per_read
        for read in copying:
            read.copied = 0.0 if read.copied / per_copy <= step else read.copied - step * per_copy
        self.reads = [read for read in self.reads if read.left > 0 or read.copied > 0]
        self.now += step
        return 0.0 if computing / speed <= step else computing - step * speed


def step_time(
    tiers: Sequence[Tier], unit_bytes: Sequence[int], rates: TierRates, tokens: int, window: int, loaders: int
) -> StreamedStepTime:
    """Time of a step in the midst of many like it.

    Args:
        tiers: tier of each unit.
        unit_bytes: its bytes.
        rates: see ``TierRates``.
        tokens: tokens of the step.
        window, loaders: see ``WeightPlacement``.
    """
    total = sum(unit_bytes)
    computes = [rates.layers(tokens) * size / total for size in unit_bytes]
    streamed = [place for place, tier in enumerate(tiers) if tier != "device"]
    window = min(window, len(streamed))
    line = _Timeline(rates, loaders)
    started = 0

    def begin_read() -> None:
        nonlocal started
        place = streamed[started % len(streamed)]
        size = float(unit_bytes[place])
        tier = tiers[place]
        line.reads.append(_Read(tier, size if tier == "disk" else 0.0, size, started))
        started += 1

    for _ in range(window):
        begin_read()
    used, found = 0, StreamedStepTime(0.0, 0.0)
    for _ in range(3):  # the first steps begin with an empty window
        begin, stalled = line.now, 0.0
        for place, computing in enumerate(computes):
            if tiers[place] != "device":
                before = line.now
                while any(read.number <= used for read in line.reads):
                    line.advance(0.0)
                stalled += line.now - before
            left = computing
            while left > 0:
                left = line.advance(left)
            if tiers[place] != "device":
                used += 1
                begin_read()
        left = rates.ends(tokens)
        while left > 0:
            left = line.advance(left)
        found = StreamedStepTime(line.now - begin, stalled)
    assert math.isfinite(found.seconds)
    return found
