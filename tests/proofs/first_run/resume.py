"""Resume: real training, killed with SIGKILL at random moments, ends where an unbroken run ends."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxllm.checkpoint import Checkpointer
from jaxllm.train.records.run_directory import RunDirectory
from tests import environment
from tests.proofs.harness import proof

RECIPE = environment.ROOT / "tests" / "recipes" / "tiny_run.py"
STEPS = 120


def start(out: Path, log: Path, *words: str) -> subprocess.Popen:
    """``jaxllm train`` in a process of its own."""
    command = [sys.executable, "-m", "jaxllm.cli", "train", f"{RECIPE}:tiny_run", "--out", str(out), *words]
    # Everything compiled is kept between starts: what is under test is stopping and going on.
    env = os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    with log.open("a") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, cwd=environment.ROOT, env=env)


def finish(out: Path, log: Path) -> None:
    """Runs to the end."""
    code = start(out, log).wait(timeout=300)
    assert code == 0, f"exit status {code}:\n{log.read_text()[-3000:]}"


def outcome(out: Path) -> tuple[list[tuple[Any, ...]], dict[str, str]]:
    """Loss and gradient norm of every step, and the hash of every leaf of the last checkpoint."""
    files = RunDirectory(out / "tiny")
    rows = [(row["step"], row["loss"], row["grad_norm"]) for row in files.read_metrics() if "nll" in row]
    with Checkpointer(files.checkpoints, read_only=True) as checkpointer:
        return rows, {path: leaf.hash for path, leaf in checkpointer.manifest(STEPS).leaves.items()}


@functools.cache
def unbroken() -> tuple[list[tuple[Any, ...]], dict[str, str]]:
    """Result of a run that is not killed."""
    with tempfile.TemporaryDirectory() as folder:
        finish(Path(folder), Path(folder) / "log")
        rows, leaves = outcome(Path(folder))
    assert [step for step, _, _ in rows] == list(range(1, STEPS + 1))
    return rows, leaves


def kill_at_random(
    out: Path, log: Path, rng: random.Random, started: Callable[[Path, Path], subprocess.Popen] = start
) -> None:
    """Starts the run and kills it: mostly between two steps or inside one, sometimes before the first."""
    process = started(out, log)
    metrics = RunDirectory(out / "tiny").metrics
    if rng.random() < 0.15:
        time.sleep(rng.uniform(0, 6))
    else:
        begun = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        target = rng.randrange(min(begun, STEPS - 1), STEPS)
        while process.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") <= target):
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.05))
    process.send_signal(signal.SIGKILL)
    process.wait()


@proof("first_run", count=50, sample=1)
def kill9_resume(seed: int) -> None:
    """One or two kills, then to the end: losses and final state bit for bit those of the unbroken run; every
    checkpoint that is visible after a kill is whole."""
    rng = random.Random(seed)
    expected = unbroken()
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder), Path(folder) / "log"
        for _ in range(rng.randint(1, 2)):
            kill_at_random(out, log, rng)
            checkpoints = RunDirectory(out / "tiny").checkpoints
            if checkpoints.exists():
                with Checkpointer(checkpoints, read_only=True) as checkpointer:
                    for step in checkpointer.steps():
                        checkpointer.verify(step)
        finish(out, log)
        rows, leaves = outcome(out)
        assert rows == expected[0], f"losses differ; seed {seed}\n{log.read_text()[-3000:]}"
        assert leaves == expected[1], f"final state differs; seed {seed}"
        assert json.loads((out / "tiny" / "receipt.json").read_text())["result"]["steps"] == STEPS
