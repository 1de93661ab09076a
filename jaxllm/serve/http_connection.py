"""HTTP/1.1 connections: errors in OpenAI's shape, a time limit for headers, and a bound on open connections."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxllm.serve.api.errors import ApiError, dumps
from jaxllm.serve.config import ServeConfig

_LOG = logging.getLogger("jaxllm.serve")
_PHRASES = {400: "Bad Request", 408: "Request Timeout", 503: "Service Unavailable"}


class HttpConnection(H11Protocol):
    """HTTP/1.1 connection of uvicorn; its transport is in the request's state.

    A client has ``ServeConfig.header_seconds`` for the headers of a request. Of ``max_connections`` open ones, the
    longest that has not sent a whole request makes room for a new one; where all are being answered, that is refused.
    """

    _header_timer: asyncio.TimerHandle | None = None

    @property
    def _limits(self) -> ServeConfig:
        app: Any = self.config.app
        return app.state.service.config

    def connection_made(self, transport: Any) -> None:
        """Stores the transport, so that a stream can abort a connection whose client does not read."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, "transport": transport}
        self._since = self.loop.time()
        self._time_headers()
        if len(self.connections) > self._limits.max_connections:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        """Handles bytes of the client; the time for headers runs while those of a request are incomplete."""
        super().data_received(data)
        if self._awaits_request and self.conn.trailing_data[0]:
            self._time_headers()
        elif not self._awaits_request or self.cycle is not None:
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the connection."""
        self._stop_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are not HTTP with an API error, and closes the connection."""
        self._refuse(ApiError(400, msg))

    @property
    def _awaits_request(self) -> bool:
        """Whether no request is being received or answered."""
        return self.conn.their_state is h11.IDLE and (self.cycle is None or self.cycle.response_complete)

    @property
    def _can_make_room(self) -> bool:
        """Whether the client has not sent a whole request."""
        waits = self._awaits_request or self.conn.their_state is h11.SEND_BODY
        return waits and not self.transport.is_closing()

    def _time_headers(self) -> None:
        if self._header_timer is None and not self.transport.is_closing():
            self._header_timer = self.loop.call_later(self._limits.header_seconds, self._headers_are_late)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _headers_are_late(self) -> None:
        self._header_timer = None
        if self._awaits_request:
            self._refuse(ApiError(408, f"the headers did not arrive within {self._limits.header_seconds:g} s."))

    def _make_room(self) -> None:
        """Closes the longest connection without a whole request, or refuses this one."""
        most = self._limits.max_connections
        others = [one for one in self.connections if one is not self and isinstance(one, HttpConnection)]
        if sum(not one.transport.is_closing() for one in others) < most:
            return
        if (slowest := min((one for one in others if one._can_make_room), key=_since, default=None)) is not None:
            slowest._refuse(ApiError(408, f"{most} connections are open, and this one has not sent a whole request."))
            return
        message = f"{most} connections are open, and all are being answered; try again later."
        self._refuse(ApiError(503, message, code="too_many_connections", headers={"retry-after": "5"}))

    def _refuse(self, error: ApiError) -> None:
        """Answers with an API error, unless the client has asked for nothing since its last answer, and closes."""
        self._stop_timer()
        if self.cycle is None or self.conn.trailing_data[0] or not self._awaits_request:
            body = dumps(error.body()).encode()
            lines = [f"HTTP/1.1 {error.status} {_PHRASES[error.status]}", "content-type: application/json"]
            lines += [f"content-length: {len(body)}", *(f"{name}: {value}" for name, value in error.headers.items())]
            self.transport.write("\r\n".join([*lines, "connection: close", "", ""]).encode() + body)
            client = {} if self.client is None else {"client": self.client[0]}
            _LOG.info(json.dumps({"status": error.status, "error": error.message, **client}))
        self.transport.close()


def _since(connection: HttpConnection) -> float:
    return connection._since
