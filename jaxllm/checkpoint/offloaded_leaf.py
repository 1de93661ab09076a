"""OffloadedLeaf: a leaf of a state that is not in memory, such as optimizer state in files of the disk tier.

Its checkpoint is that of the same array in memory: a run saved with it resumes without it, and the other way round.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxllm.checkpoint.snapshot_leaf import SnapshotLeaf
from jaxllm.checkpoint.storage.stored_leaf import Index


class OffloadedLeaf(ABC):
    """Leaf in the place of an array, [shape] dtype, that is read and written piece by piece.

    Attributes:
        shape, dtype, sharding: of the array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Any

    @abstractmethod
    def snapshot(self) -> SnapshotLeaf:
        """The values of now, readable until the snapshot is dropped, whatever happens to the leaf."""

    @abstractmethod
    def restore(self, read: Callable[[Index], np.ndarray]) -> OffloadedLeaf:
        """Takes restored values: of this process's part, piece by piece.

        Args:
            read: slice of the array -> its values.
        """
