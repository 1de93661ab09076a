"""Corpus statistics: lengths of documents."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LengthStats:
    """Length statistics of a set of documents: count, sum, extremes and percentiles (each a length that occurs)."""

    count: int
    total: int
    least: int
    p50: int
    p90: int
    p99: int
    most: int


def length_stats(values: Sequence[int] | np.ndarray) -> LengthStats:
    """Length statistics of documents. Raises ValueError for an empty set."""
    ordered = np.sort(np.asarray(values, np.int64))
    if not len(ordered):
        raise ValueError("there are no documents, so there are no lengths")
    p50, p90, p99 = (int(ordered[min(len(ordered) - 1, int(share * len(ordered)))]) for share in (0.5, 0.9, 0.99))
    return LengthStats(len(ordered), int(ordered.sum()), int(ordered[0]), p50, p90, p99, int(ordered[-1]))
