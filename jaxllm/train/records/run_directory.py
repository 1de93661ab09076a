"""Run directory: config.json, metrics.jsonl, events.jsonl, loss.png, tokenizer/, checkpoints/, receipt.json."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxllm.files import read_rows


class RunDirectory:
    """Paths and small files of one run. Whole files are replaced atomically.

    Args:
        path: the directory.
        writes: False in all processes of a run but one: these write nothing.
    """

    def __init__(self, path: Path | str, *, writes: bool = True):
        self.path = Path(path)
        self.writes = writes
        self.config = self.path / "config.json"
        self.metrics = self.path / "metrics.jsonl"
        self.layers = self.path / "layers.jsonl"
        self.events = self.path / "events.jsonl"
        self.profiles = self.path / "profiles"
        self.plot = self.path / "loss.png"
        self.tokenizer = self.path / "tokenizer"
        self.checkpoints = self.path / "checkpoints"
        self.receipt = self.path / "receipt.json"

    def write_json(self, file: Path, value: Any) -> None:
        """Writes ``value`` to ``file``, atomically."""
        self._replace(file, json.dumps(value, indent=2) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """All rows of metrics.jsonl; a last line that a kill cut short is left out."""
        return read_rows(self.metrics)

    def drop_metrics_after(self, step: int) -> None:
        """Drops rows after ``step``, which a resumed run writes again."""
        for file in (self.metrics, self.layers):
            self._filter(file, lambda row: row["step"] <= step)

    def drop_evaluation(self, step: int) -> None:
        """Drops the held-out loss of ``step``, which is about to be written again."""
        self._filter(self.metrics, lambda row: row["step"] != step or "heldout_nll" not in row)

    def _filter(self, file: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
        if self.writes and file.exists():
            self._replace(file, "".join(json.dumps(row) + "\n" for row in read_rows(file) if keep(row)))

    def _replace(self, file: Path, text: str) -> None:
        if not self.writes:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        temporary.write_text(text)
        temporary.replace(file)
