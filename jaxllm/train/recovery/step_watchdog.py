"""Watchdog of the training loop: names a step that does not come back, instead of a run that is silent for ever.

Devices that wait for each other raise no error. A thread measures how long the loop has waited for its current step,
and says so when that is too long; it says it again after twice, four times, ... that time. It does not end the run,
because a slow step and a hanging one look the same; lost processes are ended by ``jaxllm.parallel.heartbeat``.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class StepWatchdog:
    """Watchdog thread for the time of a ``with`` block.

    Args:
        seconds: the loop may wait so long for one step; 0: no watchdog.
        report: receives the message, in the watchdog's thread.
    """

    def __init__(self, seconds: float, report: Callable[[str], None] = _to_stderr):
        self._seconds = seconds
        self._report = report
        self._waiting: tuple[int, float] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="step-watchdog", daemon=True)

    def __enter__(self) -> StepWatchdog:
        if self._seconds:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._seconds:
            self._thread.join()

    @contextlib.contextmanager
    def waiting_for(self, step: int) -> Iterator[None]:
        """Context manager around a call that returns when the devices have taken or finished ``step``."""
        self._waiting = step, time.monotonic()
        try:
            yield
        finally:
            self._waiting = None

    def _watch(self) -> None:
        reported: tuple[int, float] | None = None
        limit = self._seconds
        while not self._ended.wait(self._seconds / 4):
            waiting = self._waiting
            if waiting is None or waiting != reported:
                limit = self._seconds
            if waiting is None or (spent := time.monotonic() - waiting[1]) < limit:
                continue
            self._report(
                f"warning: step {waiting[0]} has not come back for {spent:.0f} s. Its devices may wait for each other, "
                "for example because a process is lost or runs another program; then end the run, and it resumes from "
                "its newest checkpoint. If steps are that slow, raise observe.stalled_after."
            )
            reported, limit = waiting, 2 * limit
