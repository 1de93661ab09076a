"""Server lifecycle: the model is loaded while the server already answers; SIGTERM drains running requests.

A signal while the model is being loaded ends the server at once, and a second signal ends it at any time. Loading runs
in a thread that nothing can interrupt, so it may outlive the server: it ends at its next tensor or program, or with the
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import uvicorn
from fastapi import FastAPI

from jaxllm.infer.async_engine import AsyncEngine
from jaxllm.infer.embedder import Embedder, Pooling
from jaxllm.infer.llm import LLM
from jaxllm.infer.runner.serving_mesh import spans_processes
from jaxllm.infer.start_progress import StartProgress
from jaxllm.parallel.distributed import DistributedError
from jaxllm.serve.app import ApiService, create_app
from jaxllm.serve.backend import Backend, EngineBackend
from jaxllm.serve.config import ServeConfig
from jaxllm.serve.http_connection import HttpConnection
from jaxllm.serve.listening import BACKLOG, listen, url_of
from jaxllm.serve.scoring.text_scorer import EmbeddingScorer, RewardScorer, TextScorer, reward_token_of

LOADING = "jaxllm load"
"""Name of the thread that loads the model."""
BackendFactory = Callable[[], AbstractAsyncContextManager[Backend]]
"""Context manager that loads the model and runs its engine while it is open."""


class Server(uvicorn.Server):
    """Uvicorn server that loads its engine in the background and stops if loading fails.

    Args:
        config: settings of the server.
        factory: opens the backend.
        start: progress of the start, which the factory reports to, for ``/ready``.
        on_ready: called once requests are answered, with the server's URL.

    Attributes:
        failure: exception that kept the model from being loaded, or None.
    """

    def __init__(
        self,
        config: ServeConfig,
        factory: BackendFactory,
        *,
        start: StartProgress | None = None,
        on_ready: Callable[[str], None] | None = None,
    ):
        self.failure: BaseException | None = None
        self._factory, self._on_ready = factory, on_ready
        self._handlers: dict[int, Any] = {}
        self.app = create_app(config, self._lifespan)
        self.service: ApiService = self.app.state.service
        self.service.start = start or self.service.start
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
                backlog=BACKLOG,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles signals while the server runs; those of before are remembered for a second signal."""
        if threading.current_thread() is threading.main_thread():
            self._handlers = {sig: signal.getsignal(sig) for sig in (signal.SIGINT, signal.SIGTERM)}
        with super().capture_signals():
            yield

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Starts draining: no new requests are accepted, running ones may end. A second signal ends the process."""
        if self.service.draining and sig in self._handlers:
            signal.signal(sig, self._handlers[sig])
            signal.raise_signal(sig)
            return
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
            if self.service.dispatcher is None:
                self.service.start.cancel()
                task.cancel()
            await asyncio.wait([task])

    async def _run_backend(self, stop: asyncio.Event) -> None:
        """Opens the backend and keeps it open until ``stop`` is set."""
        try:
            async with self._factory() as backend:
                self.service.open_for(backend)
                try:
                    await self.service.open_routes()
                    if self._on_ready is not None:
                        self._on_ready(await self._url())
                    await stop.wait()
                finally:
                    await self.service.close_routes()
        except asyncio.CancelledError:
            return
        except BaseException as error:
            self.failure = error
            self.service.failure = "the model could not be loaded."
            self.should_exit = True

    async def _url(self) -> str:
        while not self.started:  # the lifespan begins before the sockets are served
            await asyncio.sleep(0.01)
        return url_of(self.servers[0].sockets[0].getsockname())


def backend_factory(load: Callable[[], LLM], pooling: Pooling | None = None) -> BackendFactory:
    """Factory of a backend over an ``LLM``; ``load`` runs in a thread, so that the server answers meanwhile.

    ``pooling`` says that it is an embedding model, and how it pools hidden states; None: it is none.
    """

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[Backend]:
        llm = await _in_thread(load)
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
    for option, is_set in (
        ("--offload streams", llm.engine.config.layer_window),
        ("--mesh stage=N splits", llm.engine.config.stages > 1),
    ):
        if is_set and pooling is not None:
            raise ValueError(f"--pooling scores texts by all weights, which {option}: leave one of them out.")
        if is_set:
            return None
    if pooling is not None:
        return EmbeddingScorer(loaded.tokenizer, functools.partial(embedder, pooling=pooling), most)
    if (token := reward_token_of(loaded.meta)) is not None:
        reward = functools.partial(embedder.reward, token=token)
        return RewardScorer(loaded.tokenizer, loaded.template, reward, most)
    return None


async def _in_thread(load: Callable[[], LLM]) -> LLM:
    """Runs ``load`` in a thread that the end of the process does not wait for, unlike those of asyncio."""
    loop, done = asyncio.get_running_loop(), asyncio.Future[LLM]()

    def settle(llm: LLM | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        elif llm is not None:
            done.set_result(llm)

    def run() -> None:
        llm, error = None, None
        try:
            llm = load()
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, llm, error)

    threading.Thread(target=run, name=LOADING, daemon=True).start()
    return await done


def serve(
    config: ServeConfig,
    factory: BackendFactory,
    *,
    sockets: list[socket.socket] | None = None,
    start: StartProgress | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Runs a server until a signal stops it.

    Args:
        config, factory, start, on_ready: see ``Server``.
        sockets: listening sockets; None: ``listen`` opens those of ``config``.

    Raises:
        ListenError: the port is in use, or there is no such address.
        Exception: the one that kept the model from being loaded.
    """
    sockets = listen(config.host, config.port) if sockets is None else sockets
    server = Server(config, factory, start=start, on_ready=on_ready)
    server.run(sockets)
    if server.failure is not None:
        raise server.failure
