"""Pool window: the few parts of the KV cache that are on the device at a time, besides those that stay there."""

from __future__ import annotations

import collections
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import jax
import numpy as np
from jaxtyping import Int

from jaxllm.infer.streaming.blocks.pool_store import Part, Pools, PoolStore
from jaxllm.infer.streaming.weight_file import CacheUnavailableError


@dataclass
class PoolCounts:
    """Counts of a window.

    Attributes:
        reads, read_bytes: parts that were read, and their bytes, by tier.
        written_pages: pages that were written back, by tier.
        stalls: uses that had to wait for a part.
        stalled_seconds: how long they waited.
        most: most parts that do not stay on the device were there at a time.
    """

    reads: dict[str, int] = field(default_factory=lambda: collections.defaultdict(int))
    read_bytes: dict[str, int] = field(default_factory=lambda: collections.defaultdict(int))
    written_pages: dict[str, int] = field(default_factory=lambda: collections.defaultdict(int))
    stalls: int = 0
    stalled_seconds: float = 0.0
    most: int = 0


class PoolWindow:
    """Parts on the device: some for good, the others by turns, at most ``size`` of them at a time.

    ``begin``, ``take`` and ``give_back`` are called by one thread. Parts are read by one thread and written back by
    another, so that both directions of the link are used at once.

    Args:
        held: parts that stay on the device.
        stores: where the others are.
        place: where they compute.
        size: parts of the others on the device at a time.
    """

    def __init__(
        self, held: dict[Part, Pools], stores: Mapping[Part, PoolStore], place: jax.sharding.Sharding, size: int
    ):
        self.held, self.stores, self.size = held, stores, min(size, len(stores))
        self.counts = PoolCounts()
        self._place = place
        # On a CPU an array of the host may be the device's own, and programs write to their pools in place.
        self._copies = next(iter(place.device_set)).platform == "cpu"
        self._reader, self._writer = ThreadPoolExecutor(1, "kv-reads"), ThreadPoolExecutor(1, "kv-writes")
        for pool in (self._reader, self._writer):
            weakref.finalize(self, pool.shutdown, wait=False, cancel_futures=True)
        self._to_read: collections.deque[Part] = collections.deque()
        self._ahead: collections.deque[tuple[Part, Future[Pools]]] = collections.deque()
        self._frees: list[Future[None]] = []
        self._writes = dict[Part, Future[None]]()
        self._writing: collections.deque[Future[None]] = collections.deque()
        self._on_device, self._lock = 0, threading.Lock()

    def begin(self, parts: Sequence[Part]) -> None:
        """Starts to read the parts of a step, in the order in which they are taken.

        Raises:
            CacheUnavailableError: a part of the last step could not be written back.
        """
        self._wait_for_writes(len(self._writing))
        self._to_read.extend(part for part in parts if part not in self.held)
        for _ in range(self.size):
            self._read_ahead(None)

    def take(self, part: Part) -> Pools:
        """A part on the device, for a program that returns it; waits until it is there.

        Raises:
            CacheUnavailableError: it cannot be read, or could not be written back after the last step.
        """
        if part in self.held:
            return self.held[part]
        expected, future = self._ahead.popleft()
        assert expected == part, (expected, part)
        late, begin = not future.done(), time.perf_counter()
        pools = future.result()
        if late:
            self.counts.stalls += 1
            self.counts.stalled_seconds += time.perf_counter() - begin
        return pools

    def give_back(
        self, part: Part, pools: Pools, written: Pools = None, pages: Sequence[Int[np.ndarray, " M"]] = ()
    ) -> None:
        """Takes a part back after its program was started.

        Args:
            part: the part.
            pools: the program's result.
            written: contents of the pages that it has written to, see ``PoolStore.write``. No more of them wait on the
                device than parts are there.
            pages: their numbers.

        Raises:
            CacheUnavailableError: an earlier part could not be written back.
        """
        if part in self.held:
            self.held[part] = pools
            return
        write = self._writes[part] = self._writer.submit(self._write, part, written, pages)
        self._writing.append(write)
        self._read_ahead(pools)
        self._wait_for_writes(self.size)

    def restart(self) -> None:
        """Forgets a step that was broken off."""
        self._to_read.clear()
        waiting = [*(future for _, future in self._ahead), *self._frees, *self._writes.values()]
        for future in waiting:
            future.exception()
        self._ahead.clear()
        self._frees.clear()
        self._writes.clear()
        self._writing.clear()
        self._on_device = 0

    def close(self) -> None:
        """Ends the threads."""
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown(cancel_futures=True)

    def _wait_for_writes(self, most: int) -> None:
        """Waits until no more than so many writes are left; those that have ended are looked at."""
        while self._writing and (len(self._writing) > most or self._writing[0].done()):
            self._writing.popleft().result()

    def _read_ahead(self, freed: Pools) -> None:
        while self._frees and self._frees[0].done():
            self._frees.pop(0).result()
        if self._to_read:
            part = self._to_read.popleft()
            write = self._writes.pop(part, None)
            self._ahead.append((part, self._reader.submit(self._read, part, write, freed)))
        elif freed is not None:
            self._frees.append(self._reader.submit(self._free, freed))

    def _free(self, pools: Pools) -> None:
        jax.block_until_ready(pools)
        for leaf in jax.tree.leaves(pools):
            leaf.delete()
        with self._lock:
            self._on_device -= 1

    def _read(self, part: Part, write: Future[None] | None, freed: Pools) -> Pools:
        store = self.stores[part]
        try:
            if freed is not None:
                self._free(freed)
            if write is not None:
                write.result()
            with self._lock:
                self._on_device += 1
                self.counts.most = max(self.counts.most, self._on_device)
            found = store.read()
            if self._copies:
                found = jax.tree.map(np.array, found)
            pools = jax.block_until_ready(jax.device_put(found, self._place))
        except jax.errors.JaxRuntimeError as error:  # such as RESOURCE_EXHAUSTED
            raise CacheUnavailableError(
                f"the KV cache of batch {part.batch} in unit {part.unit} cannot be copied from the {store.tier} tier "
                f"to the device: {error}. If its memory is full, give fewer pages, or leave less of the KV cache there."
            ) from error
        self.counts.reads[store.tier] += 1
        self.counts.read_bytes[store.tier] += sum(x.nbytes for x in jax.tree.leaves(found))
        return pools

    def _write(self, part: Part, written: Pools, pages: Sequence[Int[np.ndarray, " M"]]) -> None:
        store = self.stores[part]
        try:
            content = jax.tree.map(np.asarray, written)
        except jax.errors.JaxRuntimeError as error:
            raise CacheUnavailableError(
                f"the KV cache of batch {part.batch} in unit {part.unit} cannot be copied to the {store.tier} tier: "
                f"{error}"
            ) from error
        store.write(pages, content)
        self.counts.written_pages[store.tier] += sum(map(len, pages))
