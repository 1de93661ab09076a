"""Profile summary: which operations took the time, and how much communication is exposed.

Reads the ``*.trace.json.gz`` that ``jax.profiler`` writes, with at most the million longest events; jax's reader of
the other file, ``*.xplane.pb``, can crash the process (jax 0.12). An operation is an event with the name of an HLO
operation: on TPUs those of the lines "XLA Ops" and "Async XLA Ops", on GPUs the kernels of the streams, on CPUs the
thunks.

    communication   time in which a collective runs on a device
    exposed         the part of it in which nothing else runs: what overlapping all of it would save
    idle            time between the first and the last operation in which none runs

Loops are not counted as operations; the operations in them are.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxllm.files import DataError

Span = tuple[float, float]
"""Begin and end, in microseconds."""

COLLECTIVE = re.compile(
    r"all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|(^|[^a-z])(send|recv)\b|nccl",
    re.IGNORECASE,
)
CONTAINER = re.compile(r"(while|conditional|call)(\.\d+)*$")
TPU_LINES = ("XLA Ops", "Async XLA Ops")


@dataclass(frozen=True)
class ProfiledOp:
    """One execution of an operation on a device; ``begin`` and ``end`` in microseconds."""

    device: str
    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class ProfileSummary:
    """Summary of a profile; times in seconds, means over the devices in it.

    Attributes:
        devices: that ran operations.
        span: from the first operation to the last.
        computing: with an operation that is not a collective.
        communicating: with a collective.
        exposed: with a collective and nothing else.
        top: (operation, seconds, count) over all devices, the longest first.
        steps: number of training steps marked in the profile (``jax.profiler.StepTraceAnnotation``); 0: none.
    """

    devices: tuple[str, ...]
    span: float
    computing: float
    communicating: float
    exposed: float
    top: tuple[tuple[str, float, int], ...]
    steps: int = 0

    @property
    def idle(self) -> float:
        """Seconds without any operation."""
        return max(0.0, self.span - self.computing - self.exposed)

    def text(self, most: int = 12) -> str:
        """Summary as lines of text.

        Args:
            most: number of operations to list.
        """

        def line(name: str, seconds: float) -> str:
            return f"{name:22} {1e3 * seconds:10.3f} ms {100 * seconds / self.span if self.span else 0:6.1f}%"

        count = len(self.devices)
        head = f"{count} device{'s' if count != 1 else ''} ({self.devices[0]}{', ...' if count > 1 else ''})"
        total = sum(seconds for _, seconds, _ in self.top) or 1.0
        return "\n".join(
            [
                f"{head}; of each, on average:",
                line("first to last", self.span),
                line("computing", self.computing),
                line("communicating", self.communicating),
                line("  of it exposed", self.exposed),
                line("idle", self.idle),
                "operations that took the most, of all operations' time:",
                *(
                    f"{100 * seconds / total:6.1f}% {1e3 * seconds:10.3f} ms {times:7,} x  {name}"
                    for name, seconds, times in self.top[:most]
                ),
            ]
        )


def read_trace(path: Path) -> ProfileSummary:
    """Summary of the profile in a file, or of the newest one under a directory.

    Raises:
        DataError: there is no profile, or it has no operations.
    """
    files = [path] if path.is_file() else list(path.rglob("*.trace.json.gz"))
    if not files:
        raise DataError(f"{path}: no profile; jax.profiler writes *.trace.json.gz.")
    newest = max(files, key=lambda file: (file.parent.name, file.stat().st_mtime))
    together = [file for file in files if file.parent == newest.parent]
    operations = [op for file in together for op in operations_in(file)]
    if not operations:
        raise DataError(f"{path}: the profile has no operation of a device; take it of steps that run.")
    return replace(summarise(operations), steps=len(set().union(*map(steps_in, together))))


def steps_in(file: Path) -> set[str]:
    """Numbers of the training steps marked in one host's file."""
    marked = (event.get("args", {}) for event in _events(file) if event.get("ph") == "X")
    return {str(facts["step_num"]) for facts in marked if "step_num" in facts}


def _events(file: Path) -> list[dict[str, Any]]:
    with gzip.open(file, "rt", encoding="utf-8") as text:
        return json.load(text)["traceEvents"]


def operations_in(file: Path) -> Iterable[ProfiledOp]:
    """Operations in one host's file."""
    events = _events(file)
    named = [event for event in events if event.get("ph") == "M"]
    planes = {e["pid"]: e["args"]["name"] for e in named if e["name"] == "process_name"}
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in named if e["name"] == "thread_name"}
    for event in events:
        if event.get("ph") != "X":
            continue
        plane, row = planes.get(event["pid"], ""), rows.get((event["pid"], event["tid"]), "")
        facts = event.get("args", {})
        if plane.startswith("/device:"):
            if not (row in TPU_LINES or row.startswith("Stream")):
                continue
            device = plane.removeprefix("/device:")
        elif plane == "/host:CPU" and "hlo_op" in facts:
            device = f"CPU:{facts.get('device_ordinal', 0)}"
        else:
            continue
        kernel = str(event["name"])
        name = str(facts.get("hlo_op") or kernel).split(" = ")[0].lstrip("%")
        if "nccl" in kernel and name != kernel:
            name = f"{name} ({kernel.split('(')[0]})"
        yield ProfiledOp(f"{file.name.split('.')[0]} {device}", name, event["ts"], event["ts"] + event.get("dur", 0.0))


def summarise(operations: Iterable[ProfiledOp]) -> ProfileSummary:
    """Summary of operations."""
    spans: dict[str, tuple[list[Span], list[Span]]] = defaultdict(lambda: ([], []))
    seconds: dict[str, float] = defaultdict(float)
    times: Counter[str] = Counter()
    for op in operations:
        if CONTAINER.fullmatch(op.name):
            continue
        spans[op.device][bool(COLLECTIVE.search(op.name))].append((op.begin, op.end))
        seconds[op.name] += (op.end - op.begin) * 1e-6
        times[op.name] += 1
    devices = tuple(sorted(spans))
    span = computing = communicating = exposed = 0.0
    for compute, collectives in spans.values():
        working, sending = merge_spans(compute), merge_spans(collectives)
        every = working + sending
        span += max(end for _, end in every) - min(begin for begin, _ in every)
        computing += total_length(working)
        communicating += total_length(sending)
        exposed += min(
            total_length(sending), total_length(merge_spans(every)) - total_length(working)
        )  # but for rounding it is
    each = 1e-6 / len(devices) if devices else 0.0
    return ProfileSummary(
        devices,
        span * each,
        computing * each,
        communicating * each,
        exposed * each,
        tuple((name, seconds[name], times[name]) for name in sorted(seconds, key=seconds.__getitem__, reverse=True)),
    )


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Union of spans: the same times without overlaps, ascending."""
    out: list[Span] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = out[-1][0], max(end, out[-1][1])
        else:
            out.append((begin, end))
    return out


def total_length(spans: Iterable[Span]) -> float:
    """Total length of spans that do not overlap."""
    return sum(end - begin for begin, end in spans)
