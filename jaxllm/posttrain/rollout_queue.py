"""Rollout queue: batches of rollouts ahead of the training step, with a bound on how stale their weights are.

With a bound of k, the batch of step n is sampled with the weights after n - k steps, while the training step before it
runs; the first k batches of a start are sampled with the weights of that start. A queue that is lost with its process
is sampled again: what a step samples depends on its number, so no prompt is skipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple

from jaxllm.observe.policy_phases import Phase, now


class QueuedBatch(NamedTuple):
    """Batch of a step.

    Attributes:
        batch: what was sampled.
        phases: those that have ended since the batch before: its update, the swap, and this batch's rollouts.
        waited: seconds that the training loop waited for rollouts and swap.
    """

    batch: Any
    phases: tuple[Phase, ...]
    waited: float

    def seconds(self, name: str) -> float:
        """Seconds of the phases of this name."""
        return sum(one.seconds for one in self.phases if one.name == name)


class RolloutQueue:
    """Queue of batches of rollouts.

    Args:
        swap: gives the engine the current weights, before the batch of a step; called when no rollouts are being
            sampled.
        sample: ``step -> batch``; runs in a thread if ``ahead``.
        ahead: steps by which batches are sampled ahead, the bound on their staleness; 0: on-policy.
        last: number of steps of the run; nothing is sampled for later ones.
        updated: returns once the update with the batch before is done.
    """

    def __init__(
        self,
        swap: Callable[[int], None],
        sample: Callable[[int], Any],
        ahead: int,
        last: int,
        updated: Callable[[], object] = lambda: None,
    ):
        self._swap, self._sample, self._ahead, self._last, self._updated = swap, sample, ahead, last, updated
        self._thread = ThreadPoolExecutor(1, "rollouts") if ahead else None
        self._queued: deque[Future[tuple[Any, Phase]]] = deque()
        self._next: int | None = None
        self._handed: float | None = None

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
        phases = []
        if self._handed is not None:
            self._updated()
            phases.append(Phase("train", step, self._handed, now()))
        began = now()
        if self._thread is not None and self._queued:
            self._queued[-1].result()  # the weights change between two batches, never within one
        swapping = now()
        self._swap(step)
        swapped = now()
        if self._thread is None:
            batch, rollout = self._timed(step)
            waited = now() - began
        else:
            self._next = step if self._next is None else self._next
            while self._next <= min(step + self._ahead, self._last - 1):
                self._queued.append(self._thread.submit(self._timed, self._next))
                self._next += 1
            batch, rollout = self._queued.popleft().result()
            waited = now() - swapped + swapping - began
        self._handed = now()
        return QueuedBatch(batch, (*phases, Phase("swap", step + 1, swapping, swapped), rollout), waited)

    def _timed(self, step: int) -> tuple[Any, Phase]:
        began = now()
        batch = self._sample(step)
        return batch, Phase("rollout", step + 1, began, now())
