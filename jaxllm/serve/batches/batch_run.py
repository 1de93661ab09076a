"""Batch run: answers the lines of a batch that have no answer yet, several at a time, and records each."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from jaxllm.serve.api.errors import ApiError
from jaxllm.serve.batches.batch_input import BatchInput, BatchLine
from jaxllm.serve.batches.batch_journal import BatchJournal

Answer = Callable[[BatchLine, dict[str, Any]], Awaitable[dict[str, Any]]]
"""Response body of a line, given its log record; raises ``ApiError``."""
_LOG = logging.getLogger("jaxllm.serve")
_RETRY_SECONDS = 0.5


class BatchStopped(Exception):
    """The server is stopping; the lines without an answer are left for the next start."""


async def run_batch(
    lines: BatchInput,
    journal: BatchJournal,
    answer: Answer,
    width: int,
    progress: Callable[[], object] = lambda: None,
) -> None:
    """Answers every line that has no answer in the journal.

    Cancelling it cancels the lines that run; they stay without an answer.

    Args:
        lines: requests.
        journal: where answers are recorded.
        answer: answers a line.
        width: lines that are worked on at a time.
        progress: called after each answer.

    Raises:
        BatchStopped: the server is stopping.
    """
    tasks: set[asyncio.Task[None]] = set()

    async def one(line: BatchLine) -> None:
        kind, row = await _answered(line, answer)
        await asyncio.to_thread(journal.answer, line.number, kind, row)
        progress()

    try:
        for line in lines:
            if line.number in journal:
                continue
            while len(tasks) >= width:
                await _first(tasks)
            tasks.add(asyncio.create_task(one(line)))
        while tasks:
            await _first(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _first(tasks: set[asyncio.Task[None]]) -> None:
    """Waits for a task to end, and raises its exception."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    tasks -= done
    for task in done:
        task.result()


async def _answered(line: BatchLine, answer: Answer) -> tuple[str, dict[str, Any]]:
    """("output" or "error", row of that file)."""
    if line.problem is not None:
        return "error", error_row(line, *line.problem)
    name = secrets.token_hex(12)
    while True:
        try:
            status, body = 200, await answer(line, {"id": name})
        except ApiError as error:
            if error.status == 429:  # the queue is full of other requests
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if error.status == 503:
                raise BatchStopped(error.message) from error
            status, body = error.status, error.body()
        except Exception:
            _LOG.exception("a line of a batch failed")
            failure = ApiError(500, "internal error; the server's log has the details.", code="internal_error")
            status, body = 500, failure.body()
        response = {"status_code": status, "request_id": name, "body": body}
        row = {"id": f"batch_req_{name}", "custom_id": line.custom_id, "response": response, "error": None}
        return "output" if status == 200 else "error", row


def error_row(line: BatchLine, code: str, message: str) -> dict[str, Any]:
    """Row of the error file for a line that was not sent to a route."""
    error = {"code": code, "message": message}
    name = f"batch_req_{secrets.token_hex(12)}"
    return {"id": name, "custom_id": line.custom_id, "response": None, "error": error}
