"""Peer server: a process that holds snapshots in its memory and serves them over TCP; it uses no jax and no files.

    python -m jaxllm.checkpoint.memory.peer_server ADDRESS_FILE LINGER

It outlives the trainer that started it: it is detached, in a session of its own, and ends on request, or when
nobody has contacted it for LINGER seconds. Its address is written to ADDRESS_FILE, which only its user can read, with a
secret that every request must carry.

A message is the length of its header (4 bytes, big-endian), the header as JSON, and as many raw bytes as the header
says.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import socketserver
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.checkpoint.memory.erasure_coding import gf_multiply
from jaxllm.checkpoint.storage.leaf_hashing import as_bytes, hash_array
from jaxllm.files import atomic
from jaxllm.sockets import receive_exactly

MAX_HEADER_BYTES = 2**26


def receive(connection: socket.socket) -> tuple[dict[str, Any], np.ndarray]:
    """Receives the header and bytes of a message.

    Raises:
        ConnectionError: the other side has closed the connection.
    """
    (length,) = struct.unpack(">I", receive_exactly(connection, 4).tobytes())
    if length > MAX_HEADER_BYTES:
        raise ConnectionError(f"a head of {length} bytes: this is not a message of a peer server")
    head = json.loads(receive_exactly(connection, length).tobytes())
    return head, receive_exactly(connection, head.get("bytes", 0))


def send(connection: socket.socket, head: dict[str, Any], data: np.ndarray | None = None) -> None:
    """Sends a message."""
    data = np.empty(0, np.uint8) if data is None else np.ascontiguousarray(data)
    text = json.dumps(head | {"bytes": data.nbytes}).encode()
    connection.sendall(struct.pack(">I", len(text)) + text)
    connection.sendall(data.data)


class SnapshotStore:
    """Files by name, and parity sums by name. Every method is one request."""

    def __init__(self):
        self._files: dict[str, np.ndarray] = {}
        self._sums: dict[str, tuple[np.ndarray, dict[str, Any]]] = {}
        self._hashes: dict[str, str] = {}
        self._lock = threading.Lock()

    def put(self, head: dict[str, Any], data: np.ndarray) -> tuple[Any, Any]:
        """Stores a file."""
        with self._lock:
            self._files[head["name"]] = data
            self._hashes.pop(head["name"], None)
        return True, None

    def get(self, head: dict[str, Any], data: np.ndarray) -> tuple[Any, Any]:
        """Bytes of a file; None if there is none."""
        found = self._files.get(head["name"])
        return found is not None, None if found is None else found[head["begin"] : head["end"]]

    def slice(self, head: dict[str, Any], data: np.ndarray) -> tuple[Any, Any]:
        """Bytes of a slice of an array, with hashes of the slice and of the whole file; None if there is none."""
        with self._lock:
            found, whole = self._files.get(head["name"]), self._hashes.get(head["name"])
        if found is None:
            return None, None
        if whole is None:
            whole = hash_array(found)
            with self._lock:
                if self._files.get(head["name"]) is found:
                    self._hashes[head["name"]] = whole
        array = found.reshape(*head["shape"], head["width"])
        part = as_bytes(array[tuple(slice(begin, end) for begin, end in head["spans"])])
        return {"whole": whole, "part": hash_array(part)}, part

    def sizes(self, head: dict[str, Any], data: np.ndarray) -> tuple[Any, Any]:
        """Names of files with their bytes."""
        with self._lock:
            return {n: f.nbytes for n, f in self._files.items() if n.startswith(head["name"])}, None

    def drop(self, head: dict[str, Any], data: np.ndarray) -> tuple[Any, Any]:
        """Removes the file of a name and all files below it."""
        name = head["name"]
        with self._lock:
            for held in (self._files, self._sums, self._hashes):
                for one in [n for n in held if n == name or n.startswith(f"{name}/")]:
                    del held[one]
        return True, None

    def add(self, head: dict[str, Any], data: np.ndarray) -> tuple[Any, Any]:
        """Adds a piece, times its coefficient, to a parity sum; a second piece of one contributor is an error."""
        with self._lock:
            total, about = self._sums.get(head["name"], (np.empty(0, np.uint8), {}))
            if head["who"] in about:
                return False, None
            if len(data) > len(total):
                total = np.concatenate([total, np.zeros(len(data) - len(total), np.uint8)])
            total[: len(data)] ^= gf_multiply(head["coefficient"], data)
            self._sums[head["name"]] = total, about | {head["who"]: head["about"]}
        return True, None

    def sum(self, head: dict[str, Any], data: np.ndarray) -> tuple[Any, Any]:
        """A parity sum, with what its contributors said of their pieces; None if there is none."""
        with self._lock:
            total, about = self._sums.get(head["name"], (None, None))
        return about, total


def serve(address_file: str, linger: float) -> None:
    """Serves requests until an end request, or until no request arrives for `linger` seconds."""
    store, secret = SnapshotStore(), secrets.token_hex(16)
    heard = [time.monotonic()]

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            # An answer is two writes, the second of which would wait 40 ms for the delayed ACK of the first.
            self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                while True:
                    head, data = receive(self.request)
                    if not secrets.compare_digest(str(head.get("secret")), secret):
                        return
                    heard[0] = time.monotonic()
                    if head["do"] == "end":
                        send(self.request, {"result": True})
                        os._exit(0)
                    result, out = getattr(store, head["do"])(head, data) if head["do"] in REQUESTS else (None, None)
                    send(self.request, {"result": result}, out)
            except ConnectionError:
                return

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = 128

    with Server(("", 0), Handler) as server:
        about = {"host": socket.gethostname(), "port": server.server_address[1], "secret": secret, "pid": os.getpid()}
        os.umask(0o077)
        with atomic(Path(address_file)) as file:
            file.write(json.dumps(about).encode())
        threading.Thread(target=server.serve_forever, daemon=True).start()
        while time.monotonic() - heard[0] < linger:
            time.sleep(min(1.0, linger / 4))


REQUESTS = ("put", "get", "slice", "sizes", "drop", "add", "sum")


if __name__ == "__main__":
    if os.fork():
        os._exit(0)  # the parent waits only for this process, never for the server
    os.setsid()
    serve(sys.argv[1], float(sys.argv[2]))
