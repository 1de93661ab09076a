"""Offline batch: answers a batch file without HTTP, over the code of `/v1/batches`, and resumes after a stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.files import DataError, atomic, file_sha256
from jaxllm.serve.app import ApiService
from jaxllm.serve.batches.batch_endpoints import ENDPOINTS, BatchEndpoints
from jaxllm.serve.batches.batch_input import BatchInput, BatchLine
from jaxllm.serve.batches.batch_journal import BatchJournal
from jaxllm.serve.batches.batch_run import run_batch
from jaxllm.serve.batches.batch_slots import BatchSlots
from jaxllm.serve.config import ServeConfig
from jaxllm.serve.responses.response_store import ResponseStore
from jaxllm.serve.server import BackendFactory


@dataclass(frozen=True)
class BatchPaths:
    """Files of an offline batch.

    Attributes:
        source: requests, one a line.
        out: answers, in the order of the requests.
    """

    source: Path
    out: Path

    @property
    def errors(self) -> Path:
        """Lines that could not be answered; there is no such file if all were."""
        return self.out.with_name(f"{self.out.stem}.errors{self.out.suffix}")

    @property
    def journal(self) -> Path:
        """Answers so far; the file is removed at the end."""
        return self.out.with_name(f"{self.out.name}.journal")


@dataclass(frozen=True)
class BatchProgress:
    """Progress of an offline batch: its lines, and how many are answered and have failed."""

    total: int
    completed: int
    failed: int


def open_batch(paths: BatchPaths) -> tuple[BatchInput, BatchJournal]:
    """Lines and journal of an offline batch; a journal of an earlier run is resumed.

    Raises:
        DataError: the input cannot be read, the output exists, or the journal is of another input.
    """
    try:
        lines, name = BatchInput(paths.source, ENDPOINTS), file_sha256(paths.source)
    except OSError as error:
        raise DataError(f"{paths.source} cannot be read: {error.strerror}.") from None
    if paths.out.exists() and not paths.journal.exists():
        raise DataError(f"{paths.out} exists; move it away, or choose another name.")
    paths.out.parent.mkdir(parents=True, exist_ok=True)
    journal = BatchJournal(paths.journal)
    if not journal.states:
        journal.state(input=name)
    elif journal.states[0]["input"] != name:
        journal.close()
        raise DataError(
            f"{paths.journal} has the answers of another input than {paths.source}; delete it to begin anew."
        )
    return lines, journal


def run_offline(
    lines: BatchInput,
    journal: BatchJournal,
    paths: BatchPaths,
    config: ServeConfig,
    factory: BackendFactory,
    progress: Callable[[BatchProgress], object],
    ahead: int = 0,
) -> BatchProgress:
    """Answers the lines that have no answer yet, and writes the output and error files.

    Args:
        lines, journal: see ``open_batch``; the journal is closed.
        paths: files of the batch.
        config: name of the model, tool parser and effort policies.
        factory: opens the engine.
        progress: called at the beginning and after each answer.
        ahead: lines that the engine is given beyond those that it runs, for its policy to choose among; at most
            ``config.queue``.

    Returns:
        the progress at the end.
    """

    def state() -> BatchProgress:
        return BatchProgress(len(lines), journal.counts["output"], journal.counts["error"])

    async def run() -> None:
        service = ApiService(config)
        endpoints = BatchEndpoints(service, ResponseStore(config.stored_responses, config.stored_bytes))
        async with factory() as backend:
            service.open_for(backend)
            slots = BatchSlots(service, share=1.0, ahead=min(ahead, config.queue))

            async def answer(line: BatchLine, record: dict[str, Any]) -> dict[str, Any]:
                return await endpoints.answer(line.url, line.body, slots, record)

            progress(state())
            await run_batch(lines, journal, answer, 2 * slots.most, lambda: progress(state()))

    try:
        asyncio.run(run())
        for kind, path in (("output", paths.out), ("error", paths.errors)):
            if kind == "output" or journal.counts[kind]:
                with atomic(path) as file:
                    file.writelines(journal.rows(kind))
        ended = state()
    finally:
        journal.close()
    paths.journal.unlink()
    return ended
