"""Data source: the protocol of training data that a run can be given; batches are functions of the step."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from jaxllm.data.batch import Batch


@runtime_checkable
class DataSource(Protocol):
    """Training data with a data cursor, so that a run resumes without repeating or losing a batch.

    ``ResumableDataset`` implements all but ``batch_at`` from the JSON values that determine the batches.
    """

    @property
    def fingerprint(self) -> str:
        """Hash of everything that determines the batches."""
        ...

    def batch_at(self, step: int, *, shard: int = 0, num_shards: int = 1) -> Batch:
        """Global batch of ``step``, or the rows of one of ``num_shards`` processes (contiguous, in order of shard).

        The same fields are present at every step.
        """
        ...

    def check_steps(self, steps: int) -> None:
        """Raises DataError if there is not enough data for a run of ``steps`` steps."""
        ...

    def cursor(self, step: int) -> dict[str, Any]:
        """JSON values that a checkpoint after ``step`` steps stores."""
        ...

    def check_cursor(self, saved: dict[str, Any]) -> int:
        """Step to resume from, out of a saved cursor.

        Raises:
            CursorMismatch: the data differs from what the checkpoint was trained on.
        """
        ...
