"""Adaptive share of saved inputs in files: the most layers whose input and output the passes hide (SSDTrain).

SSDTrain (arXiv:2408.10013) offloads as many activations as are moved while the device computes. The second step of a
run, because programs are slow when they run first, measures how long a layer computes in each pass, and how fast the
disk reads and writes meanwhile. The model plays the copies out beside the forward pass, and those back beside each
backward pass: an input has to be written when its place in the window is needed again, and by the end of the forward
pass; it has to be there when its layer begins.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable


class DiskClock:
    """Bytes that are read and written, and the seconds during which at least one read, or one write, is in progress.

    Attributes:
        bytes, seconds: so far, by "read" and "write".
    """

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.seconds: dict[str, float] = {"read": 0.0, "write": 0.0}
        self._active: Counter[str] = Counter()
        self._since: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def moving(self, what: str, size: int) -> Iterator[None]:
        """Counts a read or a write of so many bytes; called in threads of the pools."""
        with self._lock:
            if not self._active[what]:
                self._since[what] = time.monotonic()
            self._active[what] += 1
        try:
            yield
        finally:
            with self._lock:
                self._active[what] -= 1
                self.bytes[what] += size
                if not self._active[what]:
                    self.seconds[what] += time.monotonic() - self._since[what]

    def rate(self, what: str) -> float:
        """Bytes per second while it reads, or writes; infinite before the first one."""
        seconds = self.seconds[what]
        return self.bytes[what] / seconds if seconds else math.inf


class PassRates(NamedTuple):
    """Pass through the layers, as a warm-up step measured it.

    Attributes:
        seconds: that its programs compute, without waiting for the disk.
        read: bytes of parameters and optimizer state that are read meanwhile.
    """

    seconds: float
    read: int


class InputTimes(NamedTuple):
    """Times of a step by which inputs of layers are placed. N inputs of so many layers and all micro-batches.

    Attributes:
        layers, micro_batches: of a step.
        window: inputs in files that are in the host's memory.
        forward: seconds that a layer computes in the forward pass, all its micro-batches.
        backward: the same in each backward pass.
        write: seconds to write an input.
        reads: seconds to read an input in each backward pass beside what else is read; infinite: nothing is left.
    """

    layers: int
    micro_batches: int
    window: int
    forward: float
    backward: tuple[float, ...]
    write: float
    reads: tuple[float, ...]

    @classmethod
    def of(
        cls,
        passes: Sequence[PassRates],
        clock: DiskClock,
        layers: int,
        micro_batches: int,
        window: int,
        size: int,
    ) -> InputTimes:
        """Times by what a warm-up step measured.

        Args:
            passes: the forward pass, then each backward pass.
            clock: reads and writes of all files.
            layers, micro_batches, window: as in the attributes.
            size: bytes of an input in its file.
        """
        forward, *backward = passes
        read, write = clock.rate("read"), clock.rate("write")
        left = [read - one.read / max(one.seconds, 1e-9) for one in backward]
        return cls(
            layers,
            micro_batches,
            window,
            forward.seconds / layers,
            tuple(one.seconds / layers for one in backward),
            size / write,
            tuple(size / rate if rate > 0 else math.inf for rate in left),
        )

    def hides(self, layers: int) -> bool:
        """Whether the passes hide the copies of the first so many layers' inputs."""
        all_there = layers * self.micro_batches <= self.window  # also when a second backward pass begins
        return self._hides_writes(layers) and all(
            self._hides_reads(layers, each, read, forwarded=self.window if number == 0 or all_there else 0)
            for number, (each, read) in enumerate(zip(self.backward, self.reads, strict=True))
        )

    def most_hidden(self) -> int:
        """The most layers whose inputs' copies are hidden: fewer layers copy less, and no copy of theirs is later."""
        few, many = 0, self.layers
        while few < many:
            middle = (few + many + 1) // 2
            few, many = (middle, many) if self.hides(middle) else (few, middle - 1)
        return few

    def _hides_writes(self, layers: int) -> bool:
        """Whether no input waits for a place in the window, and all are written at the end of the forward pass."""
        ends: list[float] = []
        for number in range(layers * self.micro_batches):
            now = number // self.micro_batches * self.forward
            if number >= self.window and ends[number - self.window] > now:
                return False
            ends.append(max(now, ends[-1] if ends else 0.0) + self.write)
        return not ends or ends[-1] <= self.layers * self.forward

    def _hides_reads(self, layers: int, each: float, read: float, forwarded: int) -> bool:
        """Whether no layer of a backward pass waits for its input.

        Args:
            layers: with inputs in files.
            each: seconds of a layer.
            read: seconds to read an input.
            forwarded: inputs that the window has at the beginning, the last ones.
        """
        count, micros = layers * self.micro_batches, self.micro_batches
        before = (self.layers - layers) * each  # the backward pass begins with layers without files
        used = [before + place * each / micros for place in range(count + 1)]  # inputs in the order of their use
        end = 0.0
        for place in range(min(forwarded, count), count):
            free = used[place - self.window + 1] if place >= self.window else 0.0
            end = max(end, free) + read
            if end > used[place]:
                return False
        return True

    def __str__(self) -> str:
        """Times of a layer, for the log."""
        layer, parts = self.micro_batches, [f"{1e3 * self.forward:.2f} ms forward"]
        parts += [f"{1e3 * one:.2f} backward" for one in self.backward]
        copies = [f"{1e3 * layer * self.write:.2f} ms to write"]
        copies += [f"{1e3 * layer * one:.2f} to read" for one in self.reads]
        return f"a layer computes {', '.join(parts)}; its input takes {', '.join(copies)}"


@runtime_checkable
class TimedTier(Protocol):
    """Tier whose reads and waits are counted; see ``DiskTier``."""

    moved: Counter[str]
    waited: float
    clock: DiskClock


class PassTimer:
    """Measures the passes of a warm-up step, and the reads and writes of its tiers.

    Args:
        tiers: all tiers of the step, for which it may wait.
        others: those of parameters and optimizer state.

    Attributes:
        passes: measured so far.
        clock: of all tiers.
    """

    def __init__(self, tiers: Sequence[TimedTier], others: Sequence[TimedTier]):
        self._tiers, self._others, self.clock = tiers, others, DiskClock()
        for tier in tiers:
            tier.clock = self.clock
        self.passes: list[PassRates] = []

    @contextlib.contextmanager
    def timing(self, done: Callable[[], object]) -> Iterator[None]:
        """Measures a pass.

        Args:
            done: function that returns when the programs that have been dispatched are done.
        """
        done()
        start, read = time.monotonic() - self._waited(), self._read()
        yield
        done()
        self.passes.append(PassRates(max(time.monotonic() - self._waited() - start, 1e-9), self._read() - read))

    def _waited(self) -> float:
        return sum(tier.waited for tier in self._tiers)

    def _read(self) -> int:
        return sum(tier.moved["read"] for tier in self._others)
