"""Phases of reinforcement learning: when a run rolled out, swapped weights and updated the policy, and its idle time.

``timeline.jsonl`` has a row for each phase. It is written by the run and read without jax.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from jaxllm.files import read_rows

TIMELINE = "timeline.jsonl"
PhaseName = Literal["rollout", "swap", "train"]
BOTH = "rollout and train"
"""Time in which rollouts for a later step are sampled while an update runs (asynchronous runs)."""
SHARES = ("rollout", BOTH, "train", "swap", "idle")
_EPOCH = time.time() - time.monotonic()


def now() -> float:
    """Seconds since 1970, by a clock that never goes back within a process."""
    return _EPOCH + time.monotonic()


class Phase(NamedTuple):
    """Phase of a step.

    Attributes:
        name: ``rollout``: sampling and judging; ``swap``: the engine is given the policy's weights; ``train``: from the
            batch to the updated parameters.
        step: counted from 1, that it is for.
        begin, end: seconds since 1970.
    """

    name: PhaseName
    step: int
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end - self.begin


class PhaseLog:
    """Appends the phases of one start of a run.

    Args:
        file: of the run; None writes nothing.
    """

    def __init__(self, file: Path | None):
        self._file, self._start = file, now()

    def write(self, phases: Iterable[Phase]) -> None:
        """Writes phases, which are over."""
        if self._file is None:
            return
        rows = [{"start": self._start, **one._asdict()} for one in phases]
        with self._file.open("a") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)


def read_phases(file: Path) -> list[list[Phase]]:
    """Phases of each start of a run, in order; a line that a kill has cut is left out."""
    starts: dict[float, list[Phase]] = {}
    for row in read_rows(file):
        starts.setdefault(row.pop("start"), []).append(Phase(**row))
    return list(starts.values())


def phase_seconds(starts: Iterable[Iterable[Phase]]) -> dict[str, float]:
    """Wall time by what was going on (``SHARES``), from each start's first phase to its last; the sum is all of it."""
    found: dict[str, float] = dict.fromkeys(SHARES, 0.0)
    for phases in starts:
        # +1 where a phase begins and -1 where it ends; between two of these moments nothing changes.
        moments = sorted((at, change, one.name) for one in phases for at, change in ((one.begin, 1), (one.end, -1)))
        running: dict[str, int] = dict.fromkeys(("rollout", "swap", "train"), 0)
        for (at, change, name), following in itertools.pairwise(moments):
            running[name] += change
            found[_what(running)] += following[0] - at
    return found


def _what(running: dict[str, int]) -> str:
    if running["swap"]:
        return "swap"
    if running["rollout"] and running["train"]:
        return BOTH
    return next((name for name in ("rollout", "train") if running[name]), "idle")
