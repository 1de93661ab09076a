"""Host chunks: parts of the disk tier's files that stay in the host's memory, all of one size (PatrickStar).

The tiers of a run share one budget of host memory. Files are cut into chunks of one size, so that any chunk fits where
another one was (arXiv:2108.05818). A first period of steps records the calls of the tiers and the bytes of the host's
memory that everything else takes at each of them; from then on a ``ChunkSchedule`` says which chunks of a unit are
copied when it is given back, until they are read again. Files stay what they are without chunks: a write goes to its
file too, and what is not in memory is read from there.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.train.disk.chunk_schedule import ChunkEvent, ChunkSchedule, KeptChunks, replayed_loads
from jaxllm.train.disk.state_file import DiskTierError, FileLayout, buffer_bytes

RECORDED = 2
"""Periods that are recorded: in the first one nothing is in the window at the beginning."""


class ChunkCall(NamedTuple):
    """Call of a tier, as it is recorded.

    Attributes:
        reads: chunks of a unit that was taken and had to be read.
        offers: chunks of a unit that was given back.
        live: bytes of the host's memory that everything else takes.
    """

    reads: tuple[int, ...]
    offers: tuple[int, ...]
    live: int


class HostChunks:
    """Chunks of the files of one or several tiers in the host's memory.

    Args:
        limit: bytes of the host's memory, with everything else that ``live`` counts.
        chunk: bytes of a chunk.
        period: steps after which calls repeat.

    Attributes:
        chunk: as given.
        bytes: that chunks take now.
        schedule: of the calls that were recorded last; None before.
    """

    def __init__(self, limit: int, chunk: int, period: int = 1):
        self.chunk, self.bytes = chunk, 0
        self.schedule: ChunkSchedule | None = None
        self._limit, self._period = limit, period
        self._buffers, self._count, self._lock = 0, 0, threading.RLock()
        self._held: dict[int, np.ndarray] = {}
        self._until: dict[int, int] = {}
        self._plan: KeptChunks | None = None
        self._calls: list[ChunkCall] = []
        self._live: Callable[[], int] | None = None
        self._steps = 0

    def of(self, layouts: Sequence[FileLayout], window: int, aside: Collection[int] = ()) -> TierChunks:
        """Chunks of a tier's files.

        Args:
            layouts: of the files.
            window: files whose contents the tier has in memory, which is counted with everything else.
            aside: files whose contents have a place of their own beside the window, counted too.

        Raises:
            DiskTierError: there is no room beside these.
        """
        self._buffers += buffer_bytes(layouts, window, aside)
        self._check(0)
        firsts = []
        for layout in layouts:
            firsts.append(self._count)
            self._count += -(-layout.size // self.chunk)
        return TierChunks(self, [range(a, b) for a, b in zip(firsts, [*firsts[1:], self._count], strict=True)], layouts)

    # A step

    def begin(self, live: Callable[[], int]) -> None:
        """Begins a step.

        Args:
            live: bytes of the host's memory that the step takes beside the tiers' buffers.
        """
        if self._steps % self._period == 0:
            self._calls = []
            self._plan = None if self.schedule is None else self.schedule.step()
        self._live = live

    def end(self) -> str | None:
        """Ends a step; for the log: what is kept, after the last period that is recorded.

        Raises:
            DiskTierError: everything else takes more than the limit at some moment.
        """
        self._live = None
        self._steps += 1
        if self._steps % self._period or self._steps > RECORDED * self._period:
            return None
        events = self.events()
        if self.schedule is None or self.schedule.events != events:
            self.schedule = ChunkSchedule(events)
            for number in list(self._held):
                self._drop(number)
        if self._steps < RECORDED * self._period:
            return None
        most = max(event.room for event in events) * self.chunk
        after, none = ChunkSchedule(events), replayed_loads(events, 1, "none kept")[0]
        loads, size = [after.step().chunks_read for _ in range(3)][-1], self.chunk / 2**30 / self._period
        return (
            f"chunks of {self.chunk / 2**20:g} MiB stay in up to {most / 2**30:.3f} GiB of the host's memory: each "
            f"step reads {loads * size:.3f} GiB of files, {none * size:.3f} without them"
        )

    def events(self) -> tuple[ChunkEvent, ...]:
        """Events of the calls that were recorded; between two of them the memory of everything else only rises, or
        only falls."""
        rooms = [self._room(call.live) for call in self._calls]
        after = [*rooms[1:], rooms[0]] if rooms else []
        return tuple(
            ChunkEvent(call.reads, call.offers, min(now, then))
            for call, now, then in zip(self._calls, rooms, after, strict=True)
        )

    def make_room(self, live: int) -> None:
        """Gives up chunks, those that are needed last first, beside so many bytes of everything else."""
        while self._held and len(self._held) > self._room(live):
            self._drop(max(self._held, key=lambda number: self._until[number]))

    # Calls of tiers

    def took(self, numbers: range, read: bool) -> None:
        """Counts a unit that is taken; its chunks are not needed any more if it was read.

        Args:
            numbers: of its chunks.
            read: it was read; else the window still had it.
        """
        if self._live is None:
            return
        if read:
            self.forget(numbers)
        self._call(ChunkCall(tuple(numbers) if read else (), (), 0))

    def gave(self, numbers: range, new: bool) -> dict[int, np.ndarray]:
        """Memory of the chunks of a unit that are to be kept; the caller fills it in a thread of its own.

        Args:
            numbers: of its chunks.
            new: its contents have changed.
        """
        if new:
            self.forget(numbers)
        if self._live is None:
            return {}
        found = {}
        for number, until in self._call(ChunkCall((), tuple(numbers), 0)):
            self._until[number] = until
            if number not in self._held:
                found[number] = self._held[number] = self._memory()
        return found

    def forget(self, numbers: range) -> None:
        """Drops chunks, whose contents are used or not those of the file any more."""
        for number in numbers:
            if number in self._held:
                self._drop(number)

    def there(self, numbers: range) -> dict[int, np.ndarray]:
        """Contents of the chunks that are in memory."""
        return {number: self._held[number] for number in numbers if number in self._held}

    def _call(self, call: ChunkCall) -> list[tuple[int, int]]:
        """Records a call; the chunks that it keeps, with the moments of their next use."""
        assert self._live is not None
        live = self._live()
        self._check(live)
        place = len(self._calls)
        self._calls.append(call._replace(live=live))
        self.make_room(live)
        if self._plan is None or self.schedule is None or not call.offers or place >= len(self._plan.keeps):
            return []
        if self.schedule.events[place].offers != call.offers:
            return []  # another order of calls than what was recorded
        room = max(0, self._room(live) - len(self._held))
        base = self._steps // self._period * len(self.schedule.events) + place
        kept = []
        for number in self._plan.keeps[place]:
            if number not in self._held:
                if not room:
                    continue
                room -= 1
            kept.append((number, base + (self.schedule.distance(number, place) or 0)))
        return kept

    def _check(self, live: int) -> None:
        taken = self._buffers + live
        if taken > self._limit:
            raise DiskTierError(
                f"disk.host: {self._limit / 2**30:.3f} GiB of the host's memory are given, but the layers in the "
                f"window and saved inputs take {taken / 2**30:.3f} GiB; give more, a smaller disk.window, or set "
                "disk.activations."
            )

    def _room(self, live: int) -> int:
        return max(0, self._limit - self._buffers - live) // self.chunk

    def _memory(self) -> np.ndarray:
        # Pages of its own, which the system has again when nothing refers to them: the heap would keep them.
        memory = np.frombuffer(mmap.mmap(-1, self.chunk), np.uint8)
        self._count_bytes(self.chunk)
        weakref.finalize(memory, self._count_bytes, -self.chunk)
        return memory

    def _count_bytes(self, more: int) -> None:
        with self._lock:
            self.bytes += more

    def _drop(self, number: int) -> None:
        del self._held[number], self._until[number]


class TierChunks(NamedTuple):
    """Chunks of the files of one tier.

    Attributes:
        host: with those of other tiers.
        numbers: of the chunks of each unit.
        layouts: of the files.
    """

    host: HostChunks
    numbers: list[range]
    layouts: Sequence[FileLayout]

    def parts(
        self, unit: int, buffer: np.ndarray, memory: dict[int, np.ndarray]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Parts of a buffer with the contents of a unit's file, each with as many bytes of the memory of its chunk."""
        size, first, found = self.host.chunk, self.numbers[unit].start, []
        for number, own in memory.items():
            part = buffer[(number - first) * size : (number - first + 1) * size]
            found.append((part, own[: part.size]))
        return found

    def missing(self, unit: int, memory: dict[int, np.ndarray]) -> list[tuple[int, int]]:
        """Ranges of a unit's file, (begin, end), that are not in the memory of its chunks; neighbours are joined."""
        size, first, end = self.host.chunk, self.numbers[unit].start, self.layouts[unit].size
        ranges: list[tuple[int, int]] = []
        for number in self.numbers[unit]:
            if number in memory:
                continue
            begin, stop = (number - first) * size, min(end, (number - first + 1) * size)
            if ranges and ranges[-1][1] == begin:
                begin = ranges.pop()[0]
            ranges.append((begin, stop))
        return ranges
