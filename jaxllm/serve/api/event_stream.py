"""Server-sent events, and cancellation of work whose client has disconnected."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxllm.serve.api.errors import ApiError, dumps
from jaxllm.serve.api.sampling_fields import SamplingFields, StreamOptions
from jaxllm.serve.generation import Usage

T = TypeVar("T")
MAX_REASON = 500
"""Characters of an error's message in the log."""
DONE = "data: [DONE]\n\n"


class ClientDisconnected(Exception):
    """The client has disconnected, so its request is cancelled."""


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Awaits ``work`` and returns its result; cancels it when the client disconnects.

    Raises:
        ClientDisconnected: the client disconnected first.
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


def check_streaming(body: SamplingFields) -> None:
    """Checks the fields of a request that streaming excludes or needs.

    Raises:
        ApiError: one of them does not go with ``stream``.
    """
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream = true.", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs are not streamed; give stream = false.", param="prompt_logprobs")


@dataclass
class StreamUsage:
    """Token counts in the chunks of a stream.

    Attributes:
        options: the request's ``stream_options``.
        usage: counts so far.
    """

    options: StreamOptions | None
    usage: Usage

    @property
    def at_end(self) -> bool:
        """Whether a last chunk has the counts."""
        return self.options is not None and bool(self.options.include_usage)

    def of_chunk(self) -> dict[str, Any]:
        """The field ``usage`` of a chunk: null before a last one with the counts, or the counts so far."""
        if self.options is not None and self.options.continuous_usage_stats:
            return {"usage": self.usage.body()}
        return {"usage": None} if self.at_end else {}


def note_error(scope: Scope, error: ApiError) -> None:
    """Writes the reason of an error to the request's log record."""
    record = scope.get("jaxllm.record")
    if record is not None:
        record["error"] = error.message[:MAX_REASON]
        record.update({name: value for name in ("param", "code") if (value := getattr(error, name)) is not None})


def event(data: Any) -> str:
    """Text of one server-sent event with a JSON payload."""
    return f"data: {dumps(data)}\n\n"


class EventStream(Response):
    """Streaming response that sends events as they are generated; an error is sent as the last event.

    Args:
        events: texts of the events; the generator is always closed.
        write_seconds: time that the client may leave a chunk unread before it counts as disconnected.
        ended: called when the response has ended, however it ends.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], write_seconds: float, ended: Callable[[], object]):
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events, self._write_seconds, self._ended = events, write_seconds, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await cancel_on_disconnect(receive, self._send(scope, send))
        except ClientDisconnected:
            # Closing gracefully would wait for the client to read the buffered bytes.
            if (transport := scope.get("state", {}).get("transport")) is not None:
                transport.abort()
        finally:
            self._ended()

    async def _send(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events) as events:
            try:
                async for one in events:
                    await self._write(send, one)
            except ApiError as error:
                note_error(scope, error)
                await self._write(send, event(error.body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, text: str) -> None:
        try:
            async with asyncio.timeout(self._write_seconds):
                await send({"type": "http.response.body", "body": text.encode("ascii"), "more_body": True})
        except TimeoutError:
            raise ClientDisconnected from None
