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
from jaxllm.serve.config import ServeConfig

PUBLIC_PATHS = ("/", "/health", "/ready", "/version", "/openapi.json")
"""Paths that need no API key."""
ADMIN_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/rollback_lora_adapter")
"""Paths that need one of ``ServeConfig.admin_keys``."""
MAX_HEADERS = 32 * 1024
_LOG = logging.getLogger("jaxllm.serve")
_ID = re.compile(rb"[A-Za-z0-9_.:-]{1,128}\Z")


def error_response(error: ApiError, path: str) -> Response:
    """JSON response of an API error, in the shape of the API that the path belongs to."""
    return Response(dumps(error.body_for(path)), error.status, {**error.headers}, "application/json")


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
            _LOG.info(json.dumps(record))

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
            record["admin_key"] = self._key(headers.get(b"authorization", ()), self._admin_keys)
        elif scope["path"] not in PUBLIC_PATHS and self._keys and scope["method"] != "OPTIONS":
            record["key"] = self._key(headers.get(b"authorization", ()), self._keys)
        length = headers.get(b"content-length", [b"0"])[0]
        if not length.isdigit() or int(length) > self._config.max_body:
            raise self._too_long()

    def _key(self, given: Any, keys: list[bytes]) -> int:
        """Index of a request's API key. All keys are compared, each in constant time, so timing reveals nothing."""
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, own) for own in keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(
                401,
                "this server needs an API key: Authorization: Bearer KEY." if not given else "the API key is wrong.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return matches.index(True)

    def _too_long(self) -> ApiError:
        return ApiError(
            413, f"the request's body is too long; at most {self._config.max_body:,} bytes.",
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
        try:
            async with asyncio.timeout(self._config.body_seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return receive
                    parts.append(message.get("body", b""))
                    total += len(parts[-1])
                    more = message.get("more_body", False)
                    if total > self._config.max_body:
                        raise self._too_long()
        except TimeoutError:
            raise ApiError(
                408, f"the request's body did not arrive within {self._config.body_seconds} s.",
                headers={"Connection": "close"},
            ) from None  # fmt: skip
        whole = iter([{"type": "http.request", "body": b"".join(parts), "more_body": False}])

        async def replay() -> Message:
            return next(whole, None) or await receive()

        return replay
