"""Event log of a run, ``events.jsonl``, and the goodput that is computed from it.

Each event ends an interval of time that began at the event before it, so the intervals of a start are contiguous and
no time is counted twice or left out. The events, in the order of a start:

    started      the run is prepared; ``began`` is the time of the call of ``train``, and facts of the run follow
    initialised  fresh parameters are ready         restored   a checkpoint of step ``step`` is restored; from memory:
                 ``own_bytes`` of arrays from peer servers of the readers' own hosts, ``peer_bytes`` from others
    compiled     the step is compiled
    steps        steps ``first`` to ``last``; ``waited`` seconds of it for data, not hidden by work of the devices
    spike        a loss spike at step ``step``, and the ``action`` taken; after a rollback, ``from`` which step the run
                 continued, from step ``to`` without ``batches``
    saved        a checkpoint of ``step``, or the part of saving that blocks the steps
    evaluated    on held-out text
    lost, hung, slow   a process of an elastic run failed, at its own time: ``rank``, ``slot``, ``place`` (slot and
                 host), ``what``, ``step``
    returned     the slot of such a process is in again
    recovered    ``step`` is done, ``seconds`` after the first of the failures before this start
    finished, stopped, failed   the last event of a start; a killed start has none

Only process 0 writes. Times are seconds since 1970 by its clock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
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
"""Event -> category of the time before it."""

FAILURES = ("lost", "hung", "slow")
"""Events of processes that failed in an elastic run."""
ELASTIC_EVENTS = (*FAILURES, "returned", "recovered")
"""Events of an elastic run, which end no interval."""

FLUSH_SECONDS = 5.0
"""Longest interval of one "steps" event; a killed run loses at most this much of its account."""


class EventLog:
    """Appends events to a file; each line is written at once.

    Args:
        file: events.jsonl; None writes nothing.
        began: time of the start's beginning.
    """

    def __init__(self, file: Path | None, began: float):
        self._file = file
        self._steps: tuple[int, int, float] | None = None
        self._last = began
        self._began = began
        self._held: list[dict[str, Any]] = []

    def started(self, **facts: Any) -> None:
        """Holds back the first event of a start until the second, so that a refused start leaves no trace."""
        self._last = time.time()
        self._held = [{"time": round(self._last, 4), "event": "started", "began": round(self._began, 4), **facts}]

    def write(self, event: str, **facts: Any) -> None:
        """Writes an event, after pending steps."""
        self.flush()
        self._write(event, facts)

    def record(self, event: Mapping[str, Any]) -> None:
        """Writes an event that another process has seen, with its own ``time``; it ends no interval."""
        self._append([dict(event)])

    def step(self, number: int, waited: float) -> None:
        """Records that step ``number`` is done; several steps form one event.

        Args:
            waited: seconds that the loop waited for the step's data.
        """
        first, _, before = self._steps or (number, number, 0.0)
        self._steps = first, number, before + waited
        if time.time() - self._last >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Writes the event of pending steps."""
        if self._steps is not None:
            first, last, waited = self._steps
            self._steps = None
            self._write("steps", {"first": first, "last": last, "waited": round(waited, 4)})

    def _write(self, event: str, facts: dict[str, Any]) -> None:
        self._last = time.time()
        rows = [*self._held, {"time": round(self._last, 4), "event": event, **facts}]
        self._held = []
        self._append(rows)

    def _append(self, rows: list[dict[str, Any]]) -> None:
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as out:
                out.write("".join(json.dumps(row) + "\n" for row in rows))


@dataclass(frozen=True)
class Goodput:
    """Wall time of a run by category, from its first start to its last event.

    Goodput is ``fraction``: the share of time spent on steps that count.

    Attributes:
        total: seconds.
        steps: seconds of steps that count: each step once, in the last start that ran it, without waiting for data.
        lost: seconds of steps that were repeated after a restart or undone by a rollback.
        waiting: seconds of counted steps that waited for data.
        down: seconds between the last event of a start and the beginning of the next.
        other: seconds by category: starting, initialising, restoring, compiling, saving, evaluating, ending.
        starts: number of starts.
        restarts: (last step logged before, step resumed from) of every start but the first.
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
        """Goodput: ``steps / total``."""
        return self.steps / self.total if self.total else 0.0

    def parts(self) -> list[tuple[str, float]]:
        """(category, seconds) whose sum is ``total``."""
        named = [("steps", self.steps), ("waiting for data", self.waiting), ("repeated steps", self.lost)]
        return [*named, *self.other.items(), ("down", self.down)]


def read_events(directory: Path) -> list[dict[str, Any]]:
    """Events of a run directory; empty if it has no event log."""
    return read_rows(directory / "events.jsonl")


def goodput(events: Iterable[dict[str, Any]]) -> Goodput | None:
    """Goodput of an event log; None of an empty one."""
    events = [event for event in events if event["event"] not in ELASTIC_EVENTS]
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
            # Clocks of machines differ, or may be set back: intervals are never negative.
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
            if "from" in event:  # a rollback
                counted, again = _split(counted, event["from"])
                lost, last_step = lost + again, event["from"]
            other[CATEGORY_OF_EVENT[kind]] += spent
        before = now
        if kind == "finished":
            break  # later events, such as another evaluation, are not part of the run
    waiting = sum(waited for *_, waited in counted)
    steps = sum(spent for _, _, spent, _ in counted) - waiting
    total = steps + waiting + lost + down + sum(other.values())
    return Goodput(total, steps, lost, waiting, down, other, starts, tuple(restarts))


def _split(counted: list[tuple[int, int, float, float]], at: int) -> tuple[list[tuple[int, int, float, float]], float]:
    """Intervals up to step ``at``, and the seconds of those after it; one that spans ``at`` is split by its steps."""
    kept, lost = [], 0.0
    for first, last, spent, waited in counted:
        share = min(1.0, max(0.0, (at - first + 1) / (last - first + 1)))
        lost += spent * (1 - share)
        if share:
            kept.append((first, min(last, at), spent * share, waited * share))
    return kept, lost
