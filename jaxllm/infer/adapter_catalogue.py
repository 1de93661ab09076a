"""Adapter catalogue: the names of all adapters that an engine can serve, and their revisions.

A name is cheap: its adapter stays on disk until a request needs it (MinT keeps catalogues of a million adapters beside
small working sets). A name has revisions; the newest is served to new requests, and ``rollback`` makes the one before
it the newest again. A request keeps the revision that it began with.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxllm.config import closest
from jaxllm.peft.adapter import Adapter, AdapterError

KEPT_REVISIONS = 8
"""Revisions of a name that can be rolled back to, the newest included."""
MAX_NAME = 200
"""Characters of a name."""

Source = Path | Adapter
"""Directory in PEFT's format, or an adapter in memory."""


class AdapterNotFoundError(ValueError):
    """A request names an adapter that is not in the catalogue."""


@dataclass(frozen=True)
class AdapterRevision:
    """One revision of an adapter.

    Attributes:
        id: unique in its catalogue, and never used again.
        name: name of the adapter.
        number: counts the revisions of the name, from 1.
        source: where its factors are.
    """

    id: int
    name: str
    number: int
    source: Source

    @property
    def salt(self) -> str:
        """Part of the prefix cache's salt: pages are shared by requests of one revision."""
        return f"{self.name}@{self.id}"


class AdapterCatalogue:
    """Catalogue of adapters by name; any thread may call it.

    Args:
        read: reads a directory in PEFT's format; None: only adapters in memory can be added.
    """

    def __init__(self, read: Callable[[Path], Adapter] | None = None):
        self._read, self._lock, self._ids = read, threading.Lock(), itertools.count(1)
        self._revisions: dict[str, list[AdapterRevision]] = {}
        self._numbers: dict[str, int] = {}

    @property
    def names(self) -> list[str]:
        """All names, in the order in which they came."""
        with self._lock:
            return list(self._revisions)

    def __len__(self) -> int:
        return len(self._revisions)

    def __contains__(self, name: str) -> bool:
        return name in self._revisions

    def add(self, name: str, source: Source) -> AdapterRevision:
        """Adds an adapter, or a revision of one; new requests get it. Its factors are not read.

        Raises:
            ValueError: the name is empty, too long, or has characters that cannot be printed.
        """
        if not name or len(name) > MAX_NAME or not name.isprintable() or name != name.strip():
            raise ValueError(
                f"the adapter name {name[:80]!r} is not legal; give 1 to {MAX_NAME} printable characters, and no space "
                "at either end."
            )
        with self._lock:
            self._numbers[name] = number = self._numbers.get(name, 0) + 1
            revision = AdapterRevision(next(self._ids), name, number, source)
            self._revisions[name] = [*self._revisions.get(name, []), revision][-KEPT_REVISIONS:]
        return revision

    def find(self, name: str) -> AdapterRevision:
        """Newest revision of an adapter.

        Raises:
            AdapterNotFoundError: there is no such adapter.
        """
        with self._lock:
            if name not in self._revisions:
                names = list(self._revisions)
                some = closest(name, names) if len(names) < 1000 else ""
                raise AdapterNotFoundError(f"there is no adapter {name[:100]!r} among {len(names)}.{some}")
            return self._revisions[name][-1]

    def remove(self, name: str) -> list[AdapterRevision]:
        """Removes an adapter with all its revisions, which are returned.

        Raises:
            AdapterNotFoundError: there is no such adapter.
        """
        self.find(name)
        with self._lock:
            return self._revisions.pop(name, [])

    def rollback(self, name: str) -> AdapterRevision:
        """Removes the newest revision of an adapter and returns the one before it, which new requests get.

        Raises:
            AdapterNotFoundError: there is no such adapter.
            ValueError: it has no revision before.
        """
        self.find(name)
        with self._lock:
            if len(own := self._revisions[name]) < 2:
                raise ValueError(f"the adapter {name!r} has one revision ({own[-1].number}), and none to go back to.")
            own.pop()
            return own[-1]

    def read(self, source: Source) -> Adapter:
        """Adapter of a source.

        Raises:
            AdapterError: the files are not an adapter of the model.
        """
        if isinstance(source, Adapter):
            return source
        if self._read is None:
            raise AdapterError(f"{source}: this engine reads no adapters from disk; give adapters in memory.")
        return self._read(source)
