"""Object storage of tests: an HTTP server on this machine that speaks the few S3 calls that reading needs.

Faults are injected by request: errors, slow answers, bodies that end early.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

KEY = "test-key"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
               "AWS_MAX_ATTEMPTS": "1", "AWS_EC2_METADATA_DISABLED": "true"}  # fmt: skip
Fault = Callable[[str, str, int], str]
"""(method, key, number of this request from 1) -> "", an HTTP status, "slow", or "short"."""


class ObjectStorage:
    """Objects by "bucket/key", the requests that came, and the fault of each request."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, str]] = []
        self.fault: Fault = lambda method, key, number: ""
        self.url = ""


def _listing(storage: ObjectStorage, bucket: str, query: dict[str, list[str]]) -> bytes:
    prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
    keys = sorted(name.removeprefix(f"{bucket}/") for name in storage.objects if name.startswith(f"{bucket}/"))
    keys = [key for key in keys if key.startswith(prefix)]
    folders = {prefix + key[len(prefix):].split(delimiter)[0] + delimiter for key in keys
               if delimiter and delimiter in key[len(prefix):]}  # fmt: skip
    files = "".join(
        f"<Contents><Key>{escape(key)}</Key><Size>{len(storage.objects[f'{bucket}/{key}'])}</Size>"
        f"<ETag>&quot;{_tag(storage.objects[f'{bucket}/{key}'])}&quot;</ETag>"
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified><StorageClass>STANDARD</StorageClass></Contents>"
        for key in keys if not any(key.startswith(one) for one in folders)
    )  # fmt: skip
    inner = "".join(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(folders))
    return (f'<?xml version="1.0"?><ListBucketResult><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix>'
            f"<KeyCount>{len(keys)}</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>"
            f"{files}{inner}</ListBucketResult>").encode()  # fmt: skip


def _tag(raw: bytes) -> str:
    return hashlib.md5(raw, usedforsecurity=False).hexdigest()


def _handler(storage: ObjectStorage) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _send(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in ({"Content_Length": str(len(body))} | headers).items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            name, query = unquote(parts.path).strip("/"), parse_qs(parts.query)
            number = 1 + sum((self.command, name) == one[:2] for one in storage.requests)
            storage.requests.append((self.command, name, self.headers.get("Range", "")))
            fault = storage.fault(self.command, name, number)
            if f"Credential={KEY}/" not in self.headers.get("Authorization", ""):
                return self._error(403, "InvalidAccessKeyId")
            if fault.isdecimal():
                return self._error(int(fault), "InternalError")
            if fault == "slow":
                time.sleep(0.6)
            if "list-type" in query or "/" not in name:
                return self._send(200, _listing(storage, name, query), Content_Type="application/xml")
            if name not in storage.objects:
                return self._error(404, "NoSuchKey")
            raw = storage.objects[name]
            facts = {
                "ETag": f'"{_tag(raw)}"',
                "Last_Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
                "Accept_Ranges": "bytes",
            }
            if self.command == "HEAD":
                return self._send(200, **facts, Content_Length=str(len(raw)))
            status, body = 200, raw
            if ranged := self.headers.get("Range"):
                begin, _, end = ranged.removeprefix("bytes=").partition("-")
                body = raw[int(begin) : int(end) + 1 if end else None]
                facts["Content_Range"] = f"bytes {begin}-{int(begin) + len(body) - 1}/{len(raw)}"
                status = 206
            if fault == "short":  # a whole answer to look at, of fewer bytes than were asked for
                body = body[: len(body) // 2]
            self._send(status, body, **facts)

        do_HEAD = do_GET

        def _error(self, status: int, code: str) -> None:
            self._send(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    return Handler


@contextmanager
def object_storage(monkeypatch) -> Iterator[ObjectStorage]:
    """Runs a storage that `s3://` URLs of this process lead to."""
    import fsspec

    storage = ObjectStorage()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(storage))
    storage.url = f"http://127.0.0.1:{server.server_port}"
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": storage.url, "use_listings_cache": False})
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield storage
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
