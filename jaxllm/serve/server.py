"""Server lifecycle: the model is loaded while the server already answers; SIGTERM drains running requests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import uvicorn
from fastapi import FastAPI

from jaxllm.infer.async_engine import AsyncEngine
from jaxllm.infer.embedder import Embedder, Pooling
from jaxllm.infer.llm import LLM
from jaxllm.infer.runner.serving_mesh import spans_processes
from jaxllm.parallel.distributed import DistributedError
from jaxllm.serve.app import ApiService, create_app
from jaxllm.serve.backend import Backend, EngineBackend
from jaxllm.serve.config import ServeConfig
from jaxllm.serve.http_connection import HttpConnection
from jaxllm.serve.scoring.text_scorer import EmbeddingScorer, RewardScorer, TextScorer, reward_token_of

BackendFactory = Callable[[], AbstractAsyncContextManager[Backend]]
"""Context manager that loads the model and runs its engine while it is open."""


class Server(uvicorn.Server):
    """Uvicorn server that loads its engine in the background and stops if loading fails.

    Args:
        config: settings of the server.
        factory: opens the backend.

    Attributes:
        failure: exception that kept the model from being loaded, or None.
    """

    def __init__(self, config: ServeConfig, factory: BackendFactory):
        self.failure: BaseException | None = None
        self._factory = factory
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
        """Starts draining: no new requests are accepted, running ones may end."""
        self.service.draining = True
        super().handle_exit(sig, frame)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        stop = asyncio.Event()
        task = asyncio.create_task(self._run_backend(stop))
        try:
            yield
        finally:
            stop.set()
            await task

    async def _run_backend(self, stop: asyncio.Event) -> None:
        """Opens the backend and keeps it open until ``stop`` is set."""
        try:
            async with self._factory() as backend:
                self.service.open_for(backend)
                try:
                    await self.service.open_routes()
                    await stop.wait()
                finally:
                    await self.service.close_routes()
        except BaseException as error:
            self.failure = error
            self.service.failure = "the model could not be loaded."
            self.should_exit = True


def backend_factory(load: Callable[[], LLM], pooling: Pooling | None = None) -> BackendFactory:
    """Factory of a backend over an ``LLM``; ``load`` runs in a thread, so that the server answers meanwhile.

    ``pooling`` says that it is an embedding model, and how it pools hidden states; None: it is none.
    """

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[Backend]:
        llm = await asyncio.to_thread(load)
        loaded = llm.loaded
        embedder = Embedder(loaded.model, loaded.params, llm.engine.max_len, loaded.mesh)
        async with AsyncEngine(llm.engine) as engine:
            yield EngineBackend(engine, loaded.template, embedder, loaded.sampling, text_scorer(llm, embedder, pooling))

    return opened


def text_scorer(llm: LLM, embedder: Embedder, pooling: Pooling | None) -> TextScorer | None:
    """Scorer of a model: of an embedding model if it is said to be one, or of a reward model; None for others."""
    loaded, most = llm.loaded, llm.engine.max_len
    if spans_processes(llm.engine.runner.mesh):
        if pooling is not None:
            raise DistributedError("several processes serve completions, and no pooled hidden states: use one process.")
        return None
    if pooling is not None:
        return EmbeddingScorer(loaded.tokenizer, functools.partial(embedder, pooling=pooling), most)
    if (token := reward_token_of(loaded.meta)) is not None:
        reward = functools.partial(embedder.reward, token=token)
        return RewardScorer(loaded.tokenizer, loaded.template, reward, most)
    return None


def serve(config: ServeConfig, factory: BackendFactory) -> None:
    """Runs a server until a signal stops it.

    Raises:
        Exception: the one that kept the model from being loaded.
    """
    server = Server(config, factory)
    server.run()
    if server.failure is not None:
        raise server.failure
