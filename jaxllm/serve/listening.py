"""Listening sockets of the server, opened before the model is loaded: a port that is in use is noticed at once."""

from __future__ import annotations

import errno
import os
import socket

BACKLOG = 2048
"""Connections that wait until the server accepts them."""


class ListenError(OSError):
    """The server cannot listen on its address; the message says why, and what to do."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on all addresses of a host; clients that connect wait until the server runs.

    Args:
        host: name or address; "" for all addresses.
        port: 0 for any free one, the same on all addresses.

    Raises:
        ListenError: the port is in use or not allowed, or there is no such address.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ListenError(f"--host {host}: there is no such address: {error}.") from None
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            if port == 0 and sockets:
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            sockets.append(_listen(family, kind, protocol, address))
    except OSError as error:
        for one in sockets:
            one.close()
        raise ListenError(_reason(error, host, port)) from None
    return sockets


def url_of(address: tuple) -> str:
    """URL of a socket's address, as ``getsockname`` returns it."""
    host, port = address[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listen(family: int, kind: int, protocol: int, address: tuple) -> socket.socket:
    one = socket.socket(family, kind, protocol)
    try:
        # A port whose last server has just ended can be used again; one that another server listens on cannot.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind(address)
        one.listen(BACKLOG)
        one.setblocking(False)
    except OSError:
        one.close()
        raise
    return one


def _reason(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use by another process: give another with --port, or 0 for any free one."
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port {port} of {host} needs rights that this process lacks: give a --port of 1024 or more."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is no address of this computer: give one of its own, or 0.0.0.0 for all."
    return f"the server cannot listen on port {port} of {host}: {os.strerror(error.errno or 0)}."
