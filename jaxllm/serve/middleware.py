"""Middleware for every request: API keys, size limits, protocol checks, request ids, and the access log."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
import secrets
import time
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.serve.api.errors import ApiError, dumps
from jaxllm.serve.api.event_stream import note_error
from jaxllm.serve.config import ServeConfig

PUBLIC_PATHS = ("/", "/health", "/ready", "/version", "/openapi.json")
"""Paths that need no API key."""
ADMIN_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/rollback_lora_adapter")
"""Paths that need one of ``ServeConfig.admin_keys``."""
PROBE_PATHS = ("/health", "/ready", "/metrics")
"""Paths that probes ask again and again; their requests are logged at debug level."""
UPLOAD_PATH = "/v1/files"
"""Path whose bodies are files, of ``ServeConfig.max_file`` bytes and what a form adds."""
_FORM_BYTES, _UPLOAD_TIME = 4096, 10
MAX_HEADERS = 32 * 1024
_LOG = logging.getLogger("jaxllm.serve")
_ID = re.compile(rb"[A-Za-z0-9_.:-]{1,128}\Z")


class LoggedErrorResponse(Response):
    """JSON response that writes the reason of the error to the request's log record.

    Args:
        error: the error.
        path: path of the request, which the shape of the body depends on.
    """

    def __init__(self, error: ApiError, path: str):
        super().__init__(dumps(error.body_for(path)), error.status, {**error.headers}, "application/json")
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        note_error(scope, self._error)
        await super().__call__(scope, receive, send)


def error_response(error: ApiError, path: str) -> Response:
    """JSON response of an API error, in the shape of the API that the path belongs to."""
    return LoggedErrorResponse(error, path)


class RequestMiddleware:
    """ASGI middleware that checks requests before the application sees them, and logs each as a line of JSON.

    Args:
        app: application behind it.
        config: settings of the server.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig):
        self._app, self._config = app, config
        self._keys, self._admin_keys = (
            [hashlib.sha256(key.encode()).digest() for key in keys] for keys in (config.api_keys, config.admin_keys)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value)
        given = headers.get(b"x-request-id", [b""])[0]
        name = given if _ID.match(given) else secrets.token_hex(12).encode()
        record: dict[str, Any] = {"id": name.decode(), "method": scope["method"], "path": scope["path"]}
        scope["jaxllm.record"] = record
        began = time.perf_counter()

        async def reply(message: Message) -> None:
            if message["type"] == "http.response.start":
                record["status"] = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", name),
                    (b"x-content-type-options", b"nosniff"),
                ]
            await send(message)

        try:
            try:
                self._check(scope, headers, record)
                receive = await self._body(scope, receive)
            except ApiError as error:
                await error_response(error, scope["path"])(scope, receive, reply)
                return
            await self._app(scope, receive, reply)
        finally:
            record["seconds"] = round(time.perf_counter() - began, 6)
            if (client := scope.get("client")) is not None:
                record["client"] = client[0]
            probe = scope["path"] in PROBE_PATHS and scope["method"] in ("GET", "HEAD")
            _LOG.log(logging.DEBUG if probe else logging.INFO, json.dumps(record))

    def _check(self, scope: Scope, headers: dict[bytes, list[bytes]], record: dict[str, Any]) -> None:
        """Checks headers, HTTP version, API key and announced length, before the body is read.

        Raises:
            ApiError: 400, 401, 413 or 431.
        """
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADERS:
            raise ApiError(431, f"the request's headers are longer than {MAX_HEADERS:,} bytes.")
        if scope["http_version"] not in ("1.0", "1.1"):
            raise ApiError(400, "the HTTP version is not supported; use HTTP/1.1.", headers={"Connection": "close"})
        if len(headers.get(b"content-length", ())) > 1 or (
            b"transfer-encoding" in headers and b"content-length" in headers
        ):
            raise ApiError(400, "the request states its length more than once.", headers={"Connection": "close"})
        if scope["path"] in ADMIN_PATHS and scope["method"] != "OPTIONS":
            if not self._admin_keys:
                raise ApiError(
                    403, "this server loads no adapters on request; start it with --admin-key-file.", code="forbidden"
                )
            record["admin_key"] = self._key(headers, self._admin_keys)
        elif scope["path"] not in PUBLIC_PATHS and self._keys and scope["method"] != "OPTIONS":
            record["key"] = self._key(headers, self._keys)
        length = headers.get(b"content-length", [b"0"])[0]
        if not length.isdigit() or int(length) > self._limits(scope)[0]:
            raise self._too_long(scope)

    def _key(self, headers: dict[bytes, list[bytes]], keys: list[bytes]) -> int:
        """Index of a request's API key, of ``Authorization: Bearer KEY``, or without that of ``x-api-key: KEY``.

        All keys are compared, each in constant time, so timing reveals nothing.
        """
        given, bare = headers.get(b"authorization", []), headers.get(b"x-api-key", [])
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        if not given and len(bare) == 1:
            scheme, key = b"bearer", bare[0]
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, own) for own in keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(
                401,
                "the API key is wrong."
                if given or bare
                else "this server needs an API key: Authorization: Bearer KEY, or x-api-key: KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return matches.index(True)

    def _limits(self, scope: Scope) -> tuple[int, float]:
        """(maximum bytes of a request's body, seconds in which it must arrive)."""
        if scope["path"] == UPLOAD_PATH:
            return self._config.max_file + _FORM_BYTES, _UPLOAD_TIME * self._config.body_seconds
        return self._config.max_body, self._config.body_seconds

    def _too_long(self, scope: Scope) -> ApiError:
        return ApiError(
            413, f"the request's body is too long; at most {self._limits(scope)[0]:,} bytes.",
            headers={"Connection": "close"},
        )  # fmt: skip

    async def _body(self, scope: Scope, receive: Receive) -> Receive:
        """Reads the whole body; returns a ``receive`` that replays it.

        Raises:
            ApiError: 413 or 408; the body is too long or does not arrive in time.
        """
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return receive
        parts: list[bytes] = []
        total, more = 0, True
        most, seconds = self._limits(scope)
        try:
            async with asyncio.timeout(seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return receive
                    parts.append(message.get("body", b""))
                    total += len(parts[-1])
                    more = message.get("more_body", False)
                    if total > most:
                        raise self._too_long(scope)
        except TimeoutError:
            raise ApiError(
                408, f"the request's body did not arrive within {seconds} s.",
                headers={"Connection": "close"},
            ) from None  # fmt: skip
        whole = iter([{"type": "http.request", "body": b"".join(parts), "more_body": False}])

        async def replay() -> Message:
            return next(whole, None) or await receive()

        return replay
