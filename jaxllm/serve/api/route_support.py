"""Support for files of routes: the server's state as routes see it, and the responses that the OpenAPI schema lists."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from fastapi import Request
from starlette.responses import Response

from jaxllm.infer.adapter_catalogue import AdapterRevision
from jaxllm.serve.api.errors import dumps
from jaxllm.serve.api.response_schemas import ErrorResponse
from jaxllm.serve.config import ServeConfig
from jaxllm.serve.generation import GenerationJob, RequestDispatcher

_STATUS_TEXT = {
    400: "The request is invalid.", 401: "The API key is missing or wrong.", 404: "The model or path does not exist.",
    405: "The method is not supported.", 408: "The request took too long.", 413: "The body is too long.",
    403: "The server does not do this.",
    429: "The queue is full.", 503: "The engine is not ready.",
}  # fmt: skip
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
EVENT_STREAM: dict[int | str, Any] = {200: {"content": {"text/event-stream": {"schema": _EVENT}}}}
"""Streamed response of a route, for the OpenAPI schema."""


def errors(*statuses: int, model: type = ErrorResponse) -> dict[int | str, dict[str, Any]]:
    """Error responses of a route for the OpenAPI schema: the given statuses, and those of every route."""
    return {s: {"model": model, "description": _STATUS_TEXT[s]} for s in (400, 401, 405, 413, *statuses)}


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Response with a JSON body."""
    return Response(dumps(value), status, headers, "application/json")


@runtime_checkable
class RequestHandler(Protocol):
    """Interface of the handler of one request that generates text, whole or streamed."""

    @property
    def jobs(self) -> list[GenerationJob]:
        """Prompts and their sampling parameters."""
        ...

    @jobs.setter
    def jobs(self, jobs: list[GenerationJob]) -> None: ...

    async def whole(self) -> dict[str, Any]:
        """Response body of a request that is not streamed."""
        ...

    def events(self) -> AsyncGenerator[str, None]:
        """Server-sent events of a streamed request."""
        ...


@runtime_checkable
class RequestService(Protocol):
    """Interface of the server's state that files of routes need; ``ApiService`` implements it."""

    config: ServeConfig
    name: str
    when_open: list[Callable[[], Awaitable[None]]]
    when_closing: list[Callable[[], Awaitable[None]]]

    def ready(self) -> RequestDispatcher:
        """The dispatcher of a ready server."""
        ...

    def check_model(self, name: str | None) -> AdapterRevision | None:
        """Adapter that a request's model name means; None for the base and effort policies."""
        ...

    def check_base(self, name: str | None) -> None:
        """Checks that a request's model name is the base's."""
        ...

    async def prepare(
        self, body: Any, kind: Callable[..., RequestHandler], prefix: str, record: dict[str, Any]
    ) -> RequestHandler:
        """Handler of a request; its jobs are checked and not yet admitted."""
        ...

    async def answer(self, request: Request, body: Any, kind: Callable[..., RequestHandler], prefix: str) -> Response:
        """Response to a request, streamed or whole."""
        ...
