"""Disk tier: units of state in files, of which a window is in memory; read ahead, written behind, forwarded.

A pass visits every unit once. Units that come next are read while one is updated, and what was updated is written while
the next ones are (ZeRO-Infinity, arXiv:2104.07857, section 5.2.2). A unit that is still in the window when the next
pass asks for it, written already or in flight, is forwarded from memory and never read; each buffer is written once
in a pass (the forwarding and deduplication of SSDTrain, arXiv:2408.10013). A pass may also only read: a unit that is
released as it was is not written. Chunks of the files may stay in the host's memory longer than the window has them
(``host_chunks``); what is there is not read. Units that are larger than others may have a place of their own beside the
window, so that they are read while as many other units as have their bytes are updated.
"""

from __future__ import annotations

import json
import math
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from jaxllm.parallel.distributed import ProcessGroup
from jaxllm.train.disk.config import DiskConfig
from jaxllm.train.disk.hidden_share import DiskClock
from jaxllm.train.disk.host_chunks import TierChunks
from jaxllm.train.disk.state_file import PREFIX, DiskTierError, FileLayout, StateFile, aligned_buffer, remove_leftovers

THREADS = 2
"""Threads of the pool that reads, and of the one that writes: one waits for the disk while the other computes a
checksum."""


class IoEvent(NamedTuple):
    """Entry of the I/O log.

    Attributes:
        what: a unit was read from its file, parts of it were kept in the host's memory, it was forwarded from the
            window, or written.
        unit: number of the unit.
        bytes: that were moved from or to the disk, or copied from what was kept.
    """

    what: Literal["read", "kept", "forward", "write"]
    unit: int
    bytes: int


@dataclass
class _Slot:
    """Place of a unit in memory.

    Attributes:
        buffer: contents of its file; None once it is written and not kept.
        ready: done when the buffer is filled.
        stored: done when the buffer is in the file; None: it was read from there.
        taken: the unit is being updated.
        kept: the buffer stays when it is written.
        unused: done when nobody reads the buffer any more; None: nobody does.
        read: it was read, and has not been taken since.
    """

    buffer: np.ndarray | None
    ready: Future[None]
    stored: Future[None] | None = None
    taken: bool = False
    kept: bool = True
    unused: Future[None] | None = None
    read: bool = False


def check_room(
    config: DiskConfig, state: int, activations: int = 0, reserved: int = 0, processes: ProcessGroup | None = None
) -> None:
    """Checks that files of these bytes fit into the directory, with those of other processes of the same file system.

    Args:
        config: directory, and most bytes of it.
        state: bytes of the train state in files.
        activations: bytes of saved activations in files.
        reserved: bytes of these that files of this process have already.
        processes: of the run, all of which call this at once; None: one. Those with the same host name and file system
            share what is free there, and those that see each other's files in the directory.

    Raises:
        DiskTierError: they do not, or the directory cannot be used.
    """
    directory, need = Path(config.directory), 2 * state + activations
    group, topic = processes or ProcessGroup(), "room of files"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=PREFIX) as sign:
            sign.write(b"not empty, so that it is nobody's leftover")
            sign.flush()
            free, place = shutil.disk_usage(directory).free, [socket.gethostname(), directory.stat().st_dev]
            own = {"place": place, "sign": Path(sign.name).name, "need": need, "reserved": reserved, "free": free}
            said = group.gather(topic, json.dumps(own))
            everyone = [json.loads(one) for one in json.loads(group.broadcast(topic, json.dumps(said)))]
            beside = [one for one in everyone if one["place"] == place or (directory / one["sign"]).exists()]
            group.barrier(topic)  # all have looked
    except OSError as error:
        raise DiskTierError(f"disk.directory = {directory} cannot be used: {error}.") from error
    # The last process that looked did so when the files of all were reserved.
    free = min(one["free"] for one in beside) + sum(one["reserved"] for one in beside)
    together = sum(one["need"] for one in beside)
    if config.bytes and need > config.bytes:
        limit, of, beside = config.bytes, "disk.bytes", []
    elif together > free:
        limit, of = free, "free there, or reserved already" if reserved else "free there"
    else:
        return
    what = "the parameters of layers and the optimizer state take" if config.parameters else "the state takes"
    more = f", the inputs of layers {activations / 2**30:.3f} GiB" if activations else ""
    more += f", in all {together / 2**30:.3f} GiB for {len(beside)} processes of this file system" if beside[1:] else ""
    raise DiskTierError(
        f"{what} {state / 2**30:.3f} GiB in files, and twice that while a checkpoint is written{more}, but "
        f"{limit / 2**30:.3f} GiB are {of} (disk.directory = {directory}); give more, or split the run over more "
        "processes."
    )


