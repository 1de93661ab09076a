"""Timeline of a compiled program: its schedule played on one queue of kernels and one queue per network, in seconds.

    rates = Rates(flops=918e12, bandwidth=1.64e12, clock=1.75e9, send=seconds_of_an_exchange)
    timeline(program, rates).seconds

A kernel takes the TPU compiler's cycles; where there are none (GPU, CPU) its roofline time, a lower bound: the longer
of its matmuls at the peak and its bytes at the memory bandwidth. A collective starts once its network is free, and
the schedule waits for the rest of it where it ends: that rest is exposed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxllm.compiler.program_walker import Done, Exchange, Fetch, KernelOp, Loop, Program, Start, Step


@dataclass(frozen=True)
class Rates:
    """Rates of a device and its links.

    Attributes:
        flops: FLOP/s of matmuls.
        bandwidth: bytes/s of device memory.
        send: seconds of one collective, by its kind, bytes, group size, axes and islands.
        clock: cycles/s for the TPU compiler's estimates; None if they are not used.
        host: bytes/s between the device and its host.
        launch: seconds to start a kernel that has no estimate.
    """

    flops: float
    bandwidth: float
    send: Callable[[Exchange], float]
    clock: float | None = None
    host: float = 32e9
    launch: float = 0.0

    def seconds(self, op: KernelOp) -> float:
        """Seconds of one kernel."""
        if op.cycles is not None and self.clock is not None:
            return op.cycles / self.clock
        return max(op.flops / self.flops, op.bytes / self.bandwidth, self.launch)


@dataclass(frozen=True)
class Span:
    """Span of a timeline.

    Attributes:
        lane: "compute", "memory" (prefetches), "host", or the network of a collective (``Exchange.where``).
        start: start in seconds.
        end: end in seconds.
        name: name of the instruction.
        label: jax's ``op_name``.
        waited: seconds of it for which the schedule stood still.
        turns: trip count of the loop that it stands for; the spans inside are those of the first iteration.
    """

    lane: str
    start: float
    end: float
    name: str
    label: str
    waited: float = 0.0
    turns: int = 1


@dataclass(frozen=True)
class Timeline:
    """Predicted run of a program.

    Attributes:
        seconds: seconds of the run.
        compute: seconds of kernels.
        exposed: seconds of waiting for collectives, by ``Exchange.where``.
        hidden: seconds of collectives behind kernels, by ``Exchange.where``.
        other: seconds of waiting for prefetches and for the host.
        by_estimate: part of ``compute`` that is the compiler's own estimates; the rest is by roofline.
        spans: spans by their start; loops show their first iteration, see ``loops``.
        loops: spans of loops.
    """

    seconds: float
    compute: float
    exposed: dict[str, float]
    hidden: dict[str, float]
    other: float
    by_estimate: float
    spans: tuple[Span, ...] = ()
    loops: tuple[Span, ...] = ()

    def __str__(self) -> str:
        share = [("computing", self.compute)]
        share += [(f"waiting for {where}", seconds) for where, seconds in sorted(self.exposed.items())]
        share += [("waiting for copies", self.other), ("in all", self.seconds)]
        return "\n".join(f"  {label:<33}{1e3 * seconds:12.3f} ms" for label, seconds in share if seconds)


def timeline(program: Program, rates: Rates) -> Timeline:
    """Plays the schedule of a program."""
    player = _Player(rates)
    end = player.play(program.steps, 0.0, 1)
    sums = player.sums
    exposed = {lane[8:]: seconds for lane, seconds in sums.items() if lane.startswith("exposed ")}
    busy = {lane[5:]: seconds for lane, seconds in sums.items() if lane.startswith("busy ")}
    return Timeline(
        seconds=end,
        compute=sums["compute"],
        exposed=exposed,
        hidden={where: max(0.0, seconds - exposed.get(where, 0.0)) for where, seconds in busy.items()},
        other=sums["other"],
        by_estimate=sums["estimate"],
        spans=tuple(sorted(player.spans, key=lambda span: (span.start, span.end))),
        loops=tuple(player.loops),
    )


@dataclass
class _Player:
    rates: Rates
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    free: dict[str, float] = field(default_factory=dict)  # when each network has sent all it was given
    spans: list[Span] = field(default_factory=list)
    loops: list[Span] = field(default_factory=list)

    def play(self, steps: tuple[Step, ...], now: float, times: int) -> float:
        """Plays steps that run ``times`` times in all from ``now`` on; returns when one run of them ends."""
        running: dict[str, list[Span]] = {}
        for step in steps:
            if isinstance(step, KernelOp):
                seconds = self.rates.seconds(step)
                self.sums["compute"] += seconds * times
                self.sums["estimate"] += seconds * times * (step.cycles is not None and self.rates.clock is not None)
                if seconds > 0:
                    self.spans.append(Span("compute", now, now + seconds, step.name, step.label))
                now += seconds
            elif isinstance(step, Loop):
                now = self._loop(step, now, times)
            elif isinstance(step, Start):
                running[step.name] = [self._start(step.name, what, now, times) for what in step.what]
            else:
                now = self._done(step, running, now, times)
        for name in list(running):  # a loop's next turn would wait for it
            now = self._done(Done(name), running, now, times)
        return now

    def _loop(self, loop: Loop, now: float, times: int) -> float:
        if loop.turns == 0:
            return now
        first = len(self.spans)
        turn = self.play(loop.steps, now, times * loop.turns) - now
        if len(self.spans) > first:
            self.loops.append(Span("loop", now, now + turn * loop.turns, loop.name, "", turns=loop.turns))
        end = now + turn * loop.turns
        self.free = {lane: max(at, min(at + end - now - turn, end)) for lane, at in self.free.items()}
        return end

    def _start(self, name: str, what: Exchange | Fetch, now: float, times: int) -> Span:
        if isinstance(what, Fetch):
            lane, label = ("host", "") if what.host else ("memory", "")
            seconds = what.bytes / (self.rates.host if what.host else self.rates.bandwidth)
        else:
            lane, label, seconds = what.where, what.label, self.rates.send(what)
            self.sums[f"busy {lane}"] += seconds * times
        start = max(now, self.free.get(lane, 0.0))
        self.free[lane] = start + seconds
        return Span(lane, start, start + seconds, name, label)

    def _done(self, step: Done, running: dict[str, list[Span]], now: float, times: int) -> float:
        for span in sorted(running.pop(step.name, []), key=lambda span: span.end):
            wait = max(0.0, span.end - now)
            lane = "other" if span.lane in ("memory", "host") else f"exposed {span.lane}"
            if wait > 0:
                self.sums[lane] += wait * times
            self.spans.append(Span(span.lane, span.start, span.end, span.name, span.label, wait))
            now += wait
        return now


def ring_seconds(exchange: Exchange, bandwidth: float, latency: float = 0.0) -> float:
    """Seconds of a collective on a ring or a switch, at the rate at which one device sends and receives.

    With n devices and B bytes in all: an all-gather and a reduce-scatter send (n - 1)/n B each; an all-reduce, and a
    summed collective, twice that; an all-to-all of B bytes (n - 1)/n B; a permute B.

    Args:
        bandwidth: bytes/s out of one device over all links that the collective uses.
        latency: seconds of one step from device to device.
    """
    n = exchange.group_size
    steps, share = n - 1, (n - 1) / n
    if exchange.kind in ("collective-permute", "send", "collective-broadcast"):
        steps, share = 1, 1.0
    if exchange.kind == "all-reduce" or exchange.summed:
        steps, share = 2 * steps, 2 * share
    return steps * latency + share * exchange.bytes / bandwidth
