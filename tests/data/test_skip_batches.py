"""Skipping batches: the steps that remain, beside the list of batches without the skipped ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from jaxllm.data.batch import Batch
from jaxllm.data.dataset import ResumableDataset
from jaxllm.data.skip_batches import SkippingDataset


@dataclass(frozen=True, eq=False)
class Numbered(ResumableDataset):
    """Batches that hold their own number."""

    identity: dict[str, Any]
    batch_size: int = 1

    def batch_at(self, step: int, *, shard: int = 0, num_shards: int = 1) -> Batch:
        return Batch(*(np.full((1, 1), step, np.int32) for _ in range(4)))


@pytest.mark.parametrize("gone", [[(3, 2)], [(0, 1)], [(3, 2), (5, 1)], [(3, 2), (3, 2)], [(7, 3), (2, 1), (2, 4)]])
def test_steps_are_those_of_the_list_without_what_is_skipped(gone):
    """Each (step, count) skips the batches that these steps would have had, one pair after the other."""
    view, left = SkippingDataset(Numbered({"a": 1})), list(range(40))
    for step, count in gone:
        before = left[:step]
        view = view.skip(step, count)
        del left[step : step + count]
        assert left[:step] == before
        assert [view.batch_index(n) for n in range(len(left))] == left
    assert [int(view.batch_at(n).tokens[0, 0]) for n in range(len(left))] == left
    resumed, step = SkippingDataset(Numbered({"a": 1})).at_cursor(view.cursor(9))
    assert (step, resumed.skipped) == (9, view.skipped)
    assert sum(end - first for first, end in view.skipped) == sum(count for _, count in gone)
