"""Four real processes of two devices each train the same as one process of eight devices, or say why not."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from jaxllm.checkpoint import Checkpointer
from jaxllm.train import train
from jaxllm.train.records.run_directory import RunDirectory
from tests import environment
from tests.proofs.harness import proof
from tests.recipes.together_run import together_run
from tests.train.runs import write_text

RECIPE = environment.ROOT / "tests" / "recipes" / "together_run.py"
PROCESSES, DEVICES, STEPS = 4, 8, 12
LIMIT = 300.0
"""Seconds for anything: two cores start four processes."""
GONE = 30 + 60.0
"""Seconds from a loss to the others' end: the recipe's ``lost_after``, and what a busy machine takes."""
TOGETHER = "data=2,fsdp=2,tensor=2"


class Processes:
    """``jaxllm train`` in several processes that know of each other by environment variables.

    Args:
        folder: for the run, its text and what the processes print.
        started: how many of the four are really started.
        special: see the recipe.
    """

    def __init__(self, folder: Path, mesh: str, *, started: int = PROCESSES, special: dict | None = None, more=()):
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{one.getsockname()[1]}"
        self.logs = [folder / f"{rank}.log" for rank in range(started)]
        settings = ["--mesh", mesh, "--out", str(folder), "--data.source", str(write_text(folder)), *more]
        common = os.environ | {
            "JAX_ENABLE_X64": "1",
            "JAX_NUM_CPU_DEVICES": str(DEVICES // PROCESSES),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAXLLM_COORDINATOR": address,
            "JAXLLM_PROCESSES": str(PROCESSES),
            "TOGETHER": json.dumps(special or {}),
        }
        self.running = []
        for rank, log in enumerate(self.logs):
            with log.open("w") as file:
                command = [sys.executable, "-m", "jaxllm.cli", "train", f"{RECIPE}:together_run", *settings]
                env = common | {"JAXLLM_PROCESS_ID": str(rank)}
                self.running.append(
                    subprocess.Popen(command, stdout=file, stderr=file, cwd=environment.ROOT, env=env)
                )  # fmt: skip

    def wait(self) -> list[int]:
        """Their exit statuses; none stays behind."""
        try:
            return [process.wait(LIMIT) for process in self.running]
        finally:
            for process in self.running:
                process.kill()
                process.wait()

    def said(self, rank: int) -> str:
        """Output of a process."""
        return self.logs[rank].read_text()


@functools.cache
def expected(mesh: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Loss and gradient norm of every step, and the last parameters, of one process."""
    with tempfile.TemporaryDirectory() as folder:
        config = together_run()
        data = dataclasses.replace(config.data, source=str(write_text(Path(folder))), cache_dir=folder)
        train(dataclasses.replace(config, mesh=mesh, out=folder, data=data))
        return outcome(Path(folder))


