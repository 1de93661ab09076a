"""Batches made ready ahead of the step, in a thread, so that the accelerator does not wait for them."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

Ready = TypeVar("Ready")


@runtime_checkable
class BatchSource(Protocol):
    """A data set whose batches are a function of the step."""

    def batch_at(self, step: int, *, shard: int = 0, num_shards: int = 1) -> Any: ...


class Prefetcher(Generic[Ready]):
    """Iterates (step, put(batch of that step)) from `start_step` on, without end; close it or use it in a `with`.

    put: runs in the thread; moves a batch to the devices (`lambda batch: jax.device_put(batch, sharding)`). Contexts
        such as the mesh are per thread in JAX, so it must name its shardings itself.
    depth: batches ready or in the making beyond the one handed out; bounds the memory they take.
    shard, num_shards: which rows of each global batch, as in `TokenDataset.batch_at`.

    An exception in the thread is raised by the next `next()`, after the batches that were ready. Nothing about the data
    depends on the thread: batches are functions of the step, so closing early loses nothing.
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
                del item  # or this thread would keep the batch alive while it waits
                step += 1
        except BaseException as error:  # whatever it is, it belongs to the consumer
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
        """Stops the thread, waits for it, and lets go of the batches. May be called twice."""
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
