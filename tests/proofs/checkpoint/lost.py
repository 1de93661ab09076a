"""Lost hosts: the snapshots in their memory are rebuilt from parity, bit for bit."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import signal
import tempfile
from pathlib import Path

from jaxllm.checkpoint import Checkpointer
from jaxllm.train.records.run_directory import RunDirectory
from tests.checkpoint.test_memory import Hosts
from tests.proofs.harness import proof
from tests.proofs.parallelism.processes import LIMIT, PROCESSES, STEPS, TOGETHER, Processes, errors


def hosts(folder: Path, seed: int) -> dict[str, float]:
    """Two to six hosts whose peer servers are real processes: as many are lost as there is parity, twice."""
    rng = random.Random(seed)
    size = rng.randint(2, 6)
    some = Hosts(folder / "holders", size, parity=rng.randint(1, min(3, size - 1)))
    try:
        some.save(1, 2)
        for step in (2, 3):
            some.lose(*rng.sample(range(size), some.config.parity))
            assert some.resumed() == [step] * size
            some.save(step + 1)
        assert some.resumed() == [4] * size
    finally:
        some.end()
    return {"curve": 0.0, "parameters": 0.0}


def finished(folder: Path, four: Processes) -> tuple[list[tuple[float, float]], dict[str, str]]:
    """Loss and gradient norm of each step, and the hash of every leaf at the end."""
    assert four.wait() == [0] * PROCESSES, [four.said(rank)[-2000:] for rank in range(PROCESSES)]
    files = RunDirectory(folder / "together")
    rows = [(row["loss"], row["grad_norm"]) for row in files.read_metrics() if "nll" in row]
    with Checkpointer(files.checkpoints, read_only=True) as checkpointer:
        return rows, {path: leaf.hash for path, leaf in checkpointer.manifest(STEPS).leaves.items()}


@functools.cache
def unbroken() -> tuple[list[tuple[float, float]], dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        return finished(Path(folder), Processes(Path(folder), TOGETHER, special={"memory": True}))


def training(folder: Path, rank: int) -> dict[str, float]:
    """Four processes train; one is killed and so is its holder. Nothing was on disk; the restart goes on where it was
    and ends with the unbroken run's losses and state, bit for bit."""
    want = unbroken()
    special = {"rank": rank, "step": 6, "signal": "SIGKILL", "memory": True}
    four = Processes(folder, TOGETHER, special=special)
    holders = [folder / "together" / "holders" / f"{n}.json" for n in range(PROCESSES)]
    assert four.running[rank].wait(LIMIT) == -signal.SIGKILL, four.said(rank)[-2000:]
    pids = [json.loads(file.read_text())["pid"] for file in holders]
    os.kill(pids[rank], signal.SIGKILL)
    four.wait()
    try:
        assert not list((folder / "together" / "checkpoints").glob("step_*"))
        again = Processes(folder, TOGETHER, special={"memory": True})
        got = finished(folder, again)
        found = re.search(r"Resuming after step (\d+)", again.said(0))
        assert found, again.said(0)[-2000:]
        assert int(found[1]) >= 4
        assert got == want
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return errors(folder, TOGETHER)


@proof(
    "checkpoint",
    cases=[*(("hosts", seed) for seed in range(30)), ("training", 2), ("training", 0)],
    sample=1,
    float64=True,
    parallel=False,
    bound={"curve": 1e-10, "parameters": 1e-10},
)
def lost_hosts(case: tuple[str, int]) -> dict[str, float]:
    """Random hosts, parities and losses; and real training in four processes, beside one process's curve too."""
    name, argument = case
    with tempfile.TemporaryDirectory() as folder:
        return globals()[name](Path(folder), argument)
