"""Adapter routes: load, unload and roll back LoRA adapters while the server runs, as vLLM's routes of these names do.

They need one of the server's admin keys (``jaxllm.serve.middleware``), and read from the allowed directories alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fastapi import FastAPI
from starlette.responses import Response

from jaxllm.infer.adapter_catalogue import AdapterNotFoundError, AdapterRevision
from jaxllm.infer.engine.engine import Engine
from jaxllm.serve.api.errors import ApiError, dumps
from jaxllm.serve.api.request_schemas import AdapterNameRequest, LoadAdapterRequest
from jaxllm.serve.api.response_schemas import AdapterState, ErrorResponse
from jaxllm.serve.config import ServeConfig
from jaxllm.serve.generation import RequestDispatcher

_STATUSES = {
    400: "The request is invalid, or the directory has no adapter of this model.",
    401: "The admin key is missing or wrong.",
    403: "The server has no admin keys, or the directory is not allowed.",
    404: "There is no such adapter.",
    405: "The method is not supported.",
    413: "The body is too long.",
    503: "The engine is not ready.",
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": text} for status, text in _STATUSES.items()
}


@runtime_checkable
class AdapterService(Protocol):
    """Interface of the server's state that these routes need."""

    config: ServeConfig
    name: str

    def ready(self) -> RequestDispatcher:
        """The dispatcher of a ready server."""
        ...


def add_adapter_routes(app: FastAPI, service: AdapterService) -> None:
    """Adds the routes to an application."""

    def host() -> Engine:
        found = service.ready().backend.adapter_host
        if found is None:
            raise ApiError(403, "this server's engine has no slots for adapters.", code="forbidden")
        return found

    @app.post("/v1/load_lora_adapter", response_model=AdapterState, responses=_ERRORS)
    async def load_adapter(body: LoadAdapterRequest) -> Response:
        """Loads an adapter; under a name that is there, it becomes the newest revision."""
        engine = host()
        if body.lora_name == service.name:
            raise ApiError(400, f"{body.lora_name!r} is the base's name; give another.", param="lora_name")
        folder = await asyncio.to_thread(allowed, body.lora_path, service.config.adapter_dirs)
        try:
            revision = await asyncio.to_thread(engine.load_adapter, body.lora_name, folder)
        except (ValueError, OSError) as error:
            raise ApiError(400, str(error), param="lora_path", code="adapter_unreadable") from None
        return _answer(body.lora_name, revision)

    @app.post("/v1/unload_lora_adapter", response_model=AdapterState, responses=_ERRORS)
    async def unload_adapter(body: AdapterNameRequest) -> Response:
        """Unloads an adapter with all its revisions; requests that use it go on to their end."""
        engine = host()
        try:
            engine.unload_adapter(body.lora_name)
        except AdapterNotFoundError as error:
            raise ApiError(404, str(error), param="lora_name", code="model_not_found") from None
        return _answer(body.lora_name, None)

    @app.post("/v1/rollback_lora_adapter", response_model=AdapterState, responses=_ERRORS)
    async def rollback_adapter(body: AdapterNameRequest) -> Response:
        """Goes back to the revision before the newest one of an adapter."""
        engine = host()
        try:
            return _answer(body.lora_name, engine.rollback_adapter(body.lora_name))
        except AdapterNotFoundError as error:
            raise ApiError(404, str(error), param="lora_name", code="model_not_found") from None
        except ValueError as error:
            raise ApiError(400, str(error), param="lora_name", code="no_revision") from None


def allowed(path: str, folders: Sequence[str]) -> Path:
    """Directory that a request names, links followed; a relative one is in the first allowed directory.

    Raises:
        ApiError: 403; it is in none of the allowed directories.
    """
    roots = [Path(folder).resolve() for folder in folders]
    try:
        found = (roots[0] / path).resolve()
    except (OSError, ValueError, RuntimeError):
        found = None
    if found is None or not any(found.is_relative_to(root) for root in roots):
        raise ApiError(
            403, f"{path[:200]!r} is not in a directory that this server may read adapters from.", param="lora_path",
            code="forbidden",
        )  # fmt: skip
    return found


def _answer(name: str, revision: AdapterRevision | None) -> Response:
    body = {"id": name, "object": "adapter", "revision": None if revision is None else revision.number}
    return Response(dumps(body), 200, media_type="application/json")
