"""Local tasks: files with a JSON object per line, of one of three kinds.

{"prompt": ..., "choices": [...], "answer": 0}    multiple choice by likelihood: acc, and acc_norm per byte of a choice
{"prompt": ..., "target": ...}                    the first generated line equals the target: exact_match
{"text": ...}                                     likelihood of a text: bits_per_byte
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.evals.scorer import Scorer
from jaxllm.files import DataError, at

KINDS = ({"prompt", "choices", "answer"}, {"prompt", "target"}, {"text"})


@dataclass(frozen=True)
class TaskResult:
    """Result of a task.

    Attributes:
        name: name of its file.
        rows: number of rows.
        metrics: metrics by name.
        errors: standard error of each metric that is a mean over rows.
    """

    name: str
    rows: int
    metrics: dict[str, float]
    errors: dict[str, float]

    def __str__(self) -> str:
        parts = [
            f"{name} {value:.4f}" + (f" ± {self.errors[name]:.4f}" if name in self.errors else "")
            for name, value in self.metrics.items()
        ]
        return f"{self.name}: {self.rows} rows, {', '.join(parts)}"


def run_task(scorer: Scorer, path: Path, limit: int | None = None) -> TaskResult:
    """Evaluates a model on a task file.

    Args:
        limit: number of first rows to use; all by default.

    Raises:
        DataError: a row is of no kind, or of another kind than the first; names it.
    """
    rows = _read(path)[:limit]
    if "choices" in rows[0]:
        return _choices(scorer, path.stem, rows)
    if "target" in rows[0]:
        settings = {"until": ["\n"], "max_gen_toks": 64}
        answers = scorer.write([(row["prompt"], settings) for row in rows])
        hits = [text.strip() == row["target"].strip() for text, row in zip(answers, rows, strict=True)]
        return _means(path.stem, {"exact_match": hits})
    nats = -sum(scorer.texts([row["text"] for row in rows]))
    size = sum(len(row["text"].encode()) for row in rows)
    return TaskResult(path.stem, len(rows), {"bits_per_byte": nats / math.log(2) / size}, {})


def _choices(scorer: Scorer, name: str, rows: list[dict[str, Any]]) -> TaskResult:
    pairs = [(row["prompt"], choice) for row in rows for choice in row["choices"]]
    scores = iter(scorer.continuations(pairs))
    plain, by_byte = [], []
    for row in rows:
        values = [next(scores)[0] for _ in row["choices"]]
        sizes = [len(choice.encode()) for choice in row["choices"]]
        plain.append(max(range(len(values)), key=values.__getitem__) == row["answer"])
        by_byte.append(max(range(len(values)), key=lambda i: values[i] / sizes[i]) == row["answer"])
    return _means(name, {"acc": plain, "acc_norm": by_byte})


def _means(name: str, hits: dict[str, list[bool]]) -> TaskResult:
    means = {metric: sum(values) / len(values) for metric, values in hits.items()}
    many = len(next(iter(hits.values())))
    errors = {metric: math.sqrt(mean * (1 - mean) / max(many - 1, 1)) for metric, mean in means.items()}
    return TaskResult(name, many, means, errors)


def _read(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{at(path, number)}: not valid JSON ({error})") from None
        kind = set(row) if isinstance(row, dict) else set()
        if kind not in KINDS or (rows and kind != set(rows[0])):
            legal = " or ".join(str(sorted(k)) for k in KINDS)
            raise DataError(f"{at(path, number)}: has the fields {sorted(kind)}; give {legal}, the same in all rows")
        if "choices" in row and not (row["choices"] and 0 <= row["answer"] < len(row["choices"])):
            raise DataError(f"{at(path, number)}: answer = {row['answer']} of {len(row['choices'])} choices")
        rows.append(row)
    if not rows:
        raise DataError(f"{at(path)}: no rows")
    return rows
