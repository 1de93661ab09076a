"""Chunk schedule: which chunks of files stay in the host's memory until they are read again (PatrickStar).

A chunk that an event of the disk tier has in memory, read or newly written, may be kept until the next event that
reads it. A warm-up step records the events and the bytes of everything else at each of them (PatrickStar,
arXiv:2108.05818); steps repeat, so the next read of each chunk is known. When there is no room the chunk that is read
latest leaves (Belady's choice), and one that would leave before it is read is never kept.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from typing import Literal, NamedTuple


class ChunkEvent(NamedTuple):
    """Event of the disk tier.

    Attributes:
        reads: chunks that the event needs, from the files where they are not kept.
        offers: chunks whose contents are in memory after the event, and can be kept.
        room: chunks that the host's memory has room for, from this event to the next.
    """

    reads: tuple[int, ...]
    offers: tuple[int, ...]
    room: int


class KeptChunks(NamedTuple):
    """Chunks that the events of a step keep and load.

    Attributes:
        keeps: chunks that each event puts into the host's memory.
        loads: chunks that each event reads from files.
    """

    keeps: tuple[tuple[int, ...], ...]
    loads: tuple[tuple[int, ...], ...]

    @property
    def chunks_read(self) -> int:
        """Chunks read from files in the step."""
        return sum(map(len, self.loads))


class ChunkSchedule:
    """Schedule of steps with the same events, one after the other; the first one begins with an empty memory.

    A step is planned with the one after it, in which the last of its chunks may be read.

    Args:
        events: of a step.
    """

    def __init__(self, events: Sequence[ChunkEvent]):
        self.events = tuple(events)
        self._now = 0
        self._until: dict[int, int] = {}  # kept chunk -> moment of its next read; moments count events of all steps
        self._since: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        self._keeps: list[list[int]] = []
        self._loads: list[list[int]] = []
        self._reads: dict[int, list[int]] = {}
        self._offers: dict[int, list[int]] = {}
        for place, event in enumerate(self.events):
            for places, chunks in ((self._reads, event.reads), (self._offers, event.offers)):
                for chunk in chunks:
                    places.setdefault(chunk, []).append(place)

    def step(self) -> KeptChunks:
        """Chunks that the next step keeps and loads."""
        while len(self._keeps) < 2 * len(self.events):
            self._event()
        if len(self._heap) > 2 * len(self._until):  # entries of chunks that were read
            self._heap = [(-until, chunk) for chunk, until in self._until.items()]
            heapq.heapify(self._heap)
        count = len(self.events)
        found = KeptChunks(tuple(map(tuple, self._keeps[:count])), tuple(map(tuple, self._loads[:count])))
        del self._keeps[:count], self._loads[:count]
        return found

    def distance(self, chunk: int, place: int) -> int | None:
        """Events from one that offers a chunk to the next that reads it; None: none does before it is offered again."""
        reads, offers = (self._later(places.get(chunk), place) for places in (self._reads, self._offers))
        return None if reads is None or offers is None or offers < reads else reads

    def _later(self, places: list[int] | None, place: int) -> int | None:
        if not places:
            return None
        index = bisect.bisect_right(places, place)
        return places[index] - place if index < len(places) else len(self.events) + places[0] - place

    def _event(self) -> None:
        event, now = self.events[self._now % len(self.events)], self._now
        self._keeps.append([])
        self._loads.append([chunk for chunk in event.reads if self._until.get(chunk) != now])
        for chunk in event.reads:
            self._until.pop(chunk, None)
        for chunk in event.offers:
            if (distance := self.distance(chunk, now % len(self.events))) is not None:
                until = now + distance
                self._until[chunk], self._since[chunk] = until, now
                heapq.heappush(self._heap, (-until, chunk))
                self._keeps[-1].append(chunk)
        while len(self._until) > event.room:
            self._leave()
        self._now += 1

    def _leave(self) -> None:
        """The chunk that is read latest is not kept, since the event that would have kept it."""
        while True:
            until, chunk = heapq.heappop(self._heap)
            if self._until.get(chunk) == -until:
                break
        del self._until[chunk]
        self._keeps[self._since[chunk] - self._now - 1].remove(chunk)


def replayed_loads(
    events: Sequence[ChunkEvent], steps: int, leaves: Literal["oldest use", "none kept"] = "oldest use"
) -> list[int]:
    """Chunks that each step reads from files where the chunk whose last use is longest ago leaves (LRU).

    Chunks stay from events that offer them to those that read them, as in a ``ChunkSchedule``.

    Args:
        events: of a step.
        steps: with these events.
        leaves: "none kept": nothing is kept.
    """
    kept: dict[int, None] = {}  # in the order of the last use
    loads = []
    for _ in range(steps):
        loads.append(0)
        for event in events:
            for chunk in event.reads:
                loads[-1] += chunk not in kept
                kept.pop(chunk, None)
            for chunk in event.offers:
                kept.pop(chunk, None)
                kept[chunk] = None
            room = event.room if leaves == "oldest use" else 0
            for chunk in list(kept)[: max(0, len(kept) - room)]:
                del kept[chunk]
    return loads
