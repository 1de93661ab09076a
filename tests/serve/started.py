"""``jaxllm serve`` as a process, from its start: what it prints, when it is ready, and that nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests import environment


class ServeProcess:
    """Process of ``jaxllm serve``, in a session of its own, whose standard error is read as it comes.

    Args:
        arguments: after ``jaxllm serve``.
        cache: its ``$JAXLLM_CACHE``.
    """

    def __init__(self, *arguments: str, cache: Path):
        variables = os.environ | {"JAXLLM_CACHE": str(cache), "JAX_PLATFORMS": "cpu"}
        variables.pop("JAX_COMPILATION_CACHE_DIR", None)
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jaxllm.cli", "serve", *arguments], env=variables, cwd=environment.ROOT,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    def wait_for(self, holds: Callable[[str], bool], seconds: float = 300) -> str:
        """First line of which something holds.

        Raises:
            AssertionError: there is none, or the process has ended.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if (found := next((line for line in self.lines if holds(line)), None)) is not None:
                return found
            assert self.process.poll() is None, self.lines
            time.sleep(0.02)
        raise AssertionError(self.lines)

    def end(self, *signals: int, seconds: float = 5.0) -> float:
        """Sends signals and waits for the end; returns the seconds that it took.

        Raises:
            subprocess.TimeoutExpired: it lives on.
        """
        began = time.monotonic()
        for number in signals:
            self.process.send_signal(number)
        self.process.wait(seconds)
        took = time.monotonic() - began
        self._reader.join(5)
        return took

    @property
    def children(self) -> list[int]:
        """Processes of its session that are alive, itself included."""
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                with contextlib.suppress(OSError):
                    fields = (path / "stat").read_text().rpartition(")")[2].split()
                    if int(fields[3]) == self.process.pid and fields[0] != "Z":
                        found.append(int(path.name))
        return found

    def kill(self) -> None:
        """Ends its session, if anything of it is left."""
        for pid in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextlib.contextmanager
def started(*arguments: str, cache: Path | None = None) -> Iterator[ServeProcess]:
    """A server that starts; nothing of it is left afterwards. Without ``cache``, with an empty one."""
    with tempfile.TemporaryDirectory() as folder:
        one = ServeProcess(*arguments, cache=cache or Path(folder))
        try:
            yield one
        finally:
            one.kill()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
