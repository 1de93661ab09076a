"""Asynchronous engine for concurrent callers: each reads its own stream, and cancels its request by leaving."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from jaxllm.infer.adapter_catalogue import AdapterRevision
from jaxllm.infer.engine.engine import Engine
from jaxllm.infer.engine.stream_output import OutputDelta
from jaxllm.infer.sampling_params import SamplingParams
from jaxllm.infer.scheduling.policies import Service
from jaxllm.infer.scheduling.sequence import Request


class EngineStopped(RuntimeError):
    """The engine was stopped, or its thread has failed; the cause is chained."""


class AsyncEngine:
    """Runs an engine in a thread of its own; used as an async context manager.

        async with AsyncEngine(llm.engine) as engine:
            async for delta in engine.stream(ids, SamplingParams()):
                print(delta.text)

    Args:
        engine: engine that nothing else may call meanwhile.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._streams: dict[int, tuple[Request, asyncio.AbstractEventLoop, asyncio.Queue[Any], list[int]]] = {}
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    async def __aenter__(self) -> AsyncEngine:
        self._thread = threading.Thread(target=self._run, name="jaxllm engine", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._thread is not None
        self._inbox.put(("stop", None))
        await asyncio.to_thread(self._thread.join)

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        salt: str = "",
        service: Service | None = None,
        adapter: str | AdapterRevision | None = None,
    ) -> AsyncGenerator[OutputDelta, None]:
        """Streams the output deltas of a request until all its completions have ended.

        Leaving the stream early, or cancelling the task that reads it, cancels the request.

        Raises:
            ValueError: see ``Engine.submit``.
            EngineStopped: the engine is not running.
        """
        if self._thread is None or not self._thread.is_alive():
            raise EngineStopped("the engine is not running; use it within its `async with`.") from self._failure
        loop = asyncio.get_running_loop()
        out: asyncio.Queue[Any] = asyncio.Queue()
        if params is not None and params.grammar is not None:
            # A new grammar takes milliseconds to compile, which the engine's thread does not wait for.
            await asyncio.to_thread(self.engine.check, list(prompt), params)
        self._inbox.put(("submit", (list(prompt), params, salt, service, adapter, loop, out)))
        left = 1
        try:
            while left:
                item = await out.get()
                if isinstance(item, BaseException):
                    raise item
                if isinstance(item, Request):
                    left = item.params.n
                    continue
                left -= item.finish is not None
                yield item
        finally:
            if left:
                self._inbox.put(("cancel", out))

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        """Calls a function of the engine between two steps (``pause``, ``resume``, ``swap``) and returns its result.

        Raises:
            EngineStopped: the engine is not running.
            Exception: whatever the function raises.
        """
        if self._thread is None or not self._thread.is_alive():
            raise EngineStopped("the engine is not running; use it within its `async with`.") from self._failure
        out: asyncio.Queue[Any] = asyncio.Queue()
        self._inbox.put(("call", (function, asyncio.get_running_loop(), out)))
        failed, value = await out.get()
        if failed:
            raise value
        return value

    # In the thread

    def _run(self) -> None:
        try:
            while self._take(wait=not self.engine.busy):
                if self.engine.busy:
                    for delta in self.engine.step():
                        self._deliver(delta)
            self.engine.end_side_work()
            self.engine.keep_pages()
        except BaseException as error:
            self._failure = error
        stopped = EngineStopped("the engine has stopped.")
        stopped.__cause__ = self._failure
        for _, loop, out, _ in self._streams.values():
            _post(loop, out, stopped)
        while not self._inbox.empty():
            what, detail = self._inbox.get()
            if what in ("submit", "call"):
                _post(detail[-2], detail[-1], stopped if what == "submit" else (True, stopped))

    def _take(self, wait: bool) -> bool:
        """Handles the messages of callers; returns False when the engine is to stop."""
        while wait or not self._inbox.empty():
            what, detail = self._inbox.get()
            wait = False
            if what == "stop":
                return False
            if what == "submit":
                self._submit(*detail)
            elif what == "call":
                self._call(*detail)
            else:
                self._cancel(detail)
        return True

    def _submit(
        self,
        prompt: list[int],
        params: SamplingParams | None,
        salt: str,
        service: Service | None,
        adapter: str | AdapterRevision | None,
        loop: Any,
        out: Any,
    ) -> None:
        try:
            request = self.engine.submit(prompt, params, salt=salt, service=service, adapter=adapter)
        except ValueError as error:
            _post(loop, out, error)
            return
        self._streams[request.id] = request, loop, out, []
        _post(loop, out, request)

    def _call(self, function: Callable[[Engine], Any], loop: Any, out: Any) -> None:
        try:
            _post(loop, out, (False, function(self.engine)))
        except Exception as error:
            _post(loop, out, (True, error))

    def _cancel(self, out: asyncio.Queue[Any]) -> None:
        """Cancels the request whose output goes to this queue; messages come in order, so it was submitted before."""
        for number, (request, _, there, _) in list(self._streams.items()):
            if there is out:
                del self._streams[number]
                self.engine.cancel(request)

    def _deliver(self, delta: OutputDelta) -> None:
        if (stream := self._streams.get(delta.request.id)) is None:
            return
        stream[3].append(delta.number) if delta.finish is not None else None
        if len(stream[3]) == delta.request.params.n:
            del self._streams[delta.request.id]
        _post(*stream[1:3], delta)


def _post(loop: asyncio.AbstractEventLoop, out: asyncio.Queue[Any], item: Any) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(out.put_nowait, item)
