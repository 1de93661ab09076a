"""Four processes under `jaxllm launch local`: one is killed, all restart, and the losses continue as before."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from jaxllm.checkpoint import Checkpointer
from jaxllm.observe.run_record import read_record
from jaxllm.train.records.run_directory import RunDirectory
from tests import environment
from tests.proofs.harness import proof
from tests.proofs.parallelism.processes import LIMIT, PROCESSES, RECIPE, STEPS, TOGETHER
from tests.train.runs import write_text

Outcome = tuple[list[tuple[float, float]], dict[str, str]]


def launched(folder: Path, special: dict | None = None) -> subprocess.CompletedProcess[str]:
    """The launcher, until it ends."""
    command = [
        *(sys.executable, "-m", "jaxllm.cli", "launch", "local", "-n", str(PROCESSES), "--devices", "2"),
        *("--logs", str(folder / "logs"), "--patience.pause", "0.1", "--patience.grace", "3", "--"),
        *("train", f"{RECIPE}:together_run", "--mesh", TOGETHER),
        # A checkpoint that is still being written when a process is killed would not count.
        *("--out", str(folder), "--data.source", str(write_text(folder)), "--checkpoint.saving", "blocking"),
    ]
    changes = {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(environment.ROOT),
        "TOGETHER": json.dumps(special or {}),
    }
    env = os.environ | changes
    return subprocess.run(
        command, cwd=environment.ROOT, env=env, timeout=2 * LIMIT, capture_output=True, text=True, check=False
    )


def outcome(folder: Path) -> Outcome:
    """Loss and gradient norm of every step, once each, and the hash of every leaf at the end."""
    files = RunDirectory(folder / "together")
    rows = [row for row in files.read_metrics() if "nll" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    with Checkpointer(files.checkpoints, read_only=True) as checkpointer:
        leaves = checkpointer.manifest(STEPS).leaves
    return [(row["loss"], row["grad_norm"]) for row in rows], {path: leaf.hash for path, leaf in leaves.items()}


@functools.cache
def unbroken() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        done = launched(Path(folder))
        assert done.returncode == 0, done.stderr[-3000:]
        assert "all restart" not in done.stderr
        return outcome(Path(folder))


@proof(
    "launch",
    cases=[("SIGKILL", 2), ("SIGKILL", 0), ("SIGKILL", 3), ("SIGTERM", 1)],
    sample=1,
    parallel=False,
)
def local(case: tuple[str, int]) -> None:
    """A process is killed with SIGKILL after step 6: all are started again, go on after step 4, and end with the
    unbroken run's losses and state, bit for bit. One that gets SIGTERM stops all, saved, and nothing is started again;
    the same command then goes on to the same end."""
    name, rank = case
    want = unbroken()
    with tempfile.TemporaryDirectory() as folder:
        special = {"rank": rank, "step": 6, "signal": name, "once": str(Path(folder) / "once")}
        done = launched(Path(folder), special)
        assert (Path(folder) / "once").exists(), done.stderr[-3000:]
        if name == "SIGTERM":
            assert done.returncode == 128 + signal.SIGTERM, done.stderr[-3000:]
            assert "not restarted" in done.stderr
            done = launched(Path(folder), special)
        else:
            assert "all restart" in done.stderr
            assert "Resuming after step 4" in done.stdout, done.stdout[-3000:]
        assert done.returncode == 0, done.stderr[-3000:]
        assert outcome(Path(folder)) == want
        account = read_record(Path(folder) / "together").goodput
        assert account is not None
        assert account.starts == 2
        (restart,) = account.restarts
        assert restart[1] == 4 if name == "SIGKILL" else restart[0] == restart[1] >= 6
