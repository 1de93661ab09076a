"""Supervisor: starts the processes of a run together, and restarts all of them when one is lost.

    every process exits with 0        the supervisor ends
    a user error (2)                  the supervisor ends: a restart would fail again
    SIGTERM, SIGINT                   forwarded; the processes save and end, and so does the supervisor
    SIGUSR1, SIGUSR2                  forwarded (a run takes a profile at SIGUSR2)
    anything else                     the other processes get a grace period to end, then all restart, with backoff

A restarted run resumes from its newest checkpoint, so the supervisor needs no knowledge of steps.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

USER_ERROR = 2
WANTED = (USER_ERROR, 128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Statuses of processes that are not restarted: a user error, or a signal to end."""
POLL = 0.1


@dataclass(frozen=True)
class RestartPolicy:
    """Restart policy with exponential backoff.

    Attributes:
        restarts: consecutive failures after which the supervisor gives up.
        pause: seconds before the first restart; each further one waits twice as long.
        longest: maximum pause in seconds.
        healthy: seconds that processes have to run for a failure not to count as consecutive.
        grace: seconds that the other processes get to end by themselves when one has failed.
    """

    restarts: int = 10
    pause: float = 5.0
    longest: float = 300.0
    healthy: float = 600.0
    grace: float = 20.0

    def __post_init__(self) -> None:
        for name in ("restarts", "pause", "longest", "healthy", "grace"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}; give 0 or more.")

    def wait(self, failures: int) -> float:
        """Pause in seconds after so many consecutive failures."""
        return min(self.longest, self.pause * 2.0 ** (failures - 1))


@dataclass(frozen=True)
class ProcessSpec:
    """Process to start.

    Attributes:
        command: program and arguments.
        environment: variables added to this process's environment.
        log: file for stdout and stderr; None for this process's own.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    log: Path | None = None

    def __str__(self) -> str:
        """Shell command line."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        line = " ".join([*words, shlex.join(self.command)])
        return line if self.log is None else f"{line} >> {shlex.quote(str(self.log))} 2>&1"


