"""Pool link: an authenticated TCP connection between the processes of a prefill pool and a decode pool.

A message is the length of its header (4 bytes, big-endian), the header as JSON, and the raw bytes of its arrays. Before
either end reads a message, both have proved that they know a secret: each sends a nonce, and the HMAC-SHA256 of both
nonces under the secret. Nothing is encrypted. Each end says every second that it is alive, so that a host that has
lost its power is noticed too.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxllm.config import ConfigError
from jaxllm.sockets import receive_exactly

BEAT = 1.0
"""Seconds between two signs of life."""
SILENT = 10.0
"""Seconds without one after which the other end counts as gone; also the time that both have to prove themselves."""
MAX_HEADER_BYTES = 2**24
CHUNK_BYTES = 2**22
_NONCE, _PROOF = 32, 32
_REFUSAL = bytes(_PROOF)


class PoolLinkError(ConnectionError):
    """The other end does not know the secret, or does not speak this protocol."""


@dataclass(frozen=True)
class PoolMessage:
    """Message of a pool link.

    Attributes:
        name: what it is.
        values: JSON values.
        arrays: arrays, of any shapes and dtypes.
    """

    name: str
    values: list[Any]
    arrays: tuple[np.ndarray, ...] = ()


class PoolLink:
    """One end of a connection; both ends have proved themselves, see ``accept`` and ``connect``.

    Args:
        connection: the socket, which the link closes.
        silent: see ``SILENT``.

    Attributes:
        peer: address of the other end.
        reason: why the link is closed; "" while it is open.
    """

    def __init__(self, connection: socket.socket, silent: float = SILENT):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(silent)
        self.peer, self.reason = "{}:{}".format(*connection.getpeername()[:2]), ""
        self._connection, self._silent = connection, silent
        self._lock, self._over, self._said_all = threading.Lock(), threading.Event(), False
        threading.Thread(target=self._say_alive, name="jaxllm-pool-link", daemon=True).start()

    @property
    def open(self) -> bool:
        """Whether neither end has closed the link, as far as this one knows."""
        return not self._over.is_set()

    def send(self, name: str, *values: Any, arrays: Sequence[np.ndarray] = ()) -> None:
        """Sends a message; may be called from any thread. A lost link is told by ``messages`` alone."""
        head = {"name": name, "values": values, "arrays": [[str(x.dtype), x.shape] for x in arrays]}
        text = json.dumps(head).encode()
        try:
            with self._lock:
                if self._said_all:
                    return
                self._connection.sendall(struct.pack(">I", len(text)) + text)
                for x in arrays:
                    data = np.ascontiguousarray(x).reshape(-1).view(np.uint8).data
                    for at in range(0, len(data), CHUNK_BYTES):  # each has `silent` seconds
                        self._connection.sendall(data[at : at + CHUNK_BYTES])
        except OSError as error:
            self.close(_reason(error, self._silent))

    def end_sending(self) -> None:
        """Sends nothing more; the other end reads what was sent, and closes the link.

        Closed at this end with messages unread, the connection would be reset, and what was sent last be lost.
        """
        with self._lock, contextlib.suppress(OSError):
            self._said_all = True
            self._connection.shutdown(socket.SHUT_WR)

    def messages(self) -> Iterator[PoolMessage]:
        """Messages of the other end, until it is gone or the link is closed."""
        while self.open:
            try:
                (length,) = struct.unpack(">I", receive_exactly(self._connection, 4).tobytes())
                if length > MAX_HEADER_BYTES:
                    raise PoolLinkError(f"it sent a header of {length} bytes, which is none of a pool link")
                head = json.loads(receive_exactly(self._connection, length).tobytes())
                arrays = tuple(self._array(jnp.dtype(dtype), shape) for dtype, shape in head["arrays"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                return self.close(_reason(error, self._silent))
            if head["name"] != "alive":
                yield PoolMessage(head["name"], head["values"], arrays)

    def close(self, reason: str = "it was closed here") -> None:
        """Closes the link at both ends."""
        if not self._over.is_set():
            self.reason = reason
            self._over.set()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _array(self, dtype: np.dtype, shape: list[int]) -> np.ndarray:
        count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return receive_exactly(self._connection, count).view(dtype).reshape(shape)

    def _say_alive(self) -> None:
        while not self._over.wait(BEAT):
            self.send("alive")


def accept(connection: socket.socket, secret: bytes, silent: float = SILENT) -> PoolLink:
    """Link over a connection that has come in.

    Raises:
        PoolLinkError: the other end does not know the secret; the connection is closed then.
        OSError: it has gone.
    """
    try:
        connection.settimeout(silent)
        mine = secrets.token_bytes(_NONCE)
        connection.sendall(mine)
        said = receive_exactly(connection, _NONCE + _PROOF).tobytes()
        theirs, proof = said[:_NONCE], said[_NONCE:]
        if not hmac.compare_digest(proof, _proof(secret, b"decode", mine, theirs)):
            connection.sendall(_REFUSAL)
            raise PoolLinkError("the other end does not know the secret")
        connection.sendall(_proof(secret, b"prefill", mine, theirs))
        return PoolLink(connection, silent=silent)
    except OSError:
        connection.close()
        raise


def connect(address: tuple[str, int], secret: bytes, silent: float = SILENT) -> PoolLink:
    """Link to a process that calls ``accept``.

    Raises:
        PoolLinkError: the other end does not know the secret, or has found that this one does not.
        OSError: nobody listens there, or the other end has gone.
    """
    connection = socket.create_connection(address, timeout=silent)
    try:
        theirs, mine = receive_exactly(connection, _NONCE).tobytes(), secrets.token_bytes(_NONCE)
        connection.sendall(mine + _proof(secret, b"decode", theirs, mine))
        proof = receive_exactly(connection, _PROOF).tobytes()
        if not hmac.compare_digest(proof, _proof(secret, b"prefill", theirs, mine)):
            raise PoolLinkError(f"the process at {address[0]}:{address[1]} has another secret: give both the same file")
        return PoolLink(connection, silent=silent)
    except OSError:
        connection.close()
        raise


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of text such as "10.0.0.1:8998".

    Raises:
        ConfigError: it is not that.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{text!r} is no address: write HOST:PORT, such as 10.0.0.1:8998.")
    return host.strip("[]"), int(port)


def _proof(secret: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(secret, role + first + second, hashlib.sha256).digest()


def _reason(error: Exception, silent: float) -> str:
    """Why a link is closed, after "the connection has ended: "."""
    return f"nothing came for {silent:g} s" if isinstance(error, TimeoutError) else str(error)
