"""Batch record: one batch on disk, its input and its journal, and the batch object that they amount to."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

from jaxllm.files import new_directory
from jaxllm.serve.batches.batch_endpoints import ENDPOINTS
from jaxllm.serve.batches.batch_input import BatchInput
from jaxllm.serve.batches.batch_journal import BatchJournal
from jaxllm.serve.batches.batch_run import error_row
from jaxllm.serve.batches.file_store import FileStore

SECONDS = 24 * 3600
"""Time in which a batch is answered; the lines left then are answered with ``batch_expired``."""
_ENDED = ("completed", "expired", "cancelled")
_JOURNAL, _INPUT = "journal.jsonl", "input.jsonl"
_TIMES = ("in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled")


class BatchRecord:
    """A batch in a directory.

    Args:
        folder: directory of the batch, whose name is its id.

    Attributes:
        id: id of the batch.
        journal: states and answers.
        lines: requests; the file is read at the first use.

    Raises:
        DataError: the journal is damaged.
    """

    def __init__(self, folder: Path):
        self.id, self._folder = folder.name, folder
        self.journal = BatchJournal(folder / _JOURNAL)
        self._head = self.journal.states[0]
        self._lines: BatchInput | None = None
        self._ending = threading.Lock()
        if not any("total" in state for state in self.journal.states):
            self.journal.state(total=len(self.lines))
        if self.ended:
            self.journal.close()

    @classmethod
    def create(cls, folder: Path, content: Path, head: dict[str, Any]) -> BatchRecord:
        """Creates a batch of a copy of a file; it is on disk when this returns.

        Args:
            folder: directory of the batch, which does not exist.
            content: the input.
            head: input_file_id, endpoint, completion_window and metadata of the batch object.
        """
        with new_directory(folder) as made:
            shutil.copyfile(content, made / _INPUT)
            journal = BatchJournal(made / _JOURNAL)
            journal.state(**head, created_at=int(time.time()))
            journal.close()
        return cls(folder)

    @property
    def lines(self) -> BatchInput:
        """Requests of the batch."""
        if self._lines is None:
            self._lines = BatchInput(self._folder / _INPUT, ENDPOINTS, self._head["endpoint"])
        return self._lines

    @property
    def status(self) -> str:
        """Status of the batch object."""
        return next((state["status"] for state in reversed(self.journal.states) if "status" in state), "validating")

    @property
    def ended(self) -> bool:
        """Whether the batch has its output."""
        return self.status in _ENDED

    @property
    def cancelled(self) -> bool:
        """Whether the batch was to be cancelled."""
        return any(state.get("status") == "cancelling" for state in self.journal.states)

    @property
    def seconds_left(self) -> float:
        """Seconds until the batch expires."""
        return self._head["created_at"] + SECONDS - time.time()

    def enter(self, status: str, **fields: Any) -> None:
        """Records a status, and the time."""
        self.journal.state(status=status, at=int(time.time()), **fields)

    def begin(self) -> None:
        """Records that its lines are worked on, unless that is known or it was cancelled first."""
        with self._ending:
            if self.status == "validating":
                self.enter("in_progress")

    def cancel(self) -> bool:
        """Records that the batch is to be cancelled; returns False for one that has ended.

        While the end is being written, it waits for that.
        """
        with self._ending:
            if not self.ended and not self.cancelled:
                self.enter("cancelling")
            return not self.ended

    def finish(self, files: FileStore) -> None:
        """Answers the lines that are left with an error, writes output and error file, and records the end.

        A crash within repeats it: answers and files that are there are kept.
        """
        with self._ending:
            self._finish(files)

    def _finish(self, files: FileStore) -> None:
        left = [line for line in self.lines if line.number not in self.journal]
        if left and not self.cancelled:
            self.journal.state(late=True)
        why = ("batch_expired", "the batch was not answered within 24 hours.")
        if self.cancelled:
            why = ("batch_cancelled", "the batch was cancelled.")
        for line in left:
            self.journal.answer(line.number, "error", error_row(line, *why))
        if not self.cancelled:
            self.enter("finalizing")
        made = dict[str, str]()
        for kind, mark in (("output", "0a"), ("error", "0b")):
            if self.journal.counts[kind]:
                name = f"file-{self.id.removeprefix('batch_')}{mark}"
                files.add(name, f"{self.id}_{kind}.jsonl", "batch_output", self.journal.rows(kind))
                made[f"{kind}_file_id"] = name
        late = any("late" in state for state in self.journal.states)
        self.enter("cancelled" if self.cancelled else "expired" if late else "completed", **made)
        self.journal.close()

    def body(self) -> dict[str, Any]:
        """Batch object."""
        states = self.journal.states
        times = {f"{name}_at": None for name in _TIMES}
        found: dict[str, Any] = {"output_file_id": None, "error_file_id": None}
        total = 0
        for state in states:
            if "status" in state:
                times[f"{state['status']}_at"] = times[f"{state['status']}_at"] or state["at"]
            total = state.get("total", total)
            found |= {name: state[name] for name in found if name in state}
        counts = self.journal.counts
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self._head["endpoint"],
            "errors": None,
            "input_file_id": self._head["input_file_id"],
            "completion_window": self._head["completion_window"],
            "status": self.status,
            **found,
            "created_at": self._head["created_at"],
            **times,
            "expires_at": self._head["created_at"] + SECONDS,
            "failed_at": None,
            "request_counts": {"total": total, "completed": counts["output"], "failed": counts["error"]},
            "metadata": self._head["metadata"],
        }
