"""Link between the supervisor of an elastic run and the agent of a host: lines of JSON over TCP.

Each end says every second that it is there. An end from which nothing has come for ``SILENT`` seconds counts as gone:
TCP itself would not notice for minutes that the power of a host has failed.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

BEAT = 1.0
"""Seconds between two signs of life."""
SILENT = 10.0
"""Seconds without one after which the other end counts as gone."""


class HostLink:
    """One end of a connection; sends and receives lines of JSON.

    Args:
        connection: the socket, which the link closes.
        beat, silent: see the constants of this module.
    """

    def __init__(self, connection: socket.socket, beat: float = BEAT, silent: float = SILENT):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(silent)
        self._connection, self._beat = connection, beat
        self._lock, self._over = threading.Lock(), threading.Event()
        self._beating = threading.Thread(target=self._say_alive, name="jaxllm-host-link", daemon=True)
        self._beating.start()

    @property
    def open(self) -> bool:
        """Whether neither end has closed the link, as far as this one knows."""
        return not self._over.is_set()

    def send(self, **about: Any) -> None:
        """Sends a message; the loss of the other end is told by ``receive`` alone."""
        try:
            with self._lock:
                self._connection.sendall(json.dumps(about).encode() + b"\n")
        except OSError:
            self.close()

    def receive(self) -> Iterator[dict[str, Any]]:
        """Messages of the other end, until it is gone or this one is closed."""
        buffer = b""
        while True:
            try:
                data = self._connection.recv(2**16)
                *lines, buffer = (buffer + data).split(b"\n")
                messages = [json.loads(line) for line in lines]
            except (OSError, ValueError):  # silent, reset, or something that does not speak so
                data, messages = b"", []
            yield from (message for message in messages if message)
            if not data:
                return self.close()

    def close(self) -> None:
        """Closes the link at both ends."""
        self._over.set()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _say_alive(self) -> None:
        while not self._over.wait(self._beat):
            self.send()
