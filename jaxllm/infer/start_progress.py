"""Start progress of an engine: what it is doing before its first request, for people and programs that wait for it.

progress = StartProgress()
progress.listen(terminal_line("smollm2"))
llm = LLM("smollm2", progress=progress)
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal

Stage = Literal["loading", "compiling", "ready"]
Listener = Callable[[str, int, int], None]
"""Called with the stage and how much of it is done, of how much in all: tensors while loading, then programs."""
QUIET_SECONDS = 2.0
"""A start that takes no longer shows nothing on the terminal."""


class StartCancelled(RuntimeError):
    """The start of an engine was cancelled before the engine was ready."""


class StartProgress:
    """Progress of a start, thread-safe. It is called by whoever loads and compiles, and tells its listeners.

    Attributes:
        stage: "loading" the model's tensors; "compiling" the first programs, or loading them from the program cache;
            "ready" for requests, while the other programs are compiled.
        done, total: tensors while loading, then programs; a total of 0 is not known yet.
    """

    def __init__(self, *listeners: Listener) -> None:
        self.stage: str = "loading"
        self.done = self.total = 0
        self._listeners, self._lock, self._cancelled = list(listeners), threading.Lock(), False

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Notes how far the start is, and tells the listeners.

        Raises:
            StartCancelled: ``cancel`` was called, and the engine is not ready yet.
        """
        with self._lock:
            if self._cancelled and stage != "ready":
                raise StartCancelled("the start of the engine was cancelled.")
            self.stage, self.done, self.total = stage, done, total
            for listener in self._listeners:
                listener(stage, done, total)

    def listen(self, listener: Listener) -> None:
        """Adds a listener."""
        with self._lock:
            self._listeners.append(listener)

    def cancel(self) -> None:
        """Ends the start at its next tensor or program: ``StartCancelled`` is raised there."""
        self._cancelled = True

    @property
    def programs(self) -> tuple[int, int]:
        """Programs that are ready, and programs in all; (0, 0) until the model is loaded."""
        with self._lock:
            return (0, 0) if self.stage == "loading" else (self.done, self.total)


def terminal_line(what: str) -> Listener:
    """Listener that shows one progress line on the standard error, and removes it when the engine is ready.

    Args:
        what: name of the model.
    """
    began, shown = time.monotonic(), False

    def show(stage: str, done: int, total: int) -> None:
        nonlocal shown
        if stage == "ready":
            if shown:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            shown = False
            return
        if time.monotonic() - began < QUIET_SECONDS:
            return
        verb = "loading" if stage == "loading" else "compiling"
        unit = "" if stage == "loading" else " programs"
        counts = f": {done} of {total}{unit}" if total else ""
        print(f"\r\x1b[K{verb} {what}{counts}, {time.monotonic() - began:.0f} s", end="", file=sys.stderr, flush=True)
        shown = True

    return show


@contextlib.contextmanager
def shown_progress(what: str, progress: Listener | None) -> Iterator[Listener]:
    """Listener of a start: the given one, or else a progress line if the standard error is a terminal."""
    if progress is not None:
        yield progress
        return
    line = StartProgress(*([terminal_line(what)] if sys.stderr.isatty() else []))
    try:
        yield line
    finally:
        line("ready", line.done, line.total)
