"""Peer storage: the memory of all peer servers as one file system; some files lie on one host, some on every one."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jaxllm.checkpoint.checkpoint_reader import META
from jaxllm.checkpoint.errors import CheckpointError
from jaxllm.checkpoint.memory.peer_server import receive, send
from jaxllm.checkpoint.storage import checkpoint_manifest as manifest_lib
from jaxllm.checkpoint.storage.array_store import is_chunk
from jaxllm.checkpoint.storage.leaf_hashing import hash_array

REPLICATED_FILES = (META, manifest_lib.NAME)
"""Files that every server has: they describe the others."""
START_TIMEOUT = 60.0
TALK_TIMEOUT = 60.0


class BytesRead(NamedTuple):
    """Bytes of arrays that processes have read from their own host's peer server, and from those of other hosts."""

    own: int = 0
    peers: int = 0


class PeerLost(OSError):
    """A peer server does not answer any more."""


class PeerClient:
    """Client of one host's peer server.

    Args:
        address_file: file in which the server says how it is reached.
        prefix: begins the names of all files that this client stores, reads or lists; it is not part of answers.
    """

    def __init__(self, rank: int, address_file: Path, prefix: str = ""):
        self.rank, self._file, self._prefix = rank, address_file, prefix
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()

    def ensure(self, linger: float) -> bool:
        """Starts the server if it does not run; returns whether it was running."""
        if self.alive():
            return True
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.unlink(missing_ok=True)
        subprocess.run(
            [sys.executable, "-m", "jaxllm.checkpoint.memory.peer_server", str(self._file), str(linger)],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until = time.monotonic() + START_TIMEOUT
        while not self.alive():
            if time.monotonic() > until:
                raise CheckpointError(f"the process that holds snapshots in memory did not start ({self._file}).")
            time.sleep(0.02)
        return False

    def alive(self) -> bool:
        """Whether the server answers."""
        try:
            self.request("sizes", name="-")
        except OSError:
            return False
        return True

    def request(self, do: str, data: np.ndarray | None = None, **head: Any) -> tuple[Any, np.ndarray]:
        """Sends a request and returns the answer.

        Raises:
            PeerLost: the server does not answer.
        """
        if "name" in head:
            head["name"] = self._prefix + head["name"]
        with self._lock:
            try:
                address = json.loads(self._file.read_bytes())
                if self._connection is None:
                    self._connection = self._connect(address)
                send(self._connection, {"do": do, "secret": address["secret"], **head}, data)
                answer, out = receive(self._connection)
            except (OSError, ValueError) as error:
                self.close()
                raise PeerLost(f"the peer server of host {self.rank} does not answer: {error}") from error
        result = answer["result"]
        if do == "sizes":
            result = {name.removeprefix(self._prefix): size for name, size in result.items()}
        return result, out

    def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self, address: dict[str, Any]) -> socket.socket:
        host = "127.0.0.1" if address["host"] == socket.gethostname() else address["host"]
        connection = socket.create_connection((host, address["port"]), TALK_TIMEOUT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


class PeerStorage:
    """File system in the memory of peer servers: a process writes to its own host's server and reads from any.

    Args:
        folder: folder of the servers' address files, visible to all hosts.
        rank, size: number of this host, and of all hosts; rank None: this host is not one of them.
        slots: number in the name of each host's address file; None: that of the host.
        name: name of a generation of hosts, whose files are apart from those of others; empty: none.

    Attributes:
        bytes_read: bytes of arrays that this process has read from its own host's server, and from those of others.
    """

    renames = False

    def __init__(self, folder: Path, rank: int | None, size: int, slots: Sequence[int] | None = None, name: str = ""):
        self.folder, self._own, self._name = folder, rank, name
        self.bytes_read = BytesRead()
        self._counting = threading.Lock()
        numbers = range(size) if slots is None else slots
        prefix = f"{name}/" if name else ""
        self.clients = [PeerClient(rank, folder / f"{slot}.json", prefix) for rank, slot in enumerate(numbers)]

    def __str__(self) -> str:
        generation = f", {self._name}" if self._name else ""
        return f"the memory of {len(self.clients)} hosts ({self.folder}{generation})"

    def close(self) -> None:
        """Closes the connections; the servers keep running."""
        for client in self.clients:
            client.close()

    @property
    def rank(self) -> int:
        """Number of this host."""
        assert self._own is not None, "this host is not one of these"
        return self._own

    @property
    def own(self) -> PeerClient:
        """Client of this host's server."""
        return self.clients[self.rank]

    def make(self, name: str) -> None:
        """Does nothing: folders are only prefixes of names."""

    def names(self, folder: str = "") -> list[str]:
        """Names below a prefix, on any server."""
        below = f"{folder}/" if folder else ""
        return sorted({name[len(below) :].split("/")[0] for name in self._sizes(below)})

    def walk(self, folder: str) -> dict[str, int]:
        """Bytes of every file below a prefix, on any server."""
        return {name[len(folder) + 1 :]: size for name, size in sorted(self._sizes(f"{folder}/").items())}

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if no server has it."""
        return self._sizes(name).get(name)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Contents of a file, from the first server that has it: this host's before others."""
        return self._first(name, "get", begin=begin, end=end)[1]

    def read_slice(
        self, name: str, shape: Sequence[int], width: int, spans: Sequence[tuple[int, int]]
    ) -> tuple[np.ndarray, str]:
        """Bytes of a slice of an array, from the first server that has it, and the hash of the whole file there.

        Raises:
            FileNotFoundError: no server has it.
            OSError: other bytes have arrived than were sent.
        """
        said, data = self._first(name, "slice", shape=list(shape), width=width, spans=list(spans))
        if hash_array(data) != said["part"]:
            raise OSError(f"a slice of {name} has arrived with other bytes than its server has sent")
        return data, said["whole"]

    def _first(self, name: str, do: str, **head: Any) -> tuple[Any, np.ndarray]:
        """Answer of the first server that has a file: this host's before others."""
        for client in sorted(self.clients, key=lambda client: client.rank != self._own):
            with contextlib.suppress(PeerLost):
                found, data = client.request(do, name=name, **head)
                if found:
                    self._count(name, client, data.nbytes)
                    return found, data
        raise FileNotFoundError(f"{name} is on no peer server")

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Opens a new file on this host's server for writing."""
        out = io.BytesIO()
        yield out
        data = np.frombuffer(out.getbuffer(), np.uint8)
        everywhere = name.rsplit("/", 1)[-1] in REPLICATED_FILES
        for client in self.clients if everywhere else [self.own]:
            client.request("put", data, name=name)

    def rename(self, name: str, to: str) -> None:
        """Renames one file, on every server that has it."""
        for client in self.clients:
            with contextlib.suppress(PeerLost):
                found, data = client.request("get", name=name, begin=0, end=None)
                if found:
                    client.request("put", data, name=to)
                    client.request("drop", name=name)

    def remove(self, name: str) -> None:
        """Removes a file, or all files below a prefix, on every server."""
        for client in self.clients:
            with contextlib.suppress(PeerLost):
                client.request("drop", name=name)

    def sync(self, names: Iterable[str]) -> None:
        """Does nothing: memory needs no flush."""

    def _count(self, name: str, client: PeerClient, size: int) -> None:
        if is_chunk(name.partition("/")[2]):
            with self._counting:
                own, peers = self.bytes_read
                mine = client.rank == self._own
                self.bytes_read = BytesRead(own + size, peers) if mine else BytesRead(own, peers + size)

    def _sizes(self, name: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for client in self.clients:
            with contextlib.suppress(PeerLost):
                found |= client.request("sizes", name=name)[0]
        return found
