"""Uneven rows: rows of a batch for devices that process different numbers of micro-batches in a step (Cephalo).

All devices run one program on arrays of equal shapes, so a device has room for the rows of the one that has most. The
rows keep their order: the first devices have the first rows of the global batch. The room that a device does not need
is padding after its own micro-batches, which its loop does not reach (``jaxllm.train.unequal.unequal_gradients``).

Source: arXiv:2411.01075. Legend: B rows of a global batch, D parts of it: indices of the uneven axes, S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Int

from jaxllm.data import Batch
from jaxllm.train.config import RunConfig
from jaxllm.train.run_rows import PADDING
from jaxllm.train.unequal.unequal_gradients import uneven_axes
from sharding import ShardingError


@dataclass(frozen=True)
class UnequalRows:
    """Rows of a batch for devices with different numbers of micro-batches.

    Attributes:
        counts: micro-batches of each index of the uneven axes in a step. [D]
        each: rows of one of its micro-batches.
        axes: the uneven axes, ``data`` or ``data`` and ``fsdp``.
    """

    counts: tuple[int, ...]
    each: int
    axes: tuple[str, ...] = ("data",)

    @property
    def rows(self) -> int:
        """Rows of a batch on the devices, padding included."""
        return len(self.counts) * max(self.counts) * self.each

    @cached_property
    def source(self) -> Int[np.ndarray, " rows"]:
        """Row of the global batch at each place of the batch on the devices; -1 for padding.

        Micro-batch i of a device has every n-th of its rows, where n is the most micro-batches of a device, as
        ``jaxllm.train.step.loss.split_micro_batches`` takes them.
        """
        first = np.cumsum([0, *self.counts[:-1]]) * self.each
        row, micro = np.arange(self.each)[:, None], np.arange(max(self.counts))
        parts = [
            np.where(micro < count, start + row * count + micro, -1)
            for start, count in zip(first, self.counts, strict=True)
        ]
        return np.stack(parts).reshape(-1)

    def arrange(self, batch: Batch) -> Batch:
        """The batch as it lies on the devices, with padding.

        Args:
            batch: host arrays of the global batch, [B S] each.
        """

        def one(name: str, array: Any) -> Any:
            if array is None:
                return None
            found = array[self.source]
            found[self.source < 0] = PADDING.get(name, 0)
            return found

        return batch._replace(**{name: one(name, array) for name, array in batch._asdict().items()})

    def describe(self) -> str:
        """Line for the log: rows and micro-batches of each index of the uneven axes."""
        rows = ", ".join(str(count * self.each) for count in self.counts)
        micro = ", ".join(map(str, self.counts))
        return f"uneven rows: {rows} rows of a step over {' x '.join(self.axes)}, in {micro} micro-batches"


def unequal_rows(config: RunConfig, mesh: Mesh | AbstractMesh) -> UnequalRows | None:
    """Uneven rows of a run; None: all devices have equally many.

    Args:
        config: the run.
        mesh: of the run.

    Raises:
        ShardingError: ``parallel.micro_batches`` does not fit the run's batch; says what does.
    """
    counts = config.parallel.micro_batches
    axes = uneven_axes(counts, config.parallel.zero, mesh.shape)
    if not axes:  # numbers of other devices are refused by the table (``jaxllm.train.unequal.unequal_refusals``)
        return None
    total, said = config.accumulate * len(counts), f"parallel.micro_batches = {' '.join(map(str, counts))}"
    devices = " x ".join(axes)
    if sum(counts) != total:
        raise ShardingError(
            f"{said} are {sum(counts)} micro-batches, but accumulate = {config.accumulate} on {devices} = "
            f"{len(counts)} makes {total} of a batch; give numbers whose sum is {total}"
            + (f", or set accumulate to {sum(counts) // len(counts)}." if sum(counts) % len(counts) == 0 else ".")
        )
    if config.data.batch_size % total:
        raise ShardingError(
            f"{said}: data.batch_size = {config.data.batch_size} does not divide into {total} micro-batches "
            f"(accumulate x {devices}); the nearest that do: "
            f"{', '.join(str(n) for n in _nearest(config.data.batch_size, total))}."
        )
    return UnequalRows(counts, config.data.batch_size // total, axes)


def _nearest(rows: int, parts: int) -> list[int]:
    """Multiples of ``parts`` around ``rows``, above zero."""
    below = rows // parts * parts
    return [n for n in (below, below + parts) if n]
