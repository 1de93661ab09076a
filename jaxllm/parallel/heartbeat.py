"""Heartbeat between processes: detects a lost process, and ends the others with a message that names it.

Each process periodically writes a counter to the key-value store. Process 0 reads all counters and publishes the rank
of a process whose counter stands still; the others poll for that. A process that learns of a loss says so on stderr and
exits, because its devices would wait forever for those of the lost process.

The store dies with process 0, and JAX then aborts the others within a second, in C++. So each process has a child, a
few lines of Python without JAX, that prints a message when its parent ends without a goodbye: killed, aborted or out of
memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

from jaxllm.parallel.cluster_environment import ClusterEnvironment

EXIT = 75
"""Exit status of a process that ends because another one did: EX_TEMPFAIL, "try again"."""

RESUME = "Start all processes again with the same command: the run resumes from its newest checkpoint."
"""What to do when a training run has lost a process."""
POLL = 1.0
"""Seconds, at most, until a process reads that another one has ended."""

_LOST = "jaxllm/lost"
_BEAT = "jaxllm/beat"

# Program of the child: reads from its parent until the pipe closes. It ignores the signals of a terminal.
_LAST_WORD = """
import signal, socket, sys
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
rank, processes, address, advice = sys.argv[1:]
if sys.stdin.read().endswith("goodbye\\n"):
    sys.exit()
why = "it was killed, or ran out of memory."
if rank != "0":
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), 5).close()
    except OSError:
        why = f"process 0 of {processes}, at {address}, has vanished: it no longer answers."
sys.stderr.write(f"\\nerror: process {rank} of {processes} has ended: {why} {advice}\\n")
"""


class Heartbeat:
    """Heartbeat of the processes of a cluster, for the time of a ``with`` block.

    Args:
        lost_after: seconds without a heartbeat after which a process counts as lost.
        advice: what its user does when a process was lost; ends the messages.
    """

    def __init__(self, cluster: ClusterEnvironment, lost_after: float, advice: str = RESUME):
        self._cluster, self._lost_after, self._advice = cluster, lost_after, advice
        self._period = min(lost_after / 5, 5.0)
        self._poll = min(self._period, POLL)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: Any = None
        self._ending = threading.Lock()

    def __enter__(self) -> Heartbeat:
        arguments = [str(self._cluster.rank), str(self._cluster.processes), self._cluster.coordinator, self._advice]
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LAST_WORD, *arguments], stdin=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._goodbye()
        self._child.wait()

    def begin(self, store: Any, host: str) -> None:
        """Starts sending and checking heartbeats; call it when all processes are connected."""
        self._store = store
        self._host = host
        self._beat(0)
        self._thread = threading.Thread(target=self._run, name="jaxllm-heartbeat", daemon=True)
        self._thread.start()

    def end(self, why: str, status: int = EXIT) -> NoReturn:
        """Prints why and ends this process, without waiting for its devices."""
        if not self._ending.acquire(blocking=False):
            time.sleep(60)  # another thread is about to end the process
        rank, processes = self._cluster.rank, self._cluster.processes
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        sys.stderr.write(f"\nerror: process {rank} of {processes}: {why} {self._advice}\n")
        sys.stderr.flush()
        self._goodbye()
        os._exit(status)

    def fail(self, error: BaseException, plain: bool = False) -> NoReturn:
        """Ends this process and the others because of ``error``; ``plain`` prints its message without a stack trace."""
        rank = self._cluster.rank
        if _is_of_devices(error):
            # The runtime's error for a lost process: the heartbeat thread will name the process.
            time.sleep(self._lost_after + 2 * self._period)
        if not self._ending.acquire(blocking=False):
            time.sleep(60)
        text = str(error) if plain else "".join(traceback.format_exception(error))
        sys.stderr.write(f"\nerror: process {rank} of {self._cluster.processes}: {text}\n")
        sys.stderr.flush()
        if not getattr(error, "of_all", False):  # otherwise every process raises it by itself
            self._name(f"process {rank} on {self._host} has failed: {type(error).__name__}: {error}")
        if rank == 0:
            time.sleep(2 * self._poll)  # the store dies with this process: let the others read it first
        self._goodbye()
        unexpected = 130 if isinstance(error, KeyboardInterrupt) else 2 if plain else 1
        code = getattr(error, "code", unexpected)  # of SystemExit
        os._exit(code if isinstance(code, int) else unexpected)

    def _run(self) -> None:
        last_seen: dict[int, tuple[str, float]] = {}
        said, count = time.monotonic(), 0
        beaten = -math.inf
        while not self._over.wait(self._poll):
            try:
                if lost := self._read_lost():
                    self.end(lost)
                if time.monotonic() - beaten < self._period:
                    continue
                beaten = time.monotonic()
                count += 1
                self._beat(count)
                beats = self._beats() if self._cluster.rank == 0 else {}
            except Exception as error:
                # The store died with process 0; JAX aborts this process seconds later.
                if not self._over.is_set() and time.monotonic() - said > self._lost_after:
                    self.end(f"process 0 at {self._cluster.coordinator} does not answer ({error}).")
                continue
            said = now = time.monotonic()
            for rank, beat in beats.items():
                if rank not in last_seen or last_seen[rank][0] != beat:
                    last_seen[rank] = (beat, now)
            for rank, (beat, since) in last_seen.items():
                if now - since > self._lost_after:
                    _, host, process = json.loads(beat)
                    lost = (
                        f"process {rank} (on {host}, pid {process}) has vanished: no heartbeat for "
                        f"{self._lost_after:g} s."
                    )
                    self._name(lost)
                    time.sleep(2 * self._poll)  # until the others have read it
                    self.end(lost)

    def _beat(self, count: int) -> None:
        """Writes this process's heartbeat."""
        self._store.key_value_set(f"{_BEAT}/{self._cluster.rank}", json.dumps([count, self._host, os.getpid()]), True)

    def _beats(self) -> dict[int, str]:
        """Last heartbeats of all other processes, by rank."""
        found = self._store.key_value_dir_get(f"{_BEAT}/")
        return {int(key.rsplit("/", 1)[1]): value for key, value in found if not key.endswith("/0")}

    def _read_lost(self) -> str | None:
        try:
            return self._store.key_value_try_get(_LOST)
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def _name(self, who: str) -> None:
        with contextlib.suppress(Exception):  # a lost process is published already, or the store is gone
            self._store.key_value_set(_LOST, who)

    def _goodbye(self) -> None:
        stdin = self._child.stdin
        assert stdin is not None
        with contextlib.suppress(OSError, ValueError):
            stdin.write("goodbye\n")
            stdin.close()


def _is_of_devices(error: BaseException) -> bool:
    """Whether an error may be the effect of another process's end."""
    return type(error).__name__ in ("XlaRuntimeError", "JaxRuntimeError") and "RESOURCE_EXHAUSTED" not in str(error)
