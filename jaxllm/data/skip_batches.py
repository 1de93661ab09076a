"""Batches of a data set in their order, but for some that a run has passed over."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxllm.data.dataset import TokenDataset
from jaxllm.data.mixture import MixtureDataset


@dataclass(frozen=True, eq=False)
class SkippingDataset:
    """What a run's steps take from a data set: still a function of the step, with no state but what is left out.

    passed: [first, end) of numbers of batches, ascending and apart.
    """

    dataset: TokenDataset | MixtureDataset
    skipped: tuple[tuple[int, int], ...] = ()

    def batch_index(self, step: int) -> int:
        """Of the data set's batch that `step` takes."""
        for first, end in self.skipped:
            if step < first:
                break
            step += end - first
        return step

    def batch_at(self, step: int, *, shard: int = 0, num_shards: int = 1) -> Any:
        """As the data set's."""
        return self.dataset.batch_at(self.batch_index(step), shard=shard, num_shards=num_shards)

    def skip(self, step: int, count: int) -> SkippingDataset:
        """The same up to `step`, and the next `count` batches left out."""
        gone = [number for first, end in self.skipped for number in range(first, end)]
        merged: list[tuple[int, int]] = []
        for number in sorted([*gone, *(self.batch_index(step + i) for i in range(count))]):
            if merged and merged[-1][1] == number:
                merged[-1] = merged[-1][0], number + 1
            else:
                merged.append((number, number + 1))
        return replace(self, passed=tuple(merged))

    def cursor(self, step: int) -> dict[str, Any]:
        """The data set's, which says the step, and which batches the steps before and after it leave out."""
        own = self.dataset.cursor(step)
        return own | {"passed": [list(pair) for pair in self.skipped]} if self.skipped else own

    def at_cursor(self, saved: dict[str, Any]) -> tuple[SkippingDataset, int]:
        """As a checkpoint says, and its step. Raises CursorMismatch as the data set does."""
        step = self.dataset.check_cursor(saved)
        return replace(self, passed=tuple((first, end) for first, end in saved.get("passed", []))), step
