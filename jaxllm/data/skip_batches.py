"""Data-set view that skips batches, such as those around a loss spike after a rollback."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxllm.data.batch import Batch
from jaxllm.data.data_source import DataSource


@dataclass(frozen=True, eq=False)
class SkippingDataset:
    """Data set without the skipped batches: a batch is still a function of the step and of `skipped` alone.

    skipped: half-open ranges [first, end) of batch indices; ascending, neither overlapping nor adjacent.
    """

    dataset: DataSource
    skipped: tuple[tuple[int, int], ...] = ()

    def batch_index(self, step: int) -> int:
        """Index, in the underlying data set, of the batch that `step` trains on."""
        for first, end in self.skipped:
            if step < first:
                break
            step += end - first
        return step

    def batch_at(self, step: int, *, shard: int = 0, num_shards: int = 1) -> Batch:
        """Batch of `step`; arguments as in `DataSource.batch_at`."""
        return self.dataset.batch_at(self.batch_index(step), shard=shard, num_shards=num_shards)

    def skip(self, step: int, count: int) -> SkippingDataset:
        """Copy that is the same before `step` and also skips the `count` batches from `step` on."""
        gone = [number for first, end in self.skipped for number in range(first, end)]
        merged: list[tuple[int, int]] = []
        for number in sorted([*gone, *(self.batch_index(step + i) for i in range(count))]):
            if merged and merged[-1][1] == number:
                merged[-1] = merged[-1][0], number + 1
            else:
                merged.append((number, number + 1))
        return replace(self, skipped=tuple(merged))

    def cursor(self, step: int) -> dict[str, Any]:
        """Data cursor for a checkpoint: the data set's cursor at `step`, and the skipped batches."""
        own = self.dataset.cursor(step)
        return own | {"passed": [list(pair) for pair in self.skipped]} if self.skipped else own

    def at_cursor(self, saved: dict[str, Any]) -> tuple[SkippingDataset, int]:
        """(view, step) restored from a checkpoint's cursor. Raises CursorMismatch if the data is different."""
        step = self.dataset.check_cursor(saved)
        return replace(self, skipped=tuple((first, end) for first, end in saved.get("passed", []))), step
