"""Sockets: as many bytes as a message has."""

from __future__ import annotations

import socket

import numpy as np


def receive_exactly(connection: socket.socket, count: int) -> np.ndarray:
    """The next ``count`` bytes, uint8[count].

    Raises:
        ConnectionError: the other end has closed the connection.
        OSError: nothing came in time.
    """
    out = np.empty(count, np.uint8)
    view, done = out.data, 0
    while done < count:
        got = connection.recv_into(view[done:])
        if not got:
            raise ConnectionError("the connection was closed there")
        done += got
    return out
