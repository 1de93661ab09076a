"""A server from its start to its end: loading beside the open door, draining on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxllm.infer.async_engine import AsyncEngine
from jaxllm.infer.llm import LLM
from jaxllm.serve.api.errors import ApiError, dumps
from jaxllm.serve.app import ApiService, create_app
from jaxllm.serve.backend import Backend, EngineBackend
from jaxllm.serve.config import ServeConfig
from jaxllm.serve.embedder import Embedder

BackendFactory = Callable[[], AbstractAsyncContextManager[Backend]]
"""Loads the model and runs its engine as long as the context is open."""


class HttpConnection(H11Protocol):
    """uvicorn's, with errors in our shape; streams can end a connection whose client does not read."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.app_state = {**self.app_state, "transport": transport}

    def send_400_response(self, msg: str) -> None:
        """For what is no HTTP."""
        body = dumps(ApiError(400, msg).body()).encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()


class Server(uvicorn.Server):
    """uvicorn's, that says when it stops.

    Args:
        config: how it is run.
        opener: gives the engine.
    """

    def __init__(self, config: ServeConfig, opener: BackendFactory):
        self.failure: BaseException | None = None
        self._opener = opener
        self.app = create_app(config, self._lifespan)
        self.service: ApiService = self.app.state.service
        super().__init__(
            uvicorn.Config(
                self.app,
                host=config.host,
                port=config.port,
                http=HttpConnection,
                ws="none",
                loop="asyncio",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=max(1, round(config.grace_seconds)),
                h11_max_incomplete_event_size=64 * 1024,
                backlog=2048,
            )
        )

    def handle_exit(self, sig: int, frame: Any) -> None:
        """A signal: no new requests; what runs may end."""
        self.service.draining = True
        super().handle_exit(sig, frame)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        stop = asyncio.Event()
        task = asyncio.create_task(self._keep(stop))
        try:
            yield
        finally:
            stop.set()
            await task

    async def _keep(self, stop: asyncio.Event) -> None:
        """The engine, from loading to the end."""
        try:
            async with self._opener() as backend:
                self.service.open_for(backend)
                await stop.wait()
        except BaseException as error:
            self.failure = error
            self.service.failure = "the model could not be loaded."
            self.should_exit = True


def backend_factory(load: Callable[[], LLM]) -> BackendFactory:
    """Opens a model with its engine; it is loaded in a thread, while the server already answers."""

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[Backend]:
        llm = await asyncio.to_thread(load)
        loaded = llm.loaded
        embedder = Embedder(loaded.model, loaded.params, llm.engine.max_len, loaded.mesh)
        async with AsyncEngine(llm.engine) as engine:
            yield EngineBackend(engine, loaded.template, embedder)

    return opened


def serve(config: ServeConfig, opener: BackendFactory) -> None:
    """Serves until a signal ends it.

    Raises:
        Exception: what kept the model from being loaded.
    """
    server = Server(config, opener)
    server.run()
    if server.failure is not None:
        raise server.failure
