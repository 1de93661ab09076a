"""Batch input: a JSON lines file of requests, read line by line; each is a request or a problem."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class BatchLine:
    """Request of a batch.

    Attributes:
        number: line of the file, from 1.
        custom_id: the client's name of it; None where the line has none.
        url: route that answers it.
        body: the route's request body.
        problem: what is wrong with the line, (code, message); None: nothing is.
    """

    number: int
    custom_id: str | None = None
    url: str = ""
    body: Any = None
    problem: tuple[str, str] | None = None


class BatchInput:
    """Requests of a JSON lines file; empty lines are none. Only the places of lines are kept in memory.

    Args:
        path: the file.
        endpoint: the only route that lines may name; None: any in ``endpoints``.
        endpoints: all routes that can be in a batch.

    Raises:
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path, endpoints: tuple[str, ...], endpoint: str | None = None):
        self._path, self._endpoints = path, endpoints if endpoint is None else (endpoint,)
        self._places: list[tuple[int, int, int]] = []  # line, first byte, length
        self._first: dict[str, int] = {}  # the line that has a custom_id first
        at = 0
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    self._places.append((number, at, len(raw)))
                    name = _parsed(raw)[1].get("custom_id")
                    if isinstance(name, str):
                        self._first.setdefault(name, number)
                at += len(raw)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[BatchLine]:
        with self._path.open("rb") as file:
            for number, at, length in self._places:
                file.seek(at)
                yield self._line(number, file.read(length))

    def _line(self, number: int, raw: bytes) -> BatchLine:
        why, row = _parsed(raw)
        name = row.get("custom_id")
        custom_id = name if isinstance(name, str) else None
        if why is None:
            why = self._problem(number, row)
        if why is not None:
            return BatchLine(number, custom_id, problem=("invalid_line", f"line {number}: {why}"))
        return BatchLine(number, custom_id, row["url"], row["body"])

    def _problem(self, number: int, row: dict[str, Any]) -> str | None:
        known = {"custom_id": str, "method": str, "url": str, "body": dict}
        if wrong := [name for name in row if name not in known]:
            return f"there is no field {wrong[0][:100]!r}; give {', '.join(known)}."
        for name, kind in known.items():
            if not isinstance(row.get(name), kind):
                return f"{name} is missing or is not {'an object' if kind is dict else 'a string'}."
        if not 0 < len(row["custom_id"]) <= 512:
            return "custom_id has no characters, or more than 512."
        if row["method"] != "POST":
            return f'method is {row["method"][:20]!r}; give "POST".'
        if row["url"] not in self._endpoints:
            return f"url is {row['url'][:100]!r}; give {' or '.join(self._endpoints)}."
        if (first := self._first[row["custom_id"]]) != number:
            return f"custom_id {row['custom_id'][:100]!r} is that of line {first} too."
        return None


def _parsed(raw: bytes) -> tuple[str | None, dict[str, Any]]:
    """(why a line is no JSON object, the object)."""
    try:
        row = json.loads(raw)
    except (ValueError, RecursionError):
        return "it is not JSON.", {}
    return (None, row) if isinstance(row, dict) else ("it is not a JSON object.", {})
