"""Layer window: the few units of streamed weights that are on the device at a time, read ahead by threads.

A unit's arrays are freed when its computation has ended, and the thread that frees them reads the next unit into their
place: several threads fill what computation empties (PIPELOAD, arXiv:2409.04249; the window of Superpipeline,
arXiv:2410.08791).
"""

from __future__ import annotations

import collections
import gc
import math
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxllm.infer.streaming.layer_store import LayerStore, Unit
from jaxllm.infer.streaming.weight_file import WeightsUnavailableError


@dataclass
class StreamCounts:
    """Counts of a window.

    Attributes:
        units: units that were used.
        reads: units that were read, by tier.
        read_bytes: their bytes, by tier.
        stalls: uses that had to wait for the unit.
        stalled_seconds: how long they waited.
        failures: reads that failed; one that failed ahead of its use is tried again.
        most: most streamed units that were on the device at a time.
    """

    units: int = 0
    reads: dict[str, int] = field(default_factory=lambda: collections.defaultdict(int))
    read_bytes: dict[str, int] = field(default_factory=lambda: collections.defaultdict(int))
    stalls: int = 0
    stalled_seconds: float = 0.0
    failures: int = 0
    most: int = 0


class LayerWindow:
    """Units on the device: some for good, the others by turns, at most ``size`` of them at a time.

    ``take`` and ``give_back`` are called by one thread, unit by unit, in the order of the model; after ``restart`` from
    its beginning.

    Args:
        units: units of the model, in the order in which they compute.
        stores: where each is.
        device: the device.
        size: streamed units that are on the device at a time, the one that computes among them: with 1, reading and
            computing take turns.
        resident: units that stay on the device.
        loaders: threads that read.

    Raises:
        WeightsUnavailableError: a unit that stays cannot be read, or has no room.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        stores: Mapping[Unit, LayerStore],
        device: jax.Device,
        size: int,
        *,
        resident: Sequence[Unit] = (),
        loaders: int = 2,
    ):
        if size < 1 or loaders < 1:
            raise ValueError(f"a window of {size} units and {loaders} loaders: give 1 or more of each.")
        self.units, self.device, self.stores = units, device, stores
        self.counts = StreamCounts()
        self._held = {unit: self._read(unit) for unit in resident}
        self._streamed = [unit for unit in units if unit not in self._held]
        self.size = min(size, len(self._streamed))
        self._pool = ThreadPoolExecutor(loaders, "layers")
        weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        self._ahead: collections.deque[tuple[Unit, Future[Any]]] = collections.deque()
        self._next, self._on_device, self._lock = 0, 0, threading.Lock()
        for _ in range(self.size):
            self._read_ahead(None, None)

    @property
    def resident_bytes(self) -> int:
        """Bytes on a device of the units that stay."""
        leaves = jax.tree.leaves(self._held)
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)

    def there(self, unit: Unit) -> Any:
        """Weights of a unit that are on the device already; None: they are not.

        Of streamed units the next to be taken may be there, and until it is given back.
        """
        if unit in self._held:
            return self._held[unit]
        found = next((future for ahead, future in self._ahead if ahead == unit), None)
        return found.result() if found is not None and found.done() and found.exception() is None else None

    def take(self, unit: Unit) -> Any:
        """Weights of a unit; waits until they are there.

        Raises:
            WeightsUnavailableError: they cannot be read, now either if they were read ahead in vain.
        """
        self.counts.units += 1
        if unit in self._held:
            return self._held[unit]
        assert self._ahead[0][0] == unit, (self._ahead[0][0], unit)
        future = self._ahead[0][1]
        begin = time.perf_counter()
        late = not future.done()
        try:
            weights = future.result()
        except WeightsUnavailableError:  # that may have been long ago, before the server had nothing to do
            self._ahead[0] = unit, self._pool.submit(self._replace, unit, None, None)
            weights, late = self._ahead[0][1].result(), True
        if late:
            self.counts.stalls += 1
            self.counts.stalled_seconds += time.perf_counter() - begin
        return weights

    def give_back(self, unit: Unit, result: Any) -> None:
        """Frees a unit's weights when ``result``, arrays that were computed from them, are there."""
        if unit in self._held:
            return
        taken, future = self._ahead.popleft()
        assert taken == unit, (taken, unit)
        self._read_ahead(future.result(), result)

    def restart(self) -> None:
        """Begins again at the first unit, when a pass was broken off; what was read ahead is freed."""
        old = [future for _, future in self._ahead]
        self._ahead.clear()
        self._next = 0
        for future in old:
            self._read_ahead(None if future.exception() is not None else future.result(), None)

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _read_ahead(self, freed: Any, result: Any) -> None:
        unit = self._streamed[self._next]
        self._next = (self._next + 1) % len(self._streamed)
        self._ahead.append((unit, self._pool.submit(self._replace, unit, freed, result)))

    def _replace(self, unit: Unit, freed: Any, result: Any) -> Any:
        if result is not None:
            jax.block_until_ready(result)
        if freed is not None:
            for leaf in jax.tree.leaves(freed):
                leaf.delete()
            # On a CPU an array may be the host's own buffer, which JAX lets go when Python next collects garbage.
            gc.collect(0)
            with self._lock:
                self._on_device -= 1
        with self._lock:
            self._on_device += 1
            self.counts.most = max(self.counts.most, self._on_device)
        try:
            weights = self._read(unit)
        except BaseException:
            with self._lock:
                self._on_device -= 1
                self.counts.failures += 1
            raise
        tier = self.stores[unit].tier
        with self._lock:
            self.counts.reads[tier] += 1
            self.counts.read_bytes[tier] += sum(x.nbytes for x in jax.tree.leaves(weights))
        return weights

    def _read(self, unit: Unit) -> Any:
        return read_unit(self.stores[unit], unit, self.device)


def read_unit(store: LayerStore, unit: Unit, device: jax.Device) -> Any:
    """Weights of a unit that are on the device.

    Raises:
        WeightsUnavailableError: they cannot be read, or the device has no room.
    """
    try:
        return jax.block_until_ready(store.read(unit, device))
    except jax.errors.JaxRuntimeError as error:  # such as RESOURCE_EXHAUSTED
        raise WeightsUnavailableError(
            f"layer {unit.first} cannot be copied from the {store.tier} tier to {device}: {error}. If its memory is "
            "full, give a smaller window, fewer resident layers or a smaller KV cache."
        ) from error