@dataclass
class DiskTier:
    """Units of state in files of a directory, of which ``window`` are in memory at a time.

    Args:
        directory: on the disk.
        layouts: layout of each unit's file.
        window: most units in memory.

    Attributes:
        chunks: of the files that stay in the host's memory; None: none do.
        clock: measures reads and writes; of several tiers together, if they share it.
        aside: units with a place of their own beside the window.
        log: I/O log, in the order of calls; None: none is kept.
        moved: bytes read and written so far, by ``IoEvent.what``.
        waited: seconds that calls have waited for the disk so far.

    Raises:
        DiskTierError: the directory has no room, or cannot be written.
    """

    directory: Path
    layouts: Sequence[FileLayout]
    window: int
    chunks: TierChunks | None = None
    log: list[IoEvent] | None = None
    moved: Counter[str] = field(default_factory=Counter)
    waited: float = 0.0
    clock: DiskClock = field(default_factory=DiskClock)
    aside: frozenset[int] = frozenset()
    _slots: dict[int, _Slot] = field(default_factory=dict)
    _coming: list[int] = field(default_factory=list)
    _spare: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        remove_leftovers(self.directory)
        self._files = [StateFile(self.directory, layout) for layout in self.layouts]
        self._readers = ThreadPoolExecutor(THREADS, "disk-tier-read")
        self._writers = ThreadPoolExecutor(THREADS, "disk-tier-write")
        self._waiters = ThreadPoolExecutor(THREADS, "disk-tier-wait")
        others = [layout.size for unit, layout in enumerate(self.layouts) if unit not in self.aside]
        mean = max(1.0, sum(others) / max(1, len(others)))
        self._ahead = {unit: self.window + math.ceil(self.layouts[unit].size / mean) for unit in self.aside}

    @property
    def bytes(self) -> int:
        """Bytes of the files, while no checkpoint reads older ones."""
        return sum(layout.size for layout in self.layouts)

    # A pass over the units

    def begin(self, order: Sequence[int]) -> None:
        """Begins a pass, in which the units of ``order`` are taken, and given back or released, in this order."""
        self._coming = list(order)
        self._read_ahead()

    def take(self, unit: int) -> np.ndarray:
        """Contents of the next unit, which nobody changes before ``give``.

        Raises:
            DiskTierError: it cannot be read, is damaged, or an earlier write failed.
        """
        assert self._coming[0] == unit, f"unit {unit} taken, {self._coming[0]} is next"
        start = time.monotonic()
        if unit in self._slots and not self._slots[unit].kept:
            self._evict(unit)
        if unit not in self._slots:
            if unit not in self.aside:
                self._make_room(wait=True)
            self._start_read(unit)
        elif self._slots[unit].stored is not None:
            self._record("forward", unit, 0)
        del self._coming[0]
        slot = self._slots[unit]
        slot.taken = True
        slot.ready.result()
        if self.chunks is not None:
            self.chunks.host.took(self.chunks.numbers[unit], slot.read)
        slot.read = False
        self.waited += time.monotonic() - start
        assert slot.buffer is not None
        return slot.buffer

    def give(self, unit: int, fill: Callable[[np.ndarray], None], keep: bool = True) -> None:
        """Gives a taken unit back, and starts to write it.

        Args:
            unit: the unit.
            fill: puts the new contents into the buffer; called in a thread of the pool.
            keep: keep it in memory until its place is needed, to be forwarded; otherwise until it is written.
        """
        slot = self._slots.pop(unit)
        buffer, before, unused = slot.buffer, slot.stored, slot.unused
        assert buffer is not None
        filled: Future[None] = Future()
        stays = self._kept_parts(unit, buffer, new=True)
        new = _Slot(buffer, filled, kept=keep)

        def write() -> None:
            try:
                for one in (before, unused):
                    if one is not None:
                        one.result()
                fill(buffer)
                for part, memory in stays:
                    np.copyto(memory, part)
            except BaseException as error:
                filled.set_exception(error)
                raise
            filled.set_result(None)
            file = self._file_to_write(unit)
            with self.clock.moving("write", file.layout.size):
                file.write(buffer)
            if not keep:
                new.buffer = None

        self._record("write", unit, self.layouts[unit].size)
        new.stored = self._writers.submit(write)
        self._slots[unit] = new  # last in the order of slots: the oldest one gives up its place first
        self._read_ahead()

    def release(self, unit: int, wait: Callable[[], object]) -> None:
        """Gives a taken unit back as it was; nothing is written.

        Args:
            unit: the unit.
            wait: returns when the contents are not read any more; called in a thread of the pool.
        """
        slot = self._slots.pop(unit)
        before, buffer = slot.unused, slot.buffer
        assert buffer is not None
        stays = self._kept_parts(unit, buffer, new=False)

        def waited() -> None:
            for part, memory in stays:
                np.copyto(memory, part)
            if before is not None:
                before.result()
            wait()

        slot.taken, slot.unused = False, self._waiters.submit(waited)
        self._slots[unit] = slot
        self._read_ahead()

    def flush(self) -> None:
        """Waits until all units are in their files.

        Raises:
            DiskTierError: a write failed.
        """
        for slot in self._slots.values():
            if slot.stored is not None:
                slot.stored.result()

    def put(self, unit: int, fill: Callable[[np.ndarray], None]) -> None:
        """Writes new contents of a unit, whatever it had; between two passes.

        Args:
            unit: the unit.
            fill: as for ``give``.
        """
        start = time.monotonic()
        if unit in self._slots:
            self._evict(unit)
        if unit not in self.aside:
            self._make_room(wait=True)
        self.waited += time.monotonic() - start
        empty: Future[None] = Future()
        empty.set_result(None)
        self._slots[unit] = _Slot(self._buffer(self.layouts[unit].size), empty, taken=True)
        self.give(unit, fill)

    # Whole contents

    def freeze(self) -> list[StateFile]:
        """Files with the contents of now, which are never written again: the next write of a unit makes a new file.

        A frozen file is freed when the caller has no reference to it any more and it is replaced.
        """
        self.flush()
        for file in self._files:
            file.frozen = True
        return list(self._files)

    def renew(self) -> list[StateFile]:
        """Files for new contents, new ones in the place of frozen ones; the memory is emptied."""
        for slot in self._slots.values():
            for one in (slot.ready, slot.stored, slot.unused):
                if one is not None:
                    one.exception()
        self._slots.clear()
        return [self.writable(unit) for unit in range(len(self._files))]

    def writable(self, unit: int) -> StateFile:
        """File of a unit that may be written by the caller: a new one in the place of a frozen one."""
        if self.chunks is not None:
            self.chunks.host.forget(self.chunks.numbers[unit])
        return self._file_to_write(unit)

    # Inside

    def _file_to_write(self, unit: int) -> StateFile:
        if self._files[unit].frozen:
            self._files[unit] = StateFile(self.directory, self.layouts[unit])
        return self._files[unit]

    def _kept_parts(self, unit: int, buffer: np.ndarray, new: bool) -> list[tuple[np.ndarray, np.ndarray]]:
        """Parts of the buffer of a unit that is given back, each with the memory that it is to be copied to."""
        if self.chunks is None:
            return []
        return self.chunks.parts(unit, buffer, self.chunks.host.gave(self.chunks.numbers[unit], new))

    def _read_ahead(self) -> None:
        for unit, ahead in self._ahead.items():
            if unit in self._coming[:ahead]:
                self._read_aside(unit)
        for unit in self._coming_soon():
            if unit in self._slots and self._slots[unit].kept:
                continue
            if unit in self._slots or not self._make_room():  # in the first case it is written and given up soon
                return
            self._start_read(unit)

    def _read_aside(self, unit: int) -> None:
        """Reads a unit that has a place of its own, unless it is there, or is still being written."""
        slot = self._slots.get(unit)
        if slot is not None:
            if slot.kept or not all(one is None or one.done() for one in (slot.ready, slot.stored, slot.unused)):
                return
            self._evict(unit)
        self._start_read(unit)

    def _coming_soon(self) -> list[int]:
        """Units that the window is for, in the order of the pass."""
        return [unit for unit in self._coming[: self.window + len(self.aside)] if unit not in self.aside][: self.window]

    def _make_room(self, wait: bool = False) -> bool:
        """Frees a place of the window, the oldest first; whether there is one.

        Which unit leaves depends on the order of the pass alone, and not on the time that the disk takes, so that what
        is read is known beforehand.
        """
        inside = {unit: slot for unit, slot in self._slots.items() if unit not in self.aside}
        if len(inside) < self.window:
            return True
        near = [unit for unit in self._coming_soon() if unit in inside and inside[unit].kept]
        free = [unit for unit, slot in inside.items() if not slot.taken]
        away = [unit for unit in free if unit not in near]
        if wait:
            return self._evict(away[0] if away else max(free, key=near.index))
        if not away:
            return False
        slot = self._slots[away[0]]
        done = all(one is None or one.done() for one in (slot.ready, slot.stored, slot.unused))
        return done and self._evict(away[0])

    def _evict(self, unit: int) -> bool:
        slot = self._slots.pop(unit)
        slot.ready.result()
        for one in (slot.stored, slot.unused):
            if one is not None:
                one.result()
        if slot.buffer is not None:
            self._spare.append(slot.buffer)
        return True

    def _start_read(self, unit: int) -> None:
        size = self.layouts[unit].size
        buffer, file, ranges = self._buffer(size), self._files[unit], [(0, size)]
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        if self.chunks is not None:
            there = self.chunks.host.there(self.chunks.numbers[unit])
            parts, ranges = self.chunks.parts(unit, buffer, there), self.chunks.missing(unit, there)
        missing = sum(end - begin for begin, end in ranges)

        def read() -> None:
            for part, memory in parts:
                np.copyto(part, memory)
            parts.clear()  # so that the memory is free when the unit is taken
            with self.clock.moving("read", missing):
                file.read(buffer, ranges)

        self._record("read", unit, missing)
        if missing < size:
            self._record("kept", unit, size - missing)
        self._slots[unit] = _Slot(buffer, self._readers.submit(read), read=True)

    def _buffer(self, size: int) -> np.ndarray:
        self._spare = [one for one in self._spare if one.size == size]
        return self._spare.pop() if self._spare else aligned_buffer(size)

    def _record(self, what: Literal["read", "kept", "forward", "write"], unit: int, size: int) -> None:
        self.moved[what] += size
        if self.log is not None:
            self.log.append(IoEvent(what, unit, size))
