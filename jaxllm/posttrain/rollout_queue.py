"""Rollout queue: batches of rollouts ahead of the training step, with a bound on how stale their weights are.

With a bound of k, the batch of step n is sampled with the weights after n - k steps, while the training step before it
runs; the first k batches of a start are sampled with the weights of that start. A queue that is lost with its process
is sampled again: what a step samples depends on its number, so no prompt is skipped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple


class QueuedBatch(NamedTuple):
    """Batch of a step, with the seconds that its swap and rollouts took, and those that the training loop waited."""

    batch: Any
    swap_seconds: float
    rollout_seconds: float
    waited: float


class RolloutQueue:
    """Queue of batches of rollouts.

    Args:
        swap: gives the engine the current weights; called when no rollouts are being sampled.
        sample: ``step -> batch``; runs in a thread if ``ahead``.
        ahead: steps by which batches are sampled ahead, the bound on their staleness; 0: on-policy.
        last: number of steps of the run; nothing is sampled for later ones.
    """

    def __init__(self, swap: Callable[[], None], sample: Callable[[int], Any], ahead: int, last: int):
        self._swap, self._sample, self._ahead, self._last = swap, sample, ahead, last
        self._thread = ThreadPoolExecutor(1, "rollouts") if ahead else None
        self._queued: deque[Future[tuple[Any, float]]] = deque()
        self._next: int | None = None

    def __enter__(self) -> RolloutQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def next(self, step: int) -> QueuedBatch:
        """Batch of ``step``; steps are consecutive.

        Raises:
            Exception: what ``sample`` raised.
        """
        began = time.monotonic()
        if self._thread is None:
            self._swap()
            swapped = time.monotonic()
            batch, seconds = self._timed(step)
            return QueuedBatch(batch, swapped - began, seconds, time.monotonic() - began)
        if self._queued:
            self._queued[-1].result()  # the weights change between two batches, never within one
        waiting = time.monotonic()
        self._swap()
        swapped = time.monotonic()
        self._next = step if self._next is None else self._next
        while self._next <= min(step + self._ahead, self._last - 1):
            self._queued.append(self._thread.submit(self._timed, self._next))
            self._next += 1
        batch, seconds = self._queued.popleft().result()
        waited = time.monotonic() - swapped + waiting - began
        return QueuedBatch(batch, swapped - waiting, seconds, waited)

    def _timed(self, step: int) -> tuple[Any, float]:
        began = time.monotonic()
        batch = self._sample(step)
        return batch, time.monotonic() - began
