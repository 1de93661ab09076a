"""Batch journal: append-only JSON lines file of a batch's states and answers; each is on disk before it counts."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxllm.files import DataError, sync


class BatchJournal:
    """Journal of one batch. Several threads may append; rows that wait for the disk together are written together.

    A row that a crash has cut short is dropped when the journal is opened. Of several answers of one line, the first
    counts.

    Args:
        path: the file; it is created if there is none.

    Attributes:
        states: rows that are no answers, in order.
        counts: number of answers by kind, "output" and "error".

    Raises:
        DataError: a row before the last one is not JSON.
    """

    def __init__(self, path: Path):
        self._path = path
        self.states: list[dict[str, Any]] = []
        self.counts = {"output": 0, "error": 0}
        self._answers: dict[int, tuple[str, int, int]] = {}  # by line: kind, first byte, length
        self._waiting: list[tuple[dict[str, Any], bytes]] = []
        self._waiting_lock, self._writing = threading.Lock(), threading.Lock()
        new = not path.exists()
        self._file = path.open("a+b")
        self._size = self._read()
        self._file.truncate(self._size)
        if new:
            sync(path.parent)

    def __contains__(self, line: int) -> bool:
        """Whether a line has its answer."""
        return line in self._answers

    def answer(self, line: int, kind: str, row: dict[str, Any]) -> None:
        """Records the answer of a line; returns once it is on disk. ``kind`` is "output" or "error"."""
        self._append({"line": line, "kind": kind, "row": row})

    def state(self, **fields: Any) -> None:
        """Records a state of the batch; returns once it is on disk."""
        self._append(fields)

    def rows(self, kind: str) -> Iterator[bytes]:
        """Answers of a kind in the order of their lines, each as a line of JSON."""
        with self._path.open("rb") as file:
            for _, (own, at, length) in sorted(self._answers.items()):
                if own == kind:
                    file.seek(at)
                    yield json.dumps(json.loads(file.read(length))["row"], separators=(",", ":")).encode() + b"\n"

    def close(self) -> None:
        """Closes the file and forgets where the answers are; their numbers stay."""
        with self._writing:
            self._file.close()
            self._answers = {}

    def _append(self, row: dict[str, Any]) -> None:
        raw = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        with self._waiting_lock:
            self._waiting.append((row, raw))
        with self._writing:
            with self._waiting_lock:
                rows, self._waiting = self._waiting, []
            if not rows:
                return  # another thread has written it
            self._file.write(b"".join(raw for _, raw in rows))
            self._file.flush()
            os.fsync(self._file.fileno())
            for row, raw in rows:
                self._take(row, len(raw))

    def _read(self) -> int:
        """Reads all rows; returns the end of the last whole one."""
        self._file.seek(0)
        self._size = 0
        for number, raw in enumerate(self._file, 1):
            try:
                row = json.loads(raw) if raw.endswith(b"\n") else None
            except ValueError:
                row = None
            if row is None:
                if self._file.read(1):
                    self._file.close()
                    raise DataError(f"{self._path}:{number}: the journal is damaged; this row is not JSON.")
                break
            self._take(row, len(raw))
        return self._size

    def _take(self, row: dict[str, Any], length: int) -> None:
        if "line" not in row:
            self.states.append(row)
        elif row["line"] not in self._answers:
            self._answers[row["line"]] = row["kind"], self._size, length
            self.counts[row["kind"]] += 1
        self._size += length
