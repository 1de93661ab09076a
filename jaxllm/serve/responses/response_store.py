"""Response store: responses that ``previous_response_id`` can name, bounded in number and bytes, in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from jaxllm.serve.api.errors import ApiError, dumps

Item = dict[str, Any]
_REMEMBERED = 10_000
"""Ids of dropped responses that the store remembers, to say what became of them."""


@dataclass(frozen=True)
class StoredResponse:
    """Response and the conversation up to it.

    Attributes:
        body: the response object.
        inputs: input items of its own request.
        context: items of the whole conversation: those of earlier responses, its inputs and its outputs.
        owner: API key that it belongs to, by the key's index; others do not see it.
    """

    body: dict[str, Any]
    inputs: tuple[Item, ...]
    context: tuple[Item, ...]
    owner: str = ""

    @property
    def bytes(self) -> int:
        """Size as JSON; items that several responses of a conversation share count in each."""
        return len(dumps(self.body)) + len(dumps(self.context))


class ResponseStore:
    """Bounded store of responses; the least recently used is dropped where a new one has no room.

    Args:
        count: maximum number of responses.
        size: maximum bytes of all of them.
    """

    def __init__(self, count: int, size: int):
        self._count, self._size = count, size
        self._held: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._dropped: OrderedDict[str, None] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def put(self, name: str, response: StoredResponse) -> None:
        """Stores a response, dropping others; one that is larger than the store is dropped itself."""
        size = response.bytes
        with self._lock:
            self._held[name] = response, size
            self._bytes += size
            while self._held and (len(self._held) > self._count or self._bytes > self._size):
                dropped, (_, size) = self._held.popitem(last=False)
                self._bytes -= size
                self._dropped[dropped] = None
            while len(self._dropped) > _REMEMBERED:
                self._dropped.popitem(last=False)

    def get(self, name: str, owner: str, param: str | None = None) -> StoredResponse:
        """A response by its id, which is now the most recently used.

        Raises:
            ApiError: 404; there is none, it was dropped, or it belongs to another key. ``param`` is the request field.
        """
        with self._lock:
            found = self._held.get(name)
            if found is not None and found[0].owner == owner:
                self._held.move_to_end(name)
                return found[0]
            dropped = name in self._dropped
        why = "it was deleted, never stored (store = false), or is of another server or key"
        if dropped:
            why = (
                f"it was dropped as the least recently used one, because the store holds at most {self._count:,} "
                f"responses and {self._size:,} bytes"
            )
        message = f"there is no response {name[:100]!r}: {why}. Send the whole conversation as input."
        raise ApiError(404, message, param=param, code="response_not_found")

    def delete(self, name: str, owner: str) -> None:
        """Deletes a response.

        Raises:
            ApiError: 404; see ``get``.
        """
        self.get(name, owner)
        with self._lock:
            found = self._held.pop(name, None)
            self._bytes -= 0 if found is None else found[1]
