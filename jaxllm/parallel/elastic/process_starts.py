"""Process starts: where the processes of an elastic run's slots are started, on this machine or on many.

LocalStarts    one machine; slots are places on it
HostStarts     many machines; a slot is a host, whose agent (``host_agent``) starts the process there
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from jaxllm.parallel.elastic.host_link import HostLink
from jaxllm.parallel.elastic.warm_start import WarmProcess, WarmStart
from jaxllm.parallel.supervisor import ProcessSpec, free_port

GONE = 10.0
"""Seconds that a host gets to end a process that was killed."""
HELLO = 5.0
"""Seconds that a new connection gets to say which host it is."""


@runtime_checkable
class ProcessStarts(Protocol):
    """Places where processes are started, one for each slot."""

    def start(self, slot: int, spec: ProcessSpec) -> WarmProcess:
        """Starts the process of a slot."""
        ...

    def available(self) -> frozenset[int]:
        """Slots in which a process can be started now."""
        ...

    def coordinator(self, slot: int) -> str:
        """``HOST:PORT``, free at the moment, at which a process of a slot can coordinate the others."""
        ...

    def place(self, slot: int) -> str:
        """The slot in words: its number, and its host where there are several."""
        ...

    def slot_of(self, name: str) -> int | None:
        """The slot of that number, or of the host of that name; None if there is none yet."""
        ...

    def close(self, code: int) -> None:
        """Ends everything that waits for processes to start; ``code`` is the exit status of the run."""
        ...


class LocalStarts:
    """Starts on this machine.

    Args:
        slots: number of slots.
        entry, modules, environment: see ``WarmStart``.
    """

    def __init__(self, slots: int, entry: str, modules: Sequence[str] = (), environment: Mapping[str, str] = {}):
        self._slots, self._arguments = slots, (entry, modules, environment)
        self._starter = WarmStart(*self._arguments)

    def start(self, slot: int, spec: ProcessSpec) -> WarmProcess:
        """Forks a process, by a new server if the old one has ended."""
        if not self._starter.alive:
            self._starter = WarmStart(*self._arguments)
        return self._starter.start(spec.command, spec.environment, spec.log)

    def available(self) -> frozenset[int]:
        """All slots."""
        return frozenset(range(self._slots))

    def coordinator(self, slot: int) -> str:
        """An address of this machine."""
        return f"127.0.0.1:{free_port()}"

    def place(self, slot: int) -> str:
        """The number."""
        return f"slot {slot}"

    def slot_of(self, name: str) -> int | None:
        """The slot of that number."""
        return int(name) if name.isdecimal() and int(name) < self._slots else None

    def close(self, code: int) -> None:
        """Ends the server that forks."""
        self._starter.close()


class RemoteProcess(WarmProcess):
    """Process on another host.

    Args:
        link: to the host's agent; None if it has gone.
        number: by which the agent knows it.
    """

    def __init__(self, link: HostLink | None, number: int):
        super().__init__()
        self._link, self._number = link, number
        self._vanished = False

    def send_signal(self, number: int) -> None:
        """Asks the agent to send a signal."""
        if self._link is not None:
            self._link.send(id=self._number, signal=int(number))

    def wait(self) -> int | None:
        """Waits for the end; a host that does not tell it within ``GONE`` seconds counts as lost."""
        if not self.ended.wait(GONE) and self._link is not None:
            self._link.close()
            self.ended.wait()
        return self.returncode

    def give_up(self) -> None:
        """Asks the agent to kill the process, and does not wait: its host may hang too."""
        self.kill()
        self.vanish()

    def runnable(self) -> bool:
        """False: that cannot be seen from here."""
        return False

    def describe_end(self) -> str:
        """End in words: as of other processes, or that its host is gone."""
        return "has lost its host, which does not answer," if self._vanished else super().describe_end()

    def end(self, status: int) -> None:
        """Marks the process as ended, unless it has been already."""
        if self.returncode is None:
            self.returncode = status
            self.ended.set()

    def vanish(self) -> None:
        """Marks the process as ended because nothing is heard of its host."""
        self._vanished = self.returncode is None
        self.end(-signal.SIGKILL)


class _Host:
    """Host whose agent is connected."""

    def __init__(self, link: HostLink, name: str, address: str, port: int):
        self.link, self.name, self.address, self.port = link, name, address, port
        self.processes: dict[int, RemoteProcess] = {}


class HostStarts:
    """Starts on many machines: on this one, which has slot 0, and on those whose agents have connected.

    Anybody who reaches the port can pose as an agent, as anybody can join ``jax.distributed``: use it in a network that
    you trust.

    Args:
        hosts: number of hosts.
        address: host name and port of this machine at which the agents connect.
        entry, modules: see ``WarmStart``.
    """

    def __init__(self, hosts: int, address: tuple[str, int], entry: str, modules: Sequence[str] = ()):
        self._count, self._name = hosts, address[0]
        self._hosts: dict[int, _Host] = {}
        self._names = {0: socket.gethostname()}
        self._started = 0
        self._lock = threading.Lock()
        self._listening = socket.create_server(("", address[1]), backlog=max(hosts, 128))
        self._here = LocalStarts(1, entry, modules)
        threading.Thread(target=self._accept, name="jaxllm-host-starts", daemon=True).start()

    def start(self, slot: int, spec: ProcessSpec) -> WarmProcess:
        """Starts a process here, or asks the agent of its host."""
        if slot == 0:
            return self._here.start(slot, spec)
        with self._lock:
            host, self._started = self._hosts.get(slot), self._started + 1
            number = self._started
            process = RemoteProcess(host and host.link, number)
            if host is None:  # it has gone since its slot was chosen
                process.vanish()
                return process
            host.processes[number] = process
        log = None if spec.log is None else str(spec.log)
        host.link.send(id=number, arguments=list(spec.command), environment=dict(spec.environment), log=log)
        return process

    def available(self) -> frozenset[int]:
        """Slots whose agents are connected, and this machine's."""
        with self._lock:
            return frozenset({0, *self._hosts})

    def coordinator(self, slot: int) -> str:
        """An address of the slot's host, as others reach it."""
        with self._lock:
            host = self._hosts.get(slot)
        return f"{self._name}:{free_port()}" if host is None else f"{host.address}:{host.port}"

    def place(self, slot: int) -> str:
        """The number and the host's name."""
        return f"slot {slot} on {self._names[slot]}" if slot in self._names else f"slot {slot}"

    def slot_of(self, name: str) -> int | None:
        """The host of that name, with or without its domain, or of that number."""
        if name.isdecimal():
            return int(name) if int(name) < self._count else None
        found = (slot for slot, host in dict(self._names).items() if host.split(".")[0] == name.split(".")[0])
        return next(found, None)

    def close(self, code: int) -> None:
        """Tells the agents that the run is over."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with self._lock:
            hosts = list(self._hosts.values())
        for host in hosts:
            host.link.send(over=code)
        self._here.close(code)

    def _accept(self) -> None:
        while True:
            try:
                connection, (address, *_) = self._listening.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection, address), daemon=True).start()

    def _serve(self, connection: socket.socket, address: str) -> None:
        link = HostLink(connection)
        unknown = threading.Timer(HELLO, link.close)
        unknown.start()
        messages = link.receive()
        hello = next(messages, {})
        unknown.cancel()
        slot, port = hello.get("slot"), hello.get("port")
        if not isinstance(slot, int) or not 0 < slot < self._count or not isinstance(port, int):
            return link.close()
        # An agent on this machine may have connected over the loopback, by which others do not reach it.
        here = address.startswith("127.") or address == "::1"
        host = _Host(link, str(hello.get("host")), self._name if here else address, port)
        with self._lock:
            before, self._hosts[slot] = self._hosts.get(slot), host
            self._names[slot] = host.name
        if before is not None:  # the newer one counts: the host was started again before its end was noticed
            before.link.close()
        for message in messages:
            host.port = message.get("port", host.port)
            if (process := host.processes.get(message.get("id", 0))) is None:
                continue
            if "pid" in message:
                process.pid = message["pid"]
                process.started.set()
            elif "status" in message:
                del host.processes[message["id"]]
                process.end(message["status"])
        with self._lock:
            if self._hosts.get(slot) is host:
                del self._hosts[slot]
            processes = list(host.processes.values())
        for process in processes:
            process.vanish()
