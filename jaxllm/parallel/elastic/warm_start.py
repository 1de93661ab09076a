"""Warm start: starts processes by forking one that has imported everything, so that a restart costs no imports.

The server imports modules and waits. For each request it forks a child, which calls the entry point as a fresh process
would. No JAX backend is ever started in the server and it has one thread, so that forking it is safe. Variables that
JAX reads when it is imported must be in the environment of the server; those of a request are set in its child alone.

    python -m jaxllm.parallel.elastic.warm_start ANSWERS ENTRY MODULE...

Requests on stdin and answers on the file descriptor ANSWERS are lines of JSON:

    {"id": 3, "arguments": [...], "environment": {...}, "log": FILE or null}   ->   {"id": 3, "pid": 4711}
                                                                               and  {"id": 3, "status": -9} at its end

When stdin closes, the server sends SIGTERM to its children, waits for them and ends.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.parallel.supervisor import describe_exit

POLL = 0.02
"""Seconds between two looks at the children."""


class WarmProcess:
    """Process that a warm start has forked; has what ``subprocess.Popen`` has, as far as supervisors use it.

    Attributes:
        pid: process id; None until it is known.
        returncode: exit status, negative for a signal; None while it runs.
    """

    def __init__(self) -> None:
        self.pid: int | None = None
        self.returncode: int | None = None
        self.started = threading.Event()
        self.ended = threading.Event()

    def poll(self) -> int | None:
        """Exit status; None while the process runs."""
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.started.wait(60) and self.pid is not None and self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills the process; a stopped one dies too."""
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int | None:
        """Waits for the end."""
        self.ended.wait()
        return self.returncode

    def give_up(self) -> None:
        """Kills a process that has failed; its end need not be waited for."""
        self.kill()

    def runnable(self) -> bool:
        """Whether a thread of the process runs or waits for a processor."""
        return self.pid is not None and is_runnable(self.pid)

    def describe_end(self) -> str:
        """End in words, such as ``was killed by SIGKILL``."""
        return describe_exit(self.returncode or 0)


def is_runnable(pid: int) -> bool:
    """Whether a thread of a process runs or waits for a processor; a stopped process has none."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False


class WarmStart:
    """Client of a server that forks processes.

    Args:
        entry: MODULE:FUNCTION, which takes the arguments and returns the exit status.
        modules: modules that the server imports besides.
        environment: variables of the server and all its children.
    """

    def __init__(self, entry: str, modules: Sequence[str], environment: Mapping[str, str]):
        answers, theirs = os.pipe()
        module = "jaxllm.parallel.elastic.warm_start"
        self._server = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs), entry, *modules],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            text=True,
            pass_fds=[theirs],
            start_new_session=True,
        )
        os.close(theirs)
        self._answers = os.fdopen(answers)
        self._known: list[WarmProcess] = []
        self._listener = threading.Thread(target=self._listen, name="warm-start", daemon=True)
        self._listener.start()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path | None) -> WarmProcess:
        """Forks a process.

        Raises:
            RuntimeError: the server has ended.
        """
        process = WarmProcess()
        self._known.append(process)
        about = {
            "id": len(self._known) - 1,
            "arguments": list(arguments),
            "environment": dict(environment),
            "log": None if log is None else str(log),
        }
        assert self._server.stdin is not None
        try:
            self._server.stdin.write(json.dumps(about) + "\n")
            self._server.stdin.flush()
        except OSError as error:
            raise RuntimeError(f"the process that starts others has ended ({error}).") from error
        return process

    @property
    def alive(self) -> bool:
        """Whether the server can fork."""
        return self._server.poll() is None

    def close(self) -> None:
        """Ends the server, and its processes with SIGTERM."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()
        self._listener.join()
        self._answers.close()

    def _listen(self) -> None:
        for line in self._answers:
            about = json.loads(line)
            process = self._known[about["id"]]
            if "pid" in about:
                process.pid = about["pid"]
                process.started.set()
            else:
                process.returncode = about["status"]
                process.ended.set()
        for process in self._known:  # the server has ended, and nobody would learn of their end
            if process.returncode is None:
                process.kill()
                process.returncode = -signal.SIGKILL
                process.ended.set()


def serve(answers: int, entry: str, modules: Sequence[str]) -> None:
    """Serves requests until stdin closes."""
    main = pkgutil.resolve_name(entry)
    for name in modules:
        importlib.import_module(name)
    running: dict[int, int] = {}  # pid -> id
    buffer = b""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([0], [], [], POLL)
        if ready:
            data = os.read(0, 2**16)
            if not data:
                break
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                if not (pid := os.fork()):
                    os.close(answers)
                    _become(main, request)
                running[pid] = request["id"]
                _answer(answers, id=request["id"], pid=pid)
        _reap(answers, running)
    for pid in running:
        os.kill(pid, signal.SIGTERM)
    while running:
        time.sleep(POLL)
        _reap(answers, running)


def _become(main: Callable[[list[str]], int | None], request: dict[str, Any]) -> None:
    """Calls the entry point in a forked child; does not return."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if request["log"] is not None:
            Path(request["log"]).parent.mkdir(parents=True, exist_ok=True)
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
        os.environ.update(request["environment"])
        sys.argv = [sys.argv[0], *request["arguments"]]
        status = main(request["arguments"]) or 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)


def _reap(answers: int, running: dict[int, int]) -> None:
    for pid in list(running):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            _answer(answers, id=running.pop(pid), status=os.waitstatus_to_exitcode(status))


def _answer(answers: int, **about: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # the supervisor is gone, and stdin says so too
        os.write(answers, json.dumps(about).encode() + b"\n")


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
