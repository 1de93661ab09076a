"""Processes that take turns at the same work, so that what else the machine does falls on all of them.

A ratio is the median over rounds, each of which has a turn of either side; the order of a round is the last one's
reversed.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from benchmarks.peers.setting import Setting

ROOT = Path(__file__).resolve().parents[2]
OURS = ("benchmarks.peers.jaxllm_worker",)
THEIRS = ("benchmarks.peers.torch_worker",)
COMPILED = (*THEIRS, "--compiled")
PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
"""What jax calls them, by ``Setting.device``."""


class Failed(RuntimeError):
    """A side could not do its work."""

    @property
    def of_memory(self) -> bool:
        """Whether it lacked memory: jax says RESOURCE_EXHAUSTED, torch and CUDA "out of memory"."""
        text = str(self).lower()
        return "resource_exhausted" in text or "out of memory" in text or "outofmemory" in text


class Asked(Protocol):
    """Contender that takes turns with others."""

    def ask(self, what: str, **details: Any) -> dict[str, Any]:
        """Same as ``Worker.ask``, run twice: the second run, with everything compiled, is measured."""
        ...


@dataclass(frozen=True)
class Contender:
    """One side of a comparison, not started.

    Attributes:
        name: for tables.
        python: its interpreter.
        module: that it runs, and its arguments.
        setting: what it trains.
        threads: of a CPU.
        environment: what it needs besides.
    """

    name: str
    python: str
    module: Sequence[str]
    setting: Setting
    threads: int
    environment: Mapping[str, str] = field(default_factory=dict)

    @contextmanager
    def started(self) -> Iterator[Worker]:
        """Its process, until the end of the block."""
        worker = Worker(self)
        try:
            yield worker
        finally:
            worker.close()


class Worker:
    """A contender in a process of its own.

    Raises:
        Failed: it could not be made ready.
    """

    def __init__(self, contender: Contender):
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": PLATFORMS[contender.setting.device],
            "OMP_NUM_THREADS": str(contender.threads),
            "HF_HUB_OFFLINE": "1",
        }
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # compile time is one of the results
        self.name = contender.name
        spawned = time.time()
        self.process = subprocess.Popen(
            [contender.python, "-m", *contender.module],
            cwd=ROOT,
            env=environment | dict(contender.environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        start = {"setting": asdict(contender.setting), "threads": contender.threads, "spawned": spawned}
        try:
            self.about = self._talk(start)
        except Failed:
            self.close()
            raise

    def ask(self, what: str, **details: Any) -> dict[str, Any]:
        """Does one piece of work and returns the worker's account of it.

        Raises:
            Failed: it could not.
        """
        return self._talk({"do": what} | details)

    def _talk(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended; what it said last, if anything, is still to be read
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            raise Failed(f"{self.name} ended with status {status}{' (out of memory?)' if status == -9 else ''}.")
        said = json.loads(line)
        if "failed" in said:
            raise Failed(f"{self.name}: {said['failed']}")
        return said

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


class Restarted:
    """A contender that is started for each turn, and ended after it: of two that a device cannot hold at once."""

    def __init__(self, contender: Contender):
        self.contender = contender
        self.about: dict[str, Any] = {}

    def ask(self, what: str, **details: Any) -> dict[str, Any]:
        """Same as ``Worker.ask``, run twice: the second run, with everything compiled, is measured."""
        with self.contender.started() as worker:
            self.about = worker.about
            worker.ask(what, **details)
            return worker.ask(what, **details)


def in_turn(
    sides: Sequence[Asked], rounds: int, what: str, *, warm: bool = True, **details: Any
) -> list[list[dict[str, Any]]]:
    """``rounds`` answers of each side, after one that warms it up unless not ``warm``."""
    for side in sides if warm else ():
        side.ask(what, **details)
    answers: list[list[dict[str, Any]]] = [[] for _ in sides]
    for turn in range(rounds):
        order = range(len(sides)) if turn % 2 == 0 else reversed(range(len(sides)))
        for i in order:
            answers[i].append(sides[i].ask(what, **details))
    return answers


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """(median, least, largest) of the rounds' ratios, ours over theirs."""
    found = [a / b for a, b in zip(ours, theirs, strict=True)]
    return median(found), min(found), max(found)


def on_cores(threads: int) -> None:
    """Keeps this process, and those that it starts, to as many cores as threads."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def cpu_name() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions(sides: Sequence[Mapping[str, Any]]) -> str:
    """Versions of all libraries that ``about`` of the sides names, each once."""
    found = {name: version for side in sides for name, version in side.get("versions", {}).items()}
    return ", ".join(f"{name} {version}" for name, version in found.items())


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table, the first row its head; all columns but the first are aligned to the right."""
    rule = ["---", *["---:"] * (len(rows[0]) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (rows[0], rule, *rows[1:]))
