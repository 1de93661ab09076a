"""Decode listener: accepts the decode pool's processes in the process of the prefill pool, whenever they come.

A decode process opens a connection for steps, says what it serves and how many pages it has, and then one for pages.
One that comes while every decode engine has a process waits, and takes the place of the next one that is lost.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import threading
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.infer.pools.pool_facts import difference
from jaxllm.infer.pools.pool_link import PoolLink, PoolLinkError, accept, parse_address
from jaxllm.infer.pools.remote_engine import DecodeSession

PATIENCE = 60.0
"""Seconds that requests whose prompt is computed wait for a decode process."""
HELLO, WELCOME, REFUSED, PAGES = "hello", "welcome", "refused", "pages of"
"""Messages that begin a connection."""


class DecodeListener:
    """Listens for decode processes.

    Args:
        address: such as "10.0.0.1:8998"; port 0 for any free one.
        secret: bytes that decode processes must know.
        patience: see ``PATIENCE``.

    Raises:
        ConfigError: it is no address, nothing can listen there, or the secret is empty.

    Attributes:
        address: host and port, the real one.
        patience: as given.
    """

    def __init__(self, address: str, secret: bytes, patience: float = PATIENCE):
        host, port = parse_address(address)
        if not secret:
            raise ConfigError("disaggregation: the secret is empty; write one into its file.")
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(f"disaggregation: cannot listen on {address}: {error}") from None
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self.patience = patience
        self._secret, self._facts = secret, dict[str, Any]()
        self._half: dict[str, tuple[PoolLink, tuple[int, ...]]] = {}
        self._sessions: queue.SimpleQueue[DecodeSession] = queue.SimpleQueue()
        self._closed = False

    @property
    def waiting(self) -> int:
        """Processes that have come and have no engine's place yet."""
        return self._sessions.qsize()

    def expect(self, facts: dict[str, Any]) -> None:
        """Starts to accept processes with these facts; others are told what differs."""
        self._facts = facts
        threading.Thread(target=self._accept, name="jaxllm-decode-listener", daemon=True).start()

    def wait(self) -> DecodeSession:
        """The next process; waits for one."""
        while True:
            session = self._sessions.get()
            if not session.lost:
                return session

    def take(self) -> DecodeSession | None:
        """The next process that has come; None: there is none."""
        with contextlib.suppress(queue.Empty):
            while True:
                session = self._sessions.get_nowait()
                if not session.lost:
                    return session
        return None

    def close(self) -> None:
        """Accepts no more processes."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        while (session := self.take()) is not None:
            session.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=[connection], name="jaxllm-pool-greeting", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        """Makes a session of two connections of a process."""
        try:
            link = accept(connection, self._secret)
        except (PoolLinkError, OSError):
            return
        first = next(link.messages(), None)
        if first is None:
            return
        if first.name == PAGES and (half := self._half.pop(first.values[0], None)) is not None:
            self._sessions.put(DecodeSession(half[0], link, half[1]))
            return
        if first.name != HELLO:
            return link.close(f"it said {first.name!r}, not {HELLO!r}")
        facts, pages = first.values
        if (wrong := difference(self._facts, facts)) is not None:
            link.send(REFUSED, wrong)
            return link.close(wrong)
        self._half = {token: half for token, half in self._half.items() if half[0].open}
        token = secrets.token_hex(16)
        self._half[token] = link, tuple(pages)
        link.send(WELCOME, token)
