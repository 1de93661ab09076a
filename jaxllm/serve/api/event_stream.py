"""Server-sent events, and work that ends when its client goes away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxllm.serve.api.errors import ApiError, dumps

T = TypeVar("T")
DONE = "data: [DONE]\n\n"


class ClientDisconnected(Exception):
    """Nobody waits for the answer any more."""


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What the work gives; it is cancelled when the client goes away.

    Raises:
        ClientDisconnected: it has.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        raise ClientDisconnected
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def event(data: Any) -> str:
    """One event."""
    return f"data: {dumps(data)}\n\n"


class EventStream(Response):
    """Sends events as they are made; a failure is the last of them.

    Args:
        events: texts of events, closed in any case.
        write_seconds: that the client may leave a piece unread; then it counts as gone.
        ended: called in the end.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], write_seconds: float, ended: Callable[[], object]):
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events, self._write_seconds, self._ended = events, write_seconds, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await cancel_on_disconnect(receive, self._send(send))
        except ClientDisconnected:
            # What is still unread would keep a closed connection open for as long as nobody reads it.
            if (transport := scope.get("state", {}).get("transport")) is not None:
                transport.abort()
        finally:
            self._ended()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events) as events:
            try:
                async for one in events:
                    await self._write(send, one)
            except ApiError as error:
                await self._write(send, event(error.body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, text: str) -> None:
        try:
            async with asyncio.timeout(self._write_seconds):
                await send({"type": "http.response.body", "body": text.encode("ascii"), "more_body": True})
        except TimeoutError:
            raise ClientDisconnected from None
