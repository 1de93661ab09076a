"""When a run did what: ``events.jsonl``, a line at the end of every stretch of time.

An event closes the stretch since the event before it, so the stretches of a start lie end to end and nothing is counted
twice or left out. The kinds, in the order of a start:

    started      everything is made ready; ``began`` is when the call of ``train`` was, and facts of the run follow
    initialised  fresh parameters are there          restored   those of a checkpoint are, after ``step`` steps
    compiled     the step is
    steps        steps ``first`` to ``last``; ``waited`` seconds of it for data, which no work of the device hid
    spike        of step ``step`` was seen, and what was done: ``action``; of a rollback ``from`` which step it went on,
                 from step ``to`` without ``batches``
    saved        a checkpoint of ``step``, or what of it the steps have to wait for
    evaluated    on held-out text
    finished, stopped, failed   the last of a start; a killed one has none

Only process 0 writes. Times are seconds since 1970 by its clock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.files import read_rows

CATEGORY_OF_EVENT = {
    "started": "starting",
    "initialised": "initialising",
    "restored": "restoring",
    "spike": "restoring",
    "compiled": "compiling",
    "steps": "steps",
    "saved": "saving",
    "evaluated": "evaluating",
    "finished": "ending",
    "stopped": "ending",
    "failed": "ending",
}
"""What the stretch before an event was spent on."""

FLUSH_SECONDS = 5.0
"""Seconds of steps that one event holds; a killed run loses the account of as many."""


class EventLog:
    """Appends events; a line is written at once.

    Args:
        file: events.jsonl; None writes nothing.
        began: when the start began.
    """

    def __init__(self, file: Path | None, began: float):
        self._file = file
        self._steps: tuple[int, int, float] | None = None
        self._last = began
        self._began = began
        self._held: list[dict[str, Any]] = []

    def started(self, **facts: Any) -> None:
        """The first event of a start; written with the second, so that a start that is refused leaves no trace."""
        self._last = time.time()
        self._held = [{"time": round(self._last, 4), "event": "started", "began": round(self._began, 4), **facts}]

    def write(self, event: str, **facts: Any) -> None:
        """An event; steps that are not written yet come first."""
        self.flush()
        self._write(event, facts)

    def step(self, number: int, waited: float) -> None:
        """Step ``number`` is done; several of them make one event."""
        first, _, before = self._steps or (number, number, 0.0)
        self._steps = first, number, before + waited
        if time.time() - self._last >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Writes the event of steps that are done."""
        if self._steps is not None:
            first, last, waited = self._steps
            self._steps = None
            self._write("steps", {"first": first, "last": last, "waited": round(waited, 4)})

    def _write(self, event: str, facts: dict[str, Any]) -> None:
        self._last = time.time()
        rows = [*self._held, {"time": round(self._last, 4), "event": event, **facts}]
        self._held = []
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as out:
                out.write("".join(json.dumps(row) + "\n" for row in rows))


@dataclass(frozen=True)
class Goodput:
    """Where the time of a run went, from its first start to its last event.

    Attributes:
        total: seconds.
        steps: seconds of steps that count: each step once, at the last start that did it, without waiting for data.
        lost: seconds of steps that were done again after a restart, or given up at a spike.
        waiting: seconds of counted steps that waited for data.
        down: seconds between the last event of a start and the beginning of the next.
        other: seconds by what they were spent on: starting, initialising, restoring, compiling, saving, evaluating,
            ending.
        starts: how often the run was started.
        restarts: (last step seen before, step it went on after) of every start but the first.
    """

    total: float
    steps: float
    lost: float
    waiting: float
    down: float
    other: dict[str, float]
    starts: int
    restarts: tuple[tuple[int, int], ...]

    @property
    def fraction(self) -> float:
        """``steps / total``: the share of time that brought the run forward."""
        return self.steps / self.total if self.total else 0.0

    def parts(self) -> list[tuple[str, float]]:
        """What ``total`` is the sum of."""
        named = [("steps", self.steps), ("waiting for data", self.waiting), ("steps done again", self.lost)]
        return [*named, *self.other.items(), ("down", self.down)]


def read_events(directory: Path) -> list[dict[str, Any]]:
    """Of a run's directory; none where it has no log of them."""
    return read_rows(directory / "events.jsonl")


def goodput(events: Iterable[dict[str, Any]]) -> Goodput | None:
    """The account of a log; None of an empty one."""
    events = list(events)
    if not events or events[0]["event"] != "started":
        return None
    other: dict[str, float] = dict.fromkeys(
        ("starting", "initialising", "restoring", "compiling", "saving", "evaluating", "ending"), 0.0
    )
    down, starts, last_step = 0.0, 0, 0
    restarts: list[tuple[int, int]] = []
    counted: list[tuple[int, int, float, float]] = []
    lost, before = 0.0, events[0]["began"]
    for event in events:
        kind, now = event["event"], event["time"]
        if kind == "started":
            starts += 1
            # Clocks of two machines, or one set back: no stretch is shorter than nothing.
            down += max(0.0, event["began"] - before)
            before = event["began"]
        if kind in ("initialised", "restored") and starts > 1:
            at = event.get("step", 0)
            restarts.append((last_step, at))
            counted, again = _split(counted, at)
            lost += again
            last_step = at
        spent = max(0.0, now - before)
        if kind == "steps":
            counted.append((event["first"], event["last"], spent, min(spent, event["waited"])))
            last_step = event["last"]
        elif kind in CATEGORY_OF_EVENT:
            if "from" in event:  # a spike that the run has gone back from
                counted, again = _split(counted, event["from"])
                lost, last_step = lost + again, event["from"]
            other[CATEGORY_OF_EVENT[kind]] += spent
        before = now
        if kind == "finished":
            break  # what is looked at or evaluated later is no part of the run
    waiting = sum(waited for *_, waited in counted)
    steps = sum(spent for _, _, spent, _ in counted) - waiting
    total = steps + waiting + lost + down + sum(other.values())
    return Goodput(total, steps, lost, waiting, down, other, starts, tuple(restarts))


def _split(counted: list[tuple[int, int, float, float]], at: int) -> tuple[list[tuple[int, int, float, float]], float]:
    """The stretches up to step ``at``, and the seconds of those after it; one that spans it is shared by its steps."""
    kept, lost = [], 0.0
    for first, last, spent, waited in counted:
        share = min(1.0, max(0.0, (at - first + 1) / (last - first + 1)))
        lost += spent * (1 - share)
        if share:
            kept.append((first, min(last, at), spent * share, waited * share))
    return kept, lost
