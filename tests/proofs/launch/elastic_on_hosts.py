"""Elastic runs of several hosts: each has its own launcher, and hosts are lost whole, hang, are held and return."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jaxllm.parallel.supervisor import free_port, process_variables
from jaxllm.train.records.run_directory import RunDirectory
from tests import environment
from tests.proofs.harness import proof
from tests.proofs.launch.elastic import COMMON, HUNG_AFTER, RECIPE, ElasticRun, differences, named
from tests.proofs.parallelism.processes import PROCESSES, TOGETHER
from tests.train.runs import write_text

STEPS = 110
SAVED = 12
"""Steps between two checkpoints of the recipe on disk."""
AWAY = 3.0
"""Seconds that a failed slot stays out."""
KINDS = ("process", "host", "hung host", "spare", "excluded", "first host", "memory")


class HostsRun(ElasticRun):
    """An elastic run over hosts, each of which is a launcher of its own on this machine.

    Args:
        folder: for the run, its text and what the launchers print.
        hosts: number of hosts.
        policy: further options of the launchers.
    """

    def __init__(self, folder: Path, hosts: int, policy: tuple[str, ...] = ()):
        self.folder, self.files = folder, RunDirectory(folder / "elastic")
        (folder / "pids").mkdir()
        self._hosts, self._port = hosts, free_port()
        self._command = [
            *(sys.executable, "-m", "jaxllm.cli", "launch", "supervise", "--patience.pause", "0.1"),
            *("--elastic.away", str(AWAY), "--elastic.hung-after", str(HUNG_AFTER), *policy),
            *("--", "train", f"{RECIPE}:elastic_run", "--elastic", "--mesh", TOGETHER),
            *("--out", str(folder), "--data.source", str(write_text(folder))),
        ]
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}
        for slot in range(hosts):
            self.start(slot)

    def start(self, slot: int) -> None:
        """Starts the launcher of a host, as a scheduler does."""
        changes = {
            **COMMON,
            **process_variables(slot, self._hosts, f"localhost:{self._port}"),
            "JAX_NUM_CPU_DEVICES": "2",
            "ELASTIC": json.dumps({"steps": STEPS, "pids": str(self.folder / "pids")}),
        }
        with (self.folder / f"said.{slot}").open("a") as said:
            self.launchers[slot] = subprocess.Popen(
                self._command,
                cwd=environment.ROOT,
                env=os.environ | changes,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        self.launcher = self.launchers[0]

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        for slot in range(1, self._hosts):
            self.signal_host(slot, signal.SIGKILL)
            self.launchers[slot].wait()

    @property
    def said(self) -> str:
        """What all launchers and processes have printed."""
        return "\n".join((self.folder / f"said.{slot}").read_text() for slot in range(self._hosts))

    @property
    def step(self) -> int:
        """Last step that is logged."""
        return max((int(found) for found in re.findall(r"^step (\d+)/", self.said, re.MULTILINE)), default=0)

    def signal_host(self, slot: int, number: int) -> None:
        """Sends a signal to all processes of a host but its peer server."""
        pids = [self.launchers[slot].pid]
        for pid in pids:
            with contextlib.suppress(OSError):
                pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def lose(self, slot: int) -> None:
        """Kills a host with its memory."""
        self.signal_host(slot, signal.SIGKILL)
        self.launchers[slot].wait()
        with contextlib.suppress(ProcessLookupError):
            self.kill_server(slot)

    def until_all_in(self, hosts: int) -> None:
        """Waits until so many processes form a generation that has done a step."""
        self.until(lambda: len(self.pids()) == hosts, f"{hosts} processes")
        before = self.step
        self.until(lambda: self.step > before, "a step")


def harm_hosts(run: HostsRun, rng: random.Random, kind: str) -> list[tuple[str, int]]:
    """Does one harm; returns the failures that must be named, as (kind, slot)."""
    began = run.generation
    slot = rng.choice([slot for slot in sorted(run.pids()) if slot])
    if kind in ("process", "spare", "excluded"):
        os.kill(run.pids()[slot], signal.SIGKILL)
        run.until(lambda: run.generation > began, "the next generation")
    elif kind == "host":
        run.lose(slot)
        run.until(lambda: run.generation > began, "the next generation")
        run.start(slot)
    elif kind == "memory":  # nobody fails by that, and soon after it memory is what the run goes on from
        run.kill_server(slot)
        run.until_step((run.step + 8) // SAVED * SAVED + SAVED + SAVED // 2)
        os.kill(run.pids()[slot], signal.SIGKILL)
        run.until(lambda: run.generation > began, "the next generation")
    elif kind == "hung host":
        run.signal_host(slot, signal.SIGSTOP)
        run.until(lambda: run.generation > began, "the next generation")
        time.sleep(rng.uniform(0.0, 2.0))
        run.signal_host(slot, signal.SIGCONT)
        return [("hung", slot)]
    else:  # the host of the supervisor: whoever starts it again is the scheduler
        run.lose(0)
        time.sleep(rng.uniform(0.0, 2.0))
        run.start(0)
        return []
    return [("lost", slot)]


@proof(
    "launch",
    cases=range(21),
    quick=range(1),
    sample=1,
    float64=True,
    parallel=False,
    bound={"curve": 1e-8, "parameters": 1e-8, "seconds": 120.0},
)
def elastic_hosts(seed: int) -> dict[str, float]:
    """A process, a whole host with its memory, the memory alone, or the supervisor's host is lost, or a host hangs;
    held hosts take the place of lost ones, excluded ones have no process, and others return. Each is named and nobody
    else is; every step is logged once, with the loss of one process that nothing happened to."""
    rng = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    held = ("--elastic.spares", "1")
    more = {"spare": held, "excluded": (*held, "--elastic.exclude", "2")}.get(kind, ())
    hosts = PROCESSES + bool(more)
    with tempfile.TemporaryDirectory() as folder, HostsRun(Path(folder), hosts, more) as run:
        run.until_generation(1, PROCESSES)
        run.until_step(run.step + rng.randint(4, 8))
        want = harm_hosts(run, rng, kind)
        if kind == "spare":
            run.until_generation(2, PROCESSES)
            assert set(run.pids(2)) == set(range(hosts)) - {want[0][1]}
        run.until_all_in(PROCESSES)
        run.finish()
        assert sorted(named(run)) == sorted(want), (kind, run.said[-3000:])
        assert all(launcher.wait(30) == 0 for launcher in run.launchers.values()), run.said[-3000:]
        if kind == "excluded":
            assert all(2 not in run.pids(number) for number in range(1, run.generation + 1))
        recovered = run.events("recovered")
        assert bool(recovered) == bool(want)
        if kind == "memory":
            (restored,) = run.events("restored")[:1]
            assert restored["step"] % SAVED >= SAVED // 2 - 3, "from memory, and not from the checkpoint on disk"
        assert {one["slot"] for one in run.events("returned")} == ({want[0][1]} if want and kind != "spare" else set())
        return {
            **differences(run, STEPS),
            "seconds": max((one["seconds"] for one in recovered), default=0.0),
        }
