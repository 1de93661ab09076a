"""Run record: what a run directory contains, read without jax, of finished and unfinished runs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxllm.files import DataError, read_json, read_rows
from jaxllm.observe.event_log import ELASTIC_EVENTS, Goodput, goodput, read_events
from jaxllm.observe.policy_phases import TIMELINE, Phase, read_phases


@dataclass(frozen=True)
class RunRecord:
    """Contents of a run directory so far.

    Attributes:
        path: its directory.
        name: its name.
        config: its configuration, as JSON.
        steps: a row of metrics for each training step.
        heldout: a row for each evaluation.
        layers: a row for each step whose norms by layer were logged.
        events: see ``jaxllm.observe.event_log``; empty for runs of versions without an event log.
        receipt: of a finished run.
        profiles: text summaries of profiles, by the profile's name.
        episodes: rows of the last step's rollouts, of runs of reinforcement learning.
        phases: phases of each start, of runs of reinforcement learning.
    """

    path: Path
    name: str
    config: dict[str, Any]
    steps: list[dict[str, Any]]
    heldout: list[dict[str, Any]]
    layers: list[dict[str, Any]]
    events: list[dict[str, Any]]
    receipt: dict[str, Any] | None
    profiles: dict[str, str]
    episodes: list[dict[str, Any]] = field(default_factory=list)
    phases: list[list[Phase]] = field(default_factory=list)

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the newest start: devices, versions, commit, FLOPs per token."""
        starts = [event for event in self.events if event["event"] == "started"]
        return starts[-1] if starts else {}

    @property
    def goodput(self) -> Goodput | None:
        """Goodput of the run; None without an event log."""
        return goodput(self.events)

    @property
    def state(self) -> str:
        """State of the run: ``finished``, ``stopped after step 7``, ``failed: ...``, or running or killed."""
        if not self.events:
            return "finished" if self.receipt else "not finished"
        last = self.events[-1]
        if last["event"] in ("finished", "stopped"):
            return last["event"] if last["event"] == "finished" else f"stopped after step {last['step']}"
        if last["event"] == "failed":
            return f"failed: {last['why']}"
        return f"running, or killed: its last event is {time.time() - last['time']:,.0f} s old"

    @property
    def spikes(self) -> list[dict[str, Any]]:
        """Events of loss spikes, those that were rolled back included."""
        return [event for event in self.events if event["event"] == "spike"]

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Events of processes of an elastic run that failed or returned, of states read from memory, and of the steps
        after.
        """
        return [event for event in self.events if event["event"] in ELASTIC_EVENTS or "peer_bytes" in event]

    def series(self, key: str) -> tuple[list[float], list[float | None]]:
        """Steps and values of the metric ``key``, from the rows that have it."""
        rows = [row for row in self.steps if key in row]
        return [row["step"] for row in rows], [row[key] for row in rows]

    def typical(self, key: str) -> float | None:
        """Median of the metric ``key`` over the later half of the run."""
        values = sorted(v for v in self.series(key)[1][len(self.series(key)[1]) // 2 :] if v is not None)
        return values[len(values) // 2] if values else None


def read_record(path: Path) -> RunRecord:
    """Record of the run in directory ``path``.

    Raises:
        DataError: it is not a run directory; lists the run directories in it.
    """
    path = Path(path)
    if not (path / "config.json").is_file():
        inside = sorted(p.parent.name for p in path.glob("*/config.json"))
        hint = f" Runs in it: {', '.join(inside)}." if inside else ""
        raise DataError(f"{path} is not the directory of a run: it has no config.json.{hint}")
    config = read_json(path / "config.json")
    rows = read_rows(path / "metrics.jsonl")
    receipt = path / "receipt.json"
    return RunRecord(
        path=path,
        name=str(config.get("name", path.name)),
        config=config,
        steps=[row for row in rows if "nll" in row],
        heldout=[row for row in rows if "heldout_nll" in row],
        layers=read_rows(path / "layers.jsonl"),
        episodes=last_episodes(path / "episodes.jsonl"),
        phases=read_phases(path / TIMELINE),
        events=read_events(path),
        receipt=read_json(receipt) if receipt.exists() else None,
        profiles={file.parent.name: file.read_text() for file in sorted(path.glob("profiles/*/summary.txt"))},
    )


def last_episodes(file: Path) -> list[dict[str, Any]]:
    """Rows of the last step in a log of episodes; empty where a run has none."""
    rows = read_rows(file)
    return [row for row in rows if row["step"] == rows[-1]["step"]]


def flat(config: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Values of a JSON configuration by dotted name."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{path}.{key}".lstrip(".")
        if isinstance(value, dict):
            out |= flat(value, name)
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            out |= flat({str(n): item for n, item in enumerate(value)}, name)
        else:
            out[name] = value
    return out
