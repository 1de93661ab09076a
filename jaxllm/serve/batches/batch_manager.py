"""Batch manager: runs the batches of a directory one after another, and resumes them when the server starts again."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import secrets
from pathlib import Path
from typing import Any

from jaxllm.files import make_directory
from jaxllm.serve.api.errors import ApiError
from jaxllm.serve.api.route_support import RequestService
from jaxllm.serve.batches.batch_endpoints import BatchEndpoints
from jaxllm.serve.batches.batch_input import BatchLine
from jaxllm.serve.batches.batch_record import BatchRecord
from jaxllm.serve.batches.batch_run import BatchStopped, run_batch
from jaxllm.serve.batches.batch_slots import BatchSlots
from jaxllm.serve.batches.file_store import FileStore
from jaxllm.serve.responses.response_store import ResponseStore

_LOG = logging.getLogger("jaxllm.serve")
_RETRY_SECONDS = 2.0


class BatchManager:
    """Files and batches of a directory, which one server at a time may use.

    Args:
        service: state of the server.
        folder: directory; it is created if there is none.
        store: store of responses.

    Attributes:
        files: files of the directory.

    Raises:
        OSError: the directory cannot be written, or another server uses it.
        DataError: a journal is damaged.
    """

    def __init__(self, service: RequestService, folder: Path, store: ResponseStore):
        make_directory(folder / "batches")
        self._lock = (folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            message = f"{folder} is the --batch-dir of another server that runs; give each its own."
            raise OSError(message) from None
        self.files = FileStore(folder / "files")
        self._folder = folder / "batches"
        found = (BatchRecord(one) for one in self._folder.iterdir() if one.name.startswith("batch_"))
        self._batches = {batch.id: batch for batch in sorted(found, key=lambda b: (b.body()["created_at"], b.id))}
        self._endpoints, self._slots = BatchEndpoints(service, store), BatchSlots(service)
        self._changed = asyncio.Event()
        self._running: tuple[str, asyncio.Task[None]] | None = None
        self._work = asyncio.create_task(self._run_all())

    async def close(self) -> None:
        """Stops the work; what has no answer yet is left for the next start."""
        self._work.cancel()
        await asyncio.gather(self._work, return_exceptions=True)
        for batch in self._batches.values():
            batch.journal.close()
        self._lock.close()

    def create(self, head: dict[str, Any]) -> BatchRecord:
        """Creates a batch; it begins to run at ``notify``. Blocks until it is on disk.

        Raises:
            ApiError: 404 or 400; there is no such input file, or it is not one for batches.
        """
        content = self.files.content(head["input_file_id"], "input_file_id")
        if (purpose := self.files.get(head["input_file_id"])["purpose"]) != "batch":
            raise ApiError(400, f'the file\'s purpose is {purpose!r}; upload it with "batch".', param="input_file_id")
        batch = BatchRecord.create(self._folder / f"batch_{secrets.token_hex(12)}", content, head)
        self._batches[batch.id] = batch
        return batch

    def notify(self) -> None:
        """Says that there is a new batch."""
        self._changed.set()

    def get(self, name: str) -> BatchRecord:
        """A batch by its id.

        Raises:
            ApiError: 404; there is none.
        """
        if name not in self._batches:
            raise ApiError(404, f"there is no batch {name[:100]!r}.", param="batch_id", code="batch_not_found")
        return self._batches[name]

    def list(self) -> list[BatchRecord]:
        """All batches, oldest first."""
        return list(self._batches.values())

    async def cancel(self, name: str) -> BatchRecord:
        """Cancels a batch: lines that run end without an answer, and those that have one keep it.

        Raises:
            ApiError: 404 or 400; there is no such batch, or it has ended.
        """
        batch = self.get(name)
        if not await asyncio.to_thread(batch.cancel):
            raise ApiError(400, f"the batch is {batch.status}, so it cannot be cancelled.", param="batch_id")
        if self._running is not None and self._running[0] == name:
            self._running[1].cancel()
        self._changed.set()
        return batch

    async def _run_all(self) -> None:
        while True:
            self._changed.clear()
            batch = next((one for one in self._batches.values() if not one.ended), None)
            if batch is None:
                await self._changed.wait()
                continue
            try:
                await self._run(batch)
            except BatchStopped:
                await asyncio.sleep(_RETRY_SECONDS)
            except Exception:
                _LOG.exception("batch %s cannot go on; it is tried again", batch.id)
                await asyncio.sleep(_RETRY_SECONDS)

    async def _run(self, batch: BatchRecord) -> None:
        if not batch.cancelled and batch.seconds_left > 0:
            await asyncio.to_thread(batch.begin)
            lines = await asyncio.to_thread(lambda: batch.lines)
            task = asyncio.create_task(run_batch(lines, batch.journal, self._answer, 2 * self._slots.most))
            self._running = batch.id, task
            if batch.cancelled:  # since the look above, when there was no task to cancel
                task.cancel()
            try:
                await asyncio.wait([task], timeout=batch.seconds_left)
            finally:
                self._running = None
                if not task.done():
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            if not task.cancelled() and (failure := task.exception()) is not None:
                raise failure
        await asyncio.to_thread(batch.finish, self.files)

    async def _answer(self, line: BatchLine, record: dict[str, Any]) -> dict[str, Any]:
        return await self._endpoints.answer(line.url, line.body, self._slots, record)
