"""Elastic runs of four real processes of two devices: whoever fails is named, and the curve is that of no failure."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np

from jaxllm.checkpoint import Checkpointer
from jaxllm.observe.run_record import read_record
from jaxllm.train.records.run_directory import RunDirectory
from tests import environment
from tests.proofs.harness import proof
from tests.proofs.parallelism.processes import LIMIT, PROCESSES, TOGETHER
from tests.train.runs import write_text

RECIPE = environment.ROOT / "tests" / "recipes" / "elastic_run.py"
STEPS = 30
HUNG_AFTER = 3.0
"""Seconds without a heartbeat after which a process counts as hung; it is 5 by default."""
STOPPED, RUNNING = 0.06, 0.02
"""Seconds of a throttled process's turns: a quarter of its speed."""
COMMON = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_X64": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "PYTHONPATH": str(environment.ROOT),
}
"""Environment of all processes."""
Curve = tuple[np.ndarray, dict[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Mesh of an elastic run, and layers for its stages.

    Attributes:
        mesh: for all eight devices.
        layers, width: of the model with a pipeline; 0: the recipe's, without one.
        options: further settings of the command line.
    """

    mesh: str
    layers: int = 0
    width: int = 0
    options: tuple[str, ...] = ()

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings of the command line."""
        return "--mesh", self.mesh, *self.options

    @property
    def told(self) -> dict[str, int]:
        """What the recipe is told."""
        return {"layers": self.layers, "width": self.width} if self.layers else {}


NO_STAGES = Plan(TOGETHER)


class ElasticRun:
    """An elastic run under its launcher, which a test does harm to.

    Args:
        folder: for the run, its text and what the launcher prints.
        steps: of the run.
        away: seconds that a failed slot stays out.
        plan: of the run.
    """

    def __init__(self, folder: Path, steps: int, away: float, plan: Plan = NO_STAGES):
        self.folder, self.files = folder, RunDirectory(folder / "elastic")
        (folder / "pids").mkdir()
        command = [
            *(sys.executable, "-m", "jaxllm.cli", "launch", "local", "-n", str(PROCESSES), "--devices", "2"),
            *("--logs", str(folder / "logs"), "--patience.pause", "0.1", "--elastic.away", str(away)),
            *("--elastic.hung-after", str(HUNG_AFTER), "--", "train", f"{RECIPE}:elastic_run", "--elastic"),
            *plan.settings,
            *("--out", str(folder), "--data.source", str(write_text(folder))),
        ]
        changes = {**COMMON, "ELASTIC": json.dumps({"steps": steps, "pids": str(folder / "pids"), **plan.told})}
        with (folder / "said").open("w") as said:
            self.launcher = subprocess.Popen(
                command, cwd=environment.ROOT, env=os.environ | changes, stdout=said, stderr=said
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.launcher.poll() is None:
            self.launcher.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.launcher.wait(30)
            self.launcher.kill()
        self.launcher.wait()
        for file in (self.files.path / "holders").glob("[0-9].json"):  # servers of a run that did not end by itself
            with contextlib.suppress(ProcessLookupError):
                os.kill(json.loads(file.read_text())["pid"], signal.SIGKILL)

    @property
    def said(self) -> str:
        """What launcher and process 0 have printed."""
        return (self.folder / "said").read_text()

    def until(self, true: Callable[[], Any], what: str) -> None:
        """Waits until something is true."""
        end = time.monotonic() + LIMIT
        while not true():
            assert self.launcher.poll() is None, f"ended before {what}: {self.said[-3000:]}"
            assert time.monotonic() < end, f"waited for {what}: {self.said[-3000:]}"
            time.sleep(0.01)

    @property
    def step(self) -> int:
        """Last step that is logged."""
        found = re.findall(r"^step (\d+)/", self.said, re.MULTILINE)
        return int(found[-1]) if found else 0

    @property
    def generation(self) -> int:
        """Number of the newest generation."""
        return max((int(file.name.split(".")[0]) for file in (self.folder / "pids").glob("[0-9]*")), default=0)

    def pids(self, generation: int | None = None) -> dict[int, int]:
        """Process of each slot of a generation, the newest by default."""
        number = self.generation if generation is None else generation
        return {int(file.suffix[1:]): int(file.read_text()) for file in (self.folder / "pids").glob(f"{number}.*")}

    def until_step(self, step: int) -> None:
        """Waits until a step is logged."""
        self.until(lambda: self.step >= step, f"step {step}")

    def until_generation(self, number: int, slots: int) -> None:
        """Waits until all processes of a generation have started."""
        self.until(lambda: len(self.pids(number)) == slots, f"generation {number}")

    def kill_server(self, slot: int) -> None:
        """Kills the peer server of a slot: its host is lost with its memory."""
        file = self.files.path / "holders" / f"{slot}.json"
        os.kill(json.loads(file.read_text())["pid"], signal.SIGKILL)

    def finish(self) -> None:
        """Waits for the end of the run, which must be good."""
        assert self.launcher.wait(LIMIT) == 0, self.said[-3000:]

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Events of the run's log of some kinds."""
        return [event for event in read_record(self.files.path).events if event["event"] in kinds]


@contextlib.contextmanager
def throttled(pid: int):
    """Context manager in which a process runs at a quarter of its speed."""
    over = threading.Event()

    def turns() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not over.is_set():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(STOPPED)
                os.kill(pid, signal.SIGCONT)
                time.sleep(RUNNING)

    thread = threading.Thread(target=turns)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def curve_of(files: RunDirectory, steps: int) -> Curve:
    """Loss and gradient norm of each step, once each, and the parameters at the end."""
    rows = [row for row in files.read_metrics() if "nll" in row]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    with Checkpointer(files.checkpoints, read_only=True) as checkpointer:
        checkpointer.verify(steps)
        leaves = checkpointer.open_leaves(steps, prefix="params")
        return np.array([(row["loss"], row["grad_norm"]) for row in rows]), {
            p: leaf.read() for p, leaf in leaves.items()
        }


@functools.cache
def expected(steps: int, plan: Plan = NO_STAGES) -> Curve:
    """The curve of one process with eight devices, without failures and without snapshots in memory."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "jaxllm.cli", "train", f"{RECIPE}:elastic_run", *plan.settings]
        told = {"ELASTIC": json.dumps({"steps": steps, "memory": False, **plan.told}), "JAX_NUM_CPU_DEVICES": "8"}
        settings = ["--out", str(folder), "--data.source", str(write_text(folder))]
        env = os.environ | COMMON | told
        done = subprocess.run([*command, *settings], cwd=environment.ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return curve_of(RunDirectory(folder / "elastic"), steps)


def differences(run: ElasticRun, steps: int, plan: Plan = NO_STAGES) -> dict[str, float]:
    """Errors of a finished run's curve and parameters beside those of one process."""
    (curve, params), (want_curve, want_params) = curve_of(run.files, steps), expected(steps, plan)
    assert set(params) == set(want_params)
    worst = max(np.linalg.norm(params[p] - w) / max(np.linalg.norm(w), 1e-3) for p, w in want_params.items())
    return {"curve": float(np.abs(curve / want_curve - 1).max()), "parameters": float(worst)}


def harm(run: ElasticRun, rng: random.Random, kind: str) -> list[tuple[str, int]]:
    """Does one harm to the newest generation; returns the failures that must be named, as (kind, slot)."""
    pids, began = run.pids(), run.generation
    slots = sorted(pids)
    slot, other = rng.sample(slots, 2)
    if kind == "slow":
        with throttled(pids[slot]):
            before = run.step
            run.until(lambda: run.generation > began, "the next generation")
        named = next(event for event in reversed(read_events(run)) if f"(slot {slot}, " in event)
        found = re.search(r"behind the others in each of 3 steps up to (\d+)", named)
        assert found, named
        # The step that the throttling began in may be half as slow; so may the one that process 0 has not logged.
        assert int(found[1]) - before <= 3 + 2, (named, before)
        return [("slow", slot)]
    victims, number = [slot], signal.SIGSTOP if kind == "stop" else signal.SIGKILL
    if kind in ("two", "two hosts"):
        victims.append(other)
    for victim in victims:
        os.kill(pids[victim], number)
        if kind in ("host", "two hosts"):
            run.kill_server(victim)
    failures = [("hung" if kind == "stop" else "lost", victim) for victim in victims]
    run.until(lambda: run.generation > began, "the next generation")
    if kind == "again":  # another process is lost while the state is being restored
        run.until_generation(began + 1, len(slots) - 1)
        time.sleep(rng.uniform(0.0, 2.0))
        newest = run.pids(began + 1)
        second = rng.choice(sorted(newest))
        os.kill(newest[second], signal.SIGKILL)
        failures.append(("lost", second))
        run.until(lambda: run.generation > began + 1, "the generation after")
    return failures


def read_events(run: ElasticRun) -> list[str]:
    """Lines in which the launcher names a process."""
    return re.findall(r"^launch: process \d+ \(slot .*$", run.said, re.MULTILINE)


def named(run: ElasticRun) -> list[tuple[str, int]]:
    """Failures that the launcher has named, as (kind, slot)."""
    found = [re.search(r"\(slot (\d+)[^,]*, pid \d+\) (\w+):", line) for line in read_events(run)]
    return [(match[2], int(match[1])) for match in found if match]


KINDS = ("kill", "stop", "slow", "host", "two", "two hosts", "again")


def history_of(seed: int) -> tuple[list[str], bool]:
    """Kinds of harm of a history, and whether failed slots return: each kind first as often as all others."""
    rng = random.Random(seed)
    kinds = [KINDS[seed % len(KINDS)]]
    if kinds[0] in ("kill", "stop", "host") and rng.random() < 0.5:
        kinds.append(rng.choice(("kill", "stop", "host")))
    return kinds, rng.random() < 0.5


@proof(
    "launch",
    cases=range(60),
    quick=range(1),
    sample=1,
    float64=True,
    parallel=False,
    bound={"curve": 1e-8, "parameters": 1e-8, "seconds": 120.0},
)
def elastic_histories(seed: int) -> dict[str, float]:
    """Processes are killed, stopped, throttled, lost with their memory, two at once, again during recovery; failed
    slots return or stay out. Each is named by its slot and nobody else is; every step is logged once, with the loss of
    one process that nothing happened to; the seconds from each failure to the end of the next step."""
    rng = random.Random(seed)
    kinds, returns = history_of(seed)
    steps = STEPS + (80 if returns else 0)
    with tempfile.TemporaryDirectory() as folder, ElasticRun(Path(folder), steps, 3.0 if returns else 600.0) as run:
        want = []
        run.until_generation(1, PROCESSES)
        for kind in kinds:
            if returns:  # harm to processes that form again anyway would be to a generation that is ending
                run.until(lambda: len(run.pids()) == PROCESSES, "all slots in")
            run.until_step(run.step + rng.randint(4, 8))
            want += harm(run, rng, kind)
        run.finish()
        assert sorted(named(run)) == sorted(want), (kinds, run.said[-3000:])
        failures = run.events("lost", "hung", "slow")
        assert sorted((one["event"], one["slot"]) for one in failures) == sorted(want)
        recovered = run.events("recovered")
        assert recovered
        if returns:
            assert {one["slot"] for one in run.events("returned")} == {slot for _, slot in want}, run.said[-3000:]
            assert re.findall(r" on (\d+) x cpu", run.said)[-1] == "8", run.said[-3000:]
        return {**differences(run, steps), "seconds": max(one["seconds"] for one in recovered)}


@proof(
    "launch", cases=range(60), quick=range(1), sample=1, float64=True, parallel=False,
    bound={"curve": 1e-8, "parameters": 1e-8},
)  # fmt: skip
def elastic_runs_without_failures(seed: int) -> dict[str, float]:
    """Nothing happens, and nobody is named: one generation, whose curve is that of one process."""
    with tempfile.TemporaryDirectory() as folder, ElasticRun(Path(folder), STEPS, 60.0) as run:
        run.finish()
        assert not read_events(run), run.said[-3000:]
        assert run.generation == 1
        assert not run.events("lost", "hung", "slow", "returned", "recovered")
        return differences(run, STEPS)
