"""A supervisor: starts processes together, and starts all of them again when one is lost.

    every process ended with 0        the end
    a mistake of the user's (2)       the end: another start would make it again
    SIGTERM, SIGINT                   passed on; the processes save and end, and so does the supervisor
    SIGUSR1, SIGUSR2                  passed on (a run takes a profile at SIGUSR2)
    anything else                     the others get a while to end, then all start again, after a pause that doubles

A run that is started again goes on from its newest checkpoint, so nothing here knows about steps.
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
POLL = 0.1


@dataclass(frozen=True)
class RestartPolicy:
    """How often and how soon to start again.

    Attributes:
        restarts: failures in a row after which it is given up.
        pause: seconds before the first of them; each further one waits twice as long.
        longest: seconds of a pause at most.
        healthy: seconds that processes have to run for a failure not to count as in a row.
        grace: seconds that the others get to end by themselves when one has failed.
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
        """Seconds before the start after so many failures in a row."""
        return min(self.longest, self.pause * 2.0 ** (failures - 1))


@dataclass(frozen=True)
class ProcessSpec:
    """One of the processes to be started.

    Attributes:
        command: its words.
        environment: what is added to this process's own.
        log: where what it says goes; None: where this process's goes.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    log: Path | None = None

    def __str__(self) -> str:
        """As a line of a shell."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        line = " ".join([*words, shlex.join(self.command)])
        return line if self.log is None else f"{line} >> {shlex.quote(str(self.log))} 2>&1"


class Supervisor:
    """Runs the processes that ``make`` gives, anew for each start, until they have done their work.

    Args:
        make: the processes of a start.
        say: takes a line for the user.
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
        """The exit status of it all: 0, or that of the process that failed first."""
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
                if code in (USER_ERROR, 128 + signal.SIGINT, 128 + signal.SIGTERM):
                    self._say(f"process {number} {what}; not started again")
                    return code
                lived = time.monotonic() - began
                failures = 1 if lived >= self._patience.healthy else failures + 1
                if failures > self._patience.restarts:
                    self._say(f"process {number} {what}; given up after {self._patience.restarts} starts in a row")
                    return code if code > 0 else 128 - code
                pause = self._patience.wait(failures)
                self._say(f"process {number} {what} after {lived:.0f} s; all start again in {pause:g} s")
                if not self._sleep(pause):
                    return 128 + self._stopping
        finally:
            self._kill()
            for each, handler in old.items():
                signal.signal(each, handler)

    def _once(self) -> tuple[int, int]:
        """Starts all, waits for all; the first that failed and its status, or (0, 0)."""
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
                        # A Ctrl-C of the terminal comes to this process alone, which passes it on once.
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
        """Until all have ended: the first that failed."""
        first: tuple[int, int] | None = None
        until = float("inf")
        while True:
            codes = [process.poll() for process in self._running]
            if first is None:
                failed = [(number, code) for number, code in enumerate(codes) if code]
                if failed:
                    first, until = failed[0], time.monotonic() + self._patience.grace
            if None not in codes:
                return first
            if time.monotonic() > until and not self._stopping:
                self._kill()
            time.sleep(POLL)

    def _sleep(self, seconds: float) -> bool:
        """False if a signal came meanwhile."""
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
    """``ended with status 1``, ``was killed by SIGKILL``."""
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def local_processes(
    command: Sequence[str], processes: int, *, devices: int = 0, logs: Path = Path("runs/logs")
) -> list[ProcessSpec]:
    """So many processes on this machine that find each other, the first of which speaks.

    Args:
        devices: of each process: CPU devices where JAX_PLATFORMS is cpu, else its share of the machine's accelerators;
            0 leaves it to jax.

    Raises:
        ValueError: no process.
    """
    if processes < 1:
        raise ValueError(f"{processes} processes; give 1 or more.")
    address = f"127.0.0.1:{free_port()}"
    found = []
    for number in range(processes):
        environment = {
            "JAXLLM_COORDINATOR": address,
            "JAXLLM_PROCESSES": str(processes),
            "JAXLLM_PROCESS_ID": str(number),
        }
        if devices and os.environ.get("JAX_PLATFORMS") == "cpu":
            environment["JAX_NUM_CPU_DEVICES"] = str(devices)
        elif devices:
            share = range(number * devices, (number + 1) * devices)
            environment["JAXLLM_LOCAL_DEVICES"] = ",".join(map(str, share))
        found.append(ProcessSpec(tuple(command), environment, None if number == 0 else logs / f"process_{number}.log"))
    return found


def free_port() -> int:
    """Of this machine, at the moment."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
