"""Agent of a host in an elastic run over several machines: starts the processes that the supervisor asks for.

    the agent connects        {"slot": 3, "host": "node3", "port": 40001}
    the supervisor asks       {"id": 0, "arguments": [...], "environment": {...}, "log": FILE or null}
    it answers                {"id": 0, "pid": 4711, "port": 40002}, and {"id": 0, "status": -9} at the process's end
    the supervisor signals    {"id": 0, "signal": 9}
    the run is over           {"over": 0}: the exit status of the run, with which the agent ends

A port is one that is free on the host, for the coordinator of the next processes. When the supervisor is gone, the
agent kills its processes and connects anew, because a scheduler may have started the supervisor again elsewhere.
"""

from __future__ import annotations

import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxllm.parallel.elastic.host_link import HostLink
from jaxllm.parallel.elastic.warm_start import WarmProcess, WarmStart
from jaxllm.parallel.supervisor import free_port

POLL = 0.02
RETRY = 0.5
"""Seconds between two attempts to connect."""
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a scheduler sends to all hosts; the supervisor passes them on to the processes."""


class HostAgent:
    """Agent of one host.

    Args:
        supervisor: host name and port of the supervisor.
        slot: number of this host.
        entry, modules: see ``WarmStart``.
        within: seconds in which the supervisor has to be found, at the start and when it was lost.
        say: prints a line for the user.
    """

    def __init__(
        self,
        supervisor: tuple[str, int],
        slot: int,
        entry: str,
        modules: Sequence[str],
        within: float,
        say: Callable[[str], None],
    ):
        self._supervisor, self._slot, self._entry, self._modules = supervisor, slot, entry, modules
        self._within, self._say = within, say
        self._running: dict[int, WarmProcess] = {}
        self._told: set[int] = set()  # processes whose pid the supervisor knows

    def run(self) -> int:
        """Serves the supervisor until the run is over; exit status of the run, or 1 if there is no supervisor."""
        old = {number: signal.signal(number, signal.SIG_IGN) for number in IGNORED}
        starter = WarmStart(self._entry, self._modules, {})
        try:
            while (connection := self._connect()) is not None:
                if not starter.alive:
                    starter = WarmStart(self._entry, self._modules, {})
                link = HostLink(connection)
                code = self._serve(link, starter)
                link.close()
                self._kill()
                if code is not None:
                    return code
                self._say(f"slot {self._slot}: the supervisor is gone; its processes here are ended")
            host, port = self._supervisor
            self._say(f"slot {self._slot}: no supervisor at {host}:{port} for {self._within:g} s")
            return 1
        finally:
            self._kill()
            starter.close()
            for number, handler in old.items():
                signal.signal(number, handler)

    def _connect(self) -> socket.socket | None:
        until = time.monotonic() + self._within
        while time.monotonic() < until:
            try:
                return socket.create_connection(self._supervisor, timeout=max(RETRY, until - time.monotonic()))
            except OSError:
                time.sleep(RETRY)
        return None

    def _serve(self, link: HostLink, starter: WarmStart) -> int | None:
        """Does what the supervisor asks; exit status of the run, or None when the link is lost."""
        asked: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

        def listen() -> None:
            for message in link.receive():
                asked.put(message)
            asked.put(None)

        threading.Thread(target=listen, name="jaxllm-host-agent", daemon=True).start()
        link.send(slot=self._slot, host=socket.gethostname(), port=free_port())
        while True:
            try:
                message = asked.get(timeout=POLL)
            except queue.Empty:
                self._tell(link)
                continue
            if message is None:
                return None
            if "over" in message:
                return message["over"]
            if "signal" in message:
                if (process := self._running.get(message["id"])) is not None:
                    process.send_signal(message["signal"])
            else:
                log = message["log"] and Path(message["log"])
                started = starter.start(message["arguments"], message["environment"], log)
                self._running[message["id"]] = started

    def _tell(self, link: HostLink) -> None:
        """Tells what has started and ended since the last time."""
        for number, process in list(self._running.items()):
            if process.pid is not None and number not in self._told:
                self._told.add(number)
                link.send(id=number, pid=process.pid, port=free_port())
            if (status := process.poll()) is not None:
                del self._running[number]
                self._told.discard(number)
                link.send(id=number, status=status)

    def _kill(self) -> None:
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.wait()
        self._running.clear()
        self._told.clear()
