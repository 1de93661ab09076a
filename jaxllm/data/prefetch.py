"""Prefetch: a thread prepares batches ahead of the step, so that the accelerator does not wait for them."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

Ready = TypeVar("Ready")


@runtime_checkable
class BatchSource(Protocol):
    """Data set whose batches are a function of the step."""

    def batch_at(self, step: int, *, shard: int = 0, num_shards: int = 1) -> Any:
        """Batch of `step`, or the rows of one shard of it."""
        ...


class Prefetcher(Generic[Ready]):
    """Prefetching iterator: yields (step, put(batch of that step)) from `start_step` on, without end.

    Close it, or use it in a `with` statement.

    put: runs in the thread and moves a batch to the devices (`lambda batch: jax.device_put(batch, sharding)`). Contexts
        such as the mesh are per thread in JAX, so `put` must name its shardings itself.
    depth: batches that are ready or in preparation beyond the one handed out; this bounds their memory.
    shard, num_shards: rows of each global batch, as in `TokenDataset.batch_at`.

    An exception in the thread is raised by `next()` after the batches that were ready. Batches are functions
    of the step, so closing early loses no data.
    """

    def __init__(
        self,
        dataset: BatchSource,
        start_step: int,
        put: Callable[[Any], Ready],
        depth: int = 2,
        *,
        shard: int = 0,
        num_shards: int = 1,
    ):
        if depth < 1:
            raise ValueError(f"prefetch depth is {depth}; it must be at least 1")
        self._make = lambda step: put(dataset.batch_at(step, shard=shard, num_shards=num_shards))
        self._depth = depth
        self._ready: deque[tuple[int, Ready]] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(start_step,), name="jaxllm-prefetch", daemon=True)
        self._thread.start()

    def _run(self, step: int) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
                    if self._closed:
                        return
                item = (step, self._make(step))
                with self._changed:
                    self._ready.append(item)
                    self._changed.notify_all()
                del item  # otherwise this thread keeps the batch alive while it waits
                step += 1
        except BaseException as error:  # any exception is raised again in the consumer
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def __iter__(self) -> Iterator[tuple[int, Ready]]:
        return self

    def __next__(self) -> tuple[int, Ready]:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error or self._closed)
            if self._closed:
                raise StopIteration
            if not self._ready:
                assert self._error is not None
                raise self._error
            item = self._ready.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        """Stops the thread, waits for it, and frees the batches. A second call does nothing."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> "Prefetcher[Ready]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
