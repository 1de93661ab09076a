"""Adapter slots: which adapters are on the device, and which are read, written and evicted next.

An adapter is read from disk by a thread, waits on the host, is written into a slot before a sequence that needs it is
admitted, stays while a running sequence uses it, and afterwards until its slot or pages are needed: the least recently
used is evicted first. The scheduler asks ahead for the adapters of waiting sequences, so reading overlaps with steps
(loading as scheduled work: MinT, arXiv:2605.13779). Only writes touch the device; each writes a page of ranks, by one
compiled program.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np

from jaxllm.infer.adapter_catalogue import AdapterRevision
from jaxllm.infer.runner.adapter_pool import PackedAdapter, Page

HOST_ADAPTERS_PER_SLOT = 4
"""Adapters that are kept on the host for each slot."""


@dataclass
class _Resident:
    """Adapter in a slot."""

    slot: int
    pages: list[int]
    users: int = 0


class AdapterSlots:
    """Slots of adapters on the device, and the adapters on the host that were used last.

    The engine's thread calls the methods; ``keep`` and ``drop`` may be called by any.

    Args:
        slots: number of slots.
        columns: pages of an adapter of the largest rank.
        pages: pages of the pool.
        load: reads and packs an adapter; called in a thread.
        write: writes a page of an adapter into the pool.

    Attributes:
        tables: pages of each slot's adapter, int32[S, J]; -1 after the last.
        scales: scale of each slot's adapter.
        reads: adapters that were read and packed.
        loads: adapters that were written into a slot.
        evictions: adapters that were evicted from a slot.
    """

    def __init__(
        self,
        slots: int,
        columns: int,
        pages: int,
        load: Callable[[AdapterRevision], PackedAdapter],
        write: Callable[[int, Page], None],
    ):
        self.tables = np.full((slots, columns), -1, np.int32)
        self.scales = np.zeros(slots, np.float32)
        self.reads = self.loads = self.evictions = 0
        self._load, self._write = load, write
        self._free_slots, self._free_pages = list(range(slots))[::-1], list(range(pages))[::-1]
        self._resident: OrderedDict[int, _Resident] = OrderedDict()  # by revision, least recently used first
        self._host: OrderedDict[int, PackedAdapter] = OrderedDict()  # likewise
        self._reading: dict[int, Future[PackedAdapter]] = {}
        self._failed: dict[int, str] = {}
        self._lock = threading.Lock()
        self._reader = ThreadPoolExecutor(1, "jaxllm adapters")

    @property
    def resident(self) -> int:
        """Number of adapters on the device."""
        return len(self._resident)

    @property
    def on_host(self) -> int:
        """Number of adapters that are kept on the host."""
        return len(self._host)

    def slot(self, revision: AdapterRevision) -> int:
        """Slot of an adapter that is in use."""
        return self._resident[revision.id].slot

    def failure(self, revision: AdapterRevision) -> str | None:
        """Why an adapter could not be read; None while it is not known to be unreadable."""
        return self._failed.get(revision.id)

    def collect(self) -> None:
        """Takes over what the thread has read, or why it could not; the engine does so before each step."""
        for number, future in [item for item in self._reading.items() if item[1].done()]:
            del self._reading[number]
            if (error := future.exception()) is not None:
                self._failed[number] = str(error)
                continue
            self._keep(number, future.result())

    def prepare(self, revisions: Iterable[AdapterRevision]) -> None:
        """Reads the adapters of waiting sequences, in their order, and writes those for which there are slots."""
        wanted: dict[int, AdapterRevision] = {}
        for revision in revisions:
            if len(wanted) == len(self.scales):
                break
            wanted[revision.id] = revision
        for n, revision in enumerate(wanted.values()):
            if self.is_ready(revision):
                self._place(revision, list(wanted)[:n])
            elif revision.id not in self._reading and revision.id not in self._failed:
                self._reading[revision.id] = self._reader.submit(self._load, revision)

    def is_ready(self, revision: AdapterRevision) -> bool:
        """Whether an adapter is on the device or on the host."""
        return revision.id in self._resident or revision.id in self._host

    def pin(self, revision: AdapterRevision) -> bool:
        """Takes a slot for a sequence that is admitted; False if the adapter is not read or all slots are in use."""
        if not self.is_ready(revision) or not self._place(revision, ()):
            return False
        self._resident[revision.id].users += 1
        return True

    def unpin(self, revision: AdapterRevision) -> None:
        """Gives back what ``pin`` took; the adapter stays until its slot or pages are needed."""
        one = self._resident[revision.id]
        assert one.users > 0, f"adapter {revision.salt} is in no use"
        one.users -= 1

    def wait(self, seconds: float) -> bool:
        """Waits until an adapter has been read; False if none is being read."""
        pending = list(self._reading.values())
        if pending:
            wait(pending, seconds, FIRST_COMPLETED)
        return bool(pending)

    def keep(self, revision: AdapterRevision, packed: PackedAdapter) -> None:
        """Keeps an adapter on the host, in place of the one that was used least recently."""
        self._keep(revision.id, packed)

    def drop(self, revision: AdapterRevision) -> None:
        """Forgets an adapter on the host that no new request can ask for; on the device it is evicted in its turn."""
        with self._lock:
            self._host.pop(revision.id, None)

    def _keep(self, number: int, packed: PackedAdapter) -> None:
        with self._lock:
            self.reads += 1
            self._host[number] = packed
            while len(self._host) > HOST_ADAPTERS_PER_SLOT * len(self.scales):
                self._host.popitem(last=False)

    def _place(self, revision: AdapterRevision, keep: Iterable[int]) -> bool:
        """Puts an adapter that is ready into a slot; False if others are in use, or in ``keep``, in too many."""
        if revision.id in self._resident:
            self._resident.move_to_end(revision.id)
            return True
        with self._lock:
            if (packed := self._host.get(revision.id)) is None:
                return False  # dropped meanwhile
            self._host.move_to_end(revision.id)
        need = len(packed.pages)
        idle = [(n, one) for n, one in self._resident.items() if not one.users and n not in keep]
        gone, slots, pages = [], len(self._free_slots), len(self._free_pages)
        while (slots < 1 or pages < need) and idle:
            number, one = idle.pop(0)
            gone.append(number)
            slots, pages = slots + 1, pages + len(one.pages)
        if slots < 1 or pages < need:
            return False
        for number in gone:
            self._evict(number)
        slot, own = self._free_slots.pop(), [self._free_pages.pop() for _ in range(need)]
        for page, content in zip(own, packed.pages, strict=True):
            self._write(page, content)
        self.tables[slot, :need], self.scales[slot] = own, packed.scale
        self._resident[revision.id] = _Resident(slot, own)
        self.loads += 1
        return True

    def _evict(self, number: int) -> None:
        one = self._resident.pop(number)
        self.tables[one.slot] = -1
        self._free_slots.append(one.slot)
        self._free_pages += one.pages
        self.evictions += 1