class Supervisor:
    """Supervisor of a set of processes: runs and restarts them until they succeed or the restart policy gives up.

    Args:
        make: creates the processes of each start.
        patience: restart policy.
        say: prints a line for the user.
    """

    def __init__(
        self,
        make: Callable[[], Sequence[ProcessSpec]],
        patience: RestartPolicy | None = None,
        say: Callable[[str], None] = lambda text: print(f"launch: {text}", file=sys.stderr, flush=True),
    ):
        self._make, self._patience, self._say = make, patience or RestartPolicy(), say
        self._running: list[subprocess.Popen[bytes]] = []
        self._stopping = 0

    def run(self) -> int:
        """Exit status of the run: 0, or that of the process that failed first."""
        passed = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
        old = {number: signal.signal(number, self._pass_on) for number in passed}
        failures = 0
        try:
            while True:
                began = time.monotonic()
                number, code = self._once()
                if code == 0 or self._stopping:
                    return code
                what = describe_exit(code)
                if code in WANTED:
                    self._say(f"process {number} {what}; not restarted")
                    return code
                lived = time.monotonic() - began
                failures = 1 if lived >= self._patience.healthy else failures + 1
                if failures > self._patience.restarts:
                    self._say(f"process {number} {what}; giving up after {self._patience.restarts} restarts in a row")
                    return code if code > 0 else 128 - code
                pause = self._patience.wait(failures)
                self._say(f"process {number} {what} after {lived:.0f} s; all restart in {pause:g} s")
                if not self._sleep(pause):
                    return 128 + self._stopping
        finally:
            self._kill()
            for each, handler in old.items():
                signal.signal(each, handler)

    def _once(self) -> tuple[int, int]:
        """Index and status of the process that failed first, or (0, 0); starts all processes and waits for them."""
        processes = list(self._make())
        logs: list[IO[bytes]] = []
        try:
            for process in processes:
                if process.log is not None:
                    process.log.parent.mkdir(parents=True, exist_ok=True)
                    logs.append(process.log.open("ab"))
                self._running.append(
                    subprocess.Popen(
                        process.command,
                        env={**os.environ, **process.environment},
                        stdout=logs[-1] if process.log is not None else None,
                        stderr=subprocess.STDOUT if process.log is not None else None,
                        # In a session of its own: a Ctrl-C reaches the supervisor alone, which forwards it once.
                        start_new_session=True,
                    )
                )
            first = self._wait()
            if first is None:
                return 0, 0
            number, code = first
            log = processes[number].log
            if log is not None and not self._stopping:
                lines = log.read_text(errors="replace").splitlines()[-15:]
                self._say("\n  ".join([f"the end of {log}:", *lines]))
            return number, code
        finally:
            self._kill()
            for log in logs:
                log.close()

    def _wait(self) -> tuple[int, int] | None:
        """Index and status of the process that failed first, once all have ended; None if none failed.

        One that ended as it was told to comes before others, which may have noticed that before it was gone.
        """
        first: tuple[int, int] | None = None
        until = float("inf")
        while True:
            codes = [process.poll() for process in self._running]
            if first is None:
                failed = [(number, code) for number, code in enumerate(codes) if code]
                if failed:
                    first, until = failed[0], time.monotonic() + self._patience.grace
            if None not in codes:
                return next(((number, code) for number, code in enumerate(codes) if code in WANTED), first)
            if time.monotonic() > until and not self._stopping:
                self._kill()
            time.sleep(POLL)

    def _sleep(self, seconds: float) -> bool:
        """Whether the pause passed without a signal to stop."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._stopping:
            time.sleep(min(POLL, seconds))
        return not self._stopping

    def _pass_on(self, number: int, frame: object) -> None:
        if number in (signal.SIGINT, signal.SIGTERM):
            self._stopping = number
        for process in self._running:
            if process.poll() is None:
                process.send_signal(number)

    def _kill(self) -> None:
        for process in self._running:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._running.clear()


def describe_exit(code: int) -> str:
    """Exit status in words: ``ended with status 1``, ``was killed by SIGKILL``."""
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def local_processes(
    command: Sequence[str],
    processes: int,
    *,
    devices: int = 0,
    logs: Path = Path("runs/logs"),
    slots: Sequence[int] | None = None,
    coordinator: str = "",
    variables: Mapping[str, str] | None = None,
) -> list[ProcessSpec]:
    """Processes of a local cluster on this machine; the first one prints, the others write to log files.

    Args:
        command: program and arguments of each process.
        processes: number of processes.
        devices: devices per process: CPU devices where JAX_PLATFORMS is cpu, else a share of the accelerators; 0 leaves
            it to JAX.
        logs: folder of the log files.
        slots: place of each process, which says its accelerators and its log file; None: its number.
        coordinator: ``HOST:PORT``; "": a free port of this machine.
        variables: further variables of all processes.

    Raises:
        ValueError: ``processes`` is less than 1.
    """
    if processes < 1:
        raise ValueError(f"{processes} processes; give 1 or more.")
    address = coordinator or f"127.0.0.1:{free_port()}"
    found = []
    for number, slot in enumerate(range(processes) if slots is None else slots):
        environment = {**(variables or {}), **process_variables(number, processes, address)}
        if devices and os.environ.get("JAX_PLATFORMS") == "cpu":
            environment["JAX_NUM_CPU_DEVICES"] = str(devices)
        elif devices:
            share = range(slot * devices, (slot + 1) * devices)
            environment["JAXLLM_LOCAL_DEVICES"] = ",".join(map(str, share))
        found.append(ProcessSpec(tuple(command), environment, None if number == 0 else logs / f"process_{slot}.log"))
    return found


def process_variables(number: int, processes: int, coordinator: str) -> dict[str, str]:
    """Variables that tell a process its number, the number of all processes, and the coordinator's ``HOST:PORT``."""
    return {
        "JAXLLM_COORDINATOR": coordinator,
        "JAXLLM_PROCESSES": str(processes),
        "JAXLLM_PROCESS_ID": str(number),
    }


def free_port() -> int:
    """TCP port of this machine that is free at the moment."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
