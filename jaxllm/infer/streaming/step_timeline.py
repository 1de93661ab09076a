"""Step timeline: predicts how long a step with streamed weights takes, layer by layer, as the layer window works.

A unit computes when the one before has ended and its weights are there; the weights of a streamed unit are read when
the unit ``window`` streamed ones before it has computed and a loader is free. Reads from one tier share its rate. Where
batches take turns in each unit, a thread of its own reads the parts of their KV cache.
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
        late: units whose weights were not there when the unit before them had computed half, its router among that.
    """

    seconds: float
    stalled: float
    late: int = 0


@dataclass(frozen=True)
class BatchesByTurns:
    """Batches that compute one after the other in each unit.

    Attributes:
        batches: number of them.
        parts: tier of the KV cache of each batch in each unit, in the order in which they compute.
        part_bytes: bytes of each.
        stream_bytes: bytes of a batch's residual stream that are brought to the device before it computes.
        window: parts on the device at a time, besides those that stay there.
    """

    batches: int
    parts: tuple[Tier, ...]
    part_bytes: int
    stream_bytes: int
    window: int


@dataclass
class _Read:
    """Read of a unit that a loader is at: its tier, bytes that are left, and whether they are yet to leave the disk."""

    tier: Tier
    left: float
    copied: float
    number: int = 0

    @property
    def done(self) -> bool:
        """Whether it is on the device."""
        return self.left <= 0 and self.copied <= 0


@dataclass
class _Timeline:
    """Progress of a step: the reads that wait or run, and the time."""

    rates: TierRates
    tokens: int
    loaders: int
    reads: list[_Read] = field(default_factory=list)
    parts: list[_Read] = field(default_factory=list)
    now: float = 0.0

    def advance(self, computing: float) -> float:
        """Goes on to the next event; returns the seconds of computing that are left of ``computing`` (0: none)."""
        running = [*self.reads[: self.loaders], *self.parts[:1]]
        on_disk = [read for read in running if read.left > 0]
        copying = [read for read in running if read.left <= 0]
        rates = self.rates
        per_read, speed = 0.0, 1.0
        if on_disk:
            per_read = rates.disk_rate(len(on_disk)) / len(on_disk)
            per_read *= rates.disk_share(self.tokens, len(on_disk)) if computing else 1.0
            speed = 1 / rates.slowdown(self.tokens, len(on_disk))
        per_copy = rates.host / max(1, len(copying))
        times = [read.left / per_read for read in on_disk] + [read.copied / per_copy for read in copying]
        times += [computing / speed] if computing else []
        step = min(times)
        for read in on_disk:
            read.left = 0.0 if read.left / per_read <= step else read.left - step * per_read
        for read in copying:
            read.copied = 0.0 if read.copied / per_copy <= step else read.copied - step * per_copy
        self.reads, self.parts = ([read for read in some if not read.done] for some in (self.reads, self.parts))
        self.now += step
        return 0.0 if computing / speed <= step else computing - step * speed


def step_time(
    tiers: Sequence[Tier],
    unit_bytes: Sequence[int],
    rates: TierRates,
    tokens: int,
    window: int,
    loaders: int,
    turns: BatchesByTurns | None = None,
) -> StreamedStepTime:
    """Time of a step in the midst of many like it.

    Args:
        tiers: tier of each unit.
        unit_bytes: its bytes.
        rates: see ``TierRates``.
        tokens: tokens of the step, of each batch.
        window, loaders: see ``WeightPlacement``.
        turns: batches that take turns; None: there is one, whose KV cache is on the device.
    """
    total = sum(unit_bytes)
    batches = 1 if turns is None else turns.batches
    brought = 0.0 if turns is None else turns.stream_bytes / rates.host
    computes = [rates.layers(tokens) * size / total + brought for size in unit_bytes]
    streamed = [place for place, tier in enumerate(tiers) if tier != "device"]
    away = [] if turns is None else [place for place, tier in enumerate(turns.parts) if tier != "device"]
    window = min(window, len(streamed))
    line = _Timeline(rates, tokens, loaders)
    started, parts_started = 0, 0

    def read_of(tier: Tier, size: float, number: int) -> _Read:
        return _Read(tier, size if tier == "disk" else 0.0, size, number)

    def begin_read() -> None:
        nonlocal started
        place = streamed[started % len(streamed)]
        line.reads.append(read_of(tiers[place], float(unit_bytes[place]), started))
        started += 1

    def begin_part() -> None:
        nonlocal parts_started
        if turns is not None and parts_started < len(away):  # none are read ahead of the next step
            tier = turns.parts[away[parts_started]]
            line.parts.append(read_of(tier, float(turns.part_bytes), parts_started))
            parts_started += 1

    def compute(seconds: float) -> None:
        while seconds > 0:
            seconds = line.advance(seconds)

    for _ in range(window):
        begin_read()
    used, found = 0, StreamedStepTime(0.0, 0.0)
    for _ in range(3):  # the first steps begin with an empty window
        begin, stalled, late, parts_used, parts_started = line.now, 0.0, 0, 0, 0
        for _ in range(0 if turns is None else turns.window):
            begin_part()
        for place, computing in enumerate(computes):
            if tiers[place] != "device":
                before = line.now
                while any(read.number <= used for read in line.reads):
                    line.advance(0.0)
                stalled += line.now - before
            for batch in range(batches):
                moves = turns is not None and turns.parts[place * batches + batch] != "device"
                before = line.now
                while moves and any(read.number <= parts_used for read in line.parts):
                    line.advance(0.0)
                stalled += line.now - before
                compute(computing / 2)
                if batch == 0 and place + 1 < len(tiers) and tiers[place + 1] != "device":
                    number = used + (tiers[place] != "device")
                    late += started <= number or any(read.number <= number for read in line.reads)
                compute(computing / 2)
                if moves:
                    parts_used += 1
                    begin_part()
            if tiers[place] != "device":
                used += 1
                begin_read()
        compute(batches * rates.ends(tokens))
        found = StreamedStepTime(line.now - begin, stalled, late)
    assert math.isfinite(found.seconds)
    return found