def outcome(folder: Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Outcome of a finished run, as ``expected``; reads the last checkpoint in one process."""
    files = RunDirectory(folder / "together")
    rows = [row for row in files.read_metrics() if "nll" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    with Checkpointer(files.checkpoints, read_only=True) as checkpointer:
        checkpointer.verify(STEPS)
        params, _ = checkpointer.restore_params(step=STEPS)
        leaves = checkpointer.manifest(STEPS).leaves
    names = [path for path in leaves if path.startswith("params/")]
    flat = {}
    for name in names:
        value = params
        for key in name.split("/")[1:]:
            value = value[key]
        flat[name] = value
    return np.array([(row["loss"], row["grad_norm"]) for row in rows]), flat


def errors(folder: Path, mesh: str) -> dict[str, float]:
    """Differences between a finished run and one process's run."""
    curve, params = outcome(folder)
    want_curve, want_params = expected(mesh)
    assert set(params) == set(want_params)
    worst = max(np.linalg.norm(params[p] - w) / max(np.linalg.norm(w), 1e-3) for p, w in want_params.items())
    return {"curve": float(np.abs(curve / want_curve - 1).max()), "parameters": float(worst)}


def finish(folder: Path, mesh: str, more: tuple[str, ...] = ()) -> dict[str, float]:
    """Starts all four and lets them finish."""
    four = Processes(folder, mesh, more=more)
    assert four.wait() == [0] * PROCESSES, [four.said(rank)[-2000:] for rank in range(PROCESSES)]
    assert "step 12/12" in four.said(0)
    for rank in range(1, PROCESSES):  # one speaks for all
        assert "step 12/12" not in four.said(rank)
    return errors(folder, mesh)


def same_curve(folder: Path, mesh: str) -> dict[str, float]:
    """From start to end."""
    return finish(folder, mesh)


def lose(folder: Path, rank: int) -> dict[str, float]:
    """Process ``rank`` is killed: the others end in time and name it; a restart finishes the curve."""
    four = Processes(folder, TOGETHER, special={"rank": rank, "step": 6, "signal": "SIGKILL"})
    assert four.running[rank].wait(LIMIT) == -signal.SIGKILL, four.said(rank)[-2000:]
    began = time.monotonic()
    statuses = four.wait()
    took = time.monotonic() - began
    assert took < GONE, f"{took:.0f} s"
    assert statuses[rank] == -signal.SIGKILL
    named = f"process {rank} of 4, at 127" if rank == 0 else rf"process {rank} \(on .*, pid \d+\)"
    for other in {*range(PROCESSES)} - {rank}:
        assert statuses[other] != 0
        words = rf"error: process {other} of 4.*{named}.* has vanished.*Start all processes again"
        while not re.search(words, four.said(other)):  # where jax has aborted a process, its child speaks after it
            assert time.monotonic() - began < GONE, four.said(other)[-2000:]
            time.sleep(0.1)
    return finish(folder, TOGETHER)


def stop(folder: Path, rank: int) -> dict[str, float]:
    """One process gets SIGTERM: all stop after the same step, saved; a restart finishes the curve."""
    four = Processes(folder, TOGETHER, special={"rank": rank, "step": 5, "signal": "SIGTERM"})
    assert four.wait() == [128 + signal.SIGTERM] * PROCESSES, [four.said(r)[-2000:] for r in range(PROCESSES)]
    found = re.search(r"Stopped after step (\d+)", four.said(0))
    assert found, four.said(0)[-2000:]
    with Checkpointer(folder / "together" / "checkpoints", read_only=True) as checkpointer:
        assert checkpointer.latest() == int(found[1]) < STEPS
    return finish(folder, TOGETHER)


def differ(folder: Path, what: str) -> dict[str, float]:
    """Process 2 has another configuration or version: every process says which, and nothing is trained."""
    special, told = {
        "configuration": ({"peak": 0.02}, "optim.schedule.peak: 0.01 in processes 0-1, 3; 0.02 in process 2"),
        "version": ({"jax": "0.1"}, '"0.1" in process 2'),
    }[what]
    four = Processes(folder, TOGETHER, special={"rank": 2, **special})
    assert four.wait() == [2] * PROCESSES
    for rank in range(PROCESSES):
        assert told in four.said(rank), four.said(rank)[-2000:]
        assert "compiled the step" not in four.said(rank)
    return {"curve": 0.0, "parameters": 0.0}


def miss(folder: Path, rank: int) -> dict[str, float]:
    """The last process is never started: the others say so when their patience ends."""
    three = Processes(folder, TOGETHER, started=rank, more=["--distributed.start-timeout", "8"])
    assert all(status != 0 for status in three.wait())
    assert "waited 8 s for all 4 processes to come together" in three.said(0), three.said(0)[-2000:]
    return {"curve": 0.0, "parameters": 0.0}


@proof(
    "parallelism",
    cases=[
        ("same_curve", TOGETHER),
        ("same_curve", "tensor=8"),
        ("same_curve", "fsdp=4,context=2"),
        ("lose", 0),
        ("lose", 2),
        ("lose", 3),
        ("stop", 1),
        ("differ", "configuration"),
        ("differ", "version"),
        ("miss", 3),
    ],
    sample=1,
    float64=True,
    parallel=False,
    bound={"curve": 1e-10, "parameters": 1e-10},
)
def processes(case: tuple[str, str | int]) -> dict[str, float]:
    """Four processes by gloo on this machine: same curve, a loss, a signal, a disagreement, an absence."""
    name, argument = case
    with tempfile.TemporaryDirectory() as folder:
        return globals()[name](Path(folder), argument)


@proof(
    "parallelism", cases=("data=2,context=4",), sample=1, float64=True, parallel=False,
    bound={"curve": 1e-10, "parameters": 1e-10},
)  # fmt: skip
def processes_by_need(mesh: str) -> dict[str, float]:
    """Documents in slots over four processes: the curve of one process whose rows are all split alike."""
    with tempfile.TemporaryDirectory() as folder:
        return finish(Path(folder), mesh, ("--parallel.context", "by_need", "--parallel.slot", "4"))
