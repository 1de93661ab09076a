"""I/O timeline of a step: when its programs computed, and when its files were read and written.

The share of reading and writing that computing hides is what a tier on disk costs least time by. A program begins when
it is dispatched and the one before has ended; it ends when its result is there.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from jaxllm import svg
from jaxllm.train.disk.disk_tier import DiskTier
from jaxllm.train.disk.hidden_share import DiskClock

LANES = ("compute", "read", "write")


class IoSpan(NamedTuple):
    """Span of one lane.

    Attributes:
        lane: of ``LANES``.
        begin, end: seconds, of ``time.monotonic``.
        bytes: that were read or written.
    """

    lane: str
    begin: float
    end: float
    bytes: int = 0


class IoTimeline(DiskClock):
    """Clock of disk tiers that keeps each read and write, and programs beside them.

    Attributes:
        spans: so far, in the order of their ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[IoSpan] = []
        self._watcher = ThreadPoolExecutor(1, "io-timeline")
        self._watched: list[Future[None]] = []
        self._ended, self._adding = 0.0, threading.Lock()

    @contextlib.contextmanager
    def moving(self, what: str, size: int) -> Iterator[None]:
        """See ``DiskClock``."""
        begin = time.monotonic()
        with super().moving(what, size):
            yield
        self._add(IoSpan(what, begin, time.monotonic(), size))

    def dispatched(self, result: Any, begin: float) -> None:
        """A program was dispatched.

        Args:
            result: of it, that is not donated.
            begin: of the call that dispatched it, by ``time.monotonic``; small programs may be done when it returns.
        """
        self._watched.append(self._watcher.submit(self._watch, result, begin))

    def finish(self) -> None:
        """Waits for all programs.

        Raises:
            Exception: that of the first program that failed, or whose result was donated: its span is not known.
        """
        self._watcher.shutdown()
        for one in self._watched:
            one.result()

    def hidden(self) -> float:
        """Share of the seconds with a read or a write in which a program computed; 1 without reads and writes."""
        moved = merged([(one.begin, one.end) for one in self.spans if one.lane != "compute"])
        computed = merged([(one.begin, one.end) for one in self.spans if one.lane == "compute"])
        both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in moved for b in computed)
        seconds = sum(end - begin for begin, end in moved)
        return both / seconds if seconds else 1.0

    def page(self, title: str) -> str:
        """HTML page that draws the spans."""
        rows = []
        for color, lane in enumerate(LANES):
            own = [one for one in self.spans if one.lane == lane]
            blocks = [
                (
                    one.begin,
                    one.end,
                    color,
                    f"{lane}: {1e3 * (one.end - one.begin):.1f} ms, {one.bytes / 2**20:.1f} MiB",
                )
                for one in own
            ]
            rows.append((lane, blocks))
        said = f"<p>{self.hidden():.0%} of the seconds in which files are read or written, programs compute.</p>"
        return svg.page(title, said + svg.lanes(rows, title=title, unit="seconds"))

    def _watch(self, result: Any, begin: float) -> None:
        jax.block_until_ready(result)
        begin, self._ended = max(begin, self._ended), time.monotonic()
        self._add(IoSpan("compute", begin, self._ended))

    def _add(self, span: IoSpan) -> None:
        with self._adding:
            self.spans.append(span)


def merged(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans (begin, end) without overlaps, in order."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def timed(tiers: Sequence[DiskTier]) -> IoTimeline:
    """A timeline that is the clock of some tiers from now on."""
    line = IoTimeline()
    for tier in tiers:
        tier.clock = line
    return line
