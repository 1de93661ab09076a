"""The runs that the proofs of parallelism draw."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllm.data import Batch
from tests import tiny
from tests.proofs.parallelism.parity import attends


def row(tokens: list[int], targets: list[int], documents: list[int]) -> Batch:
    one = [np.array([x], np.int32) for x in (tokens, targets, documents)]
    return Batch(*one, np.zeros_like(one[0]))


@pytest.mark.parametrize(
    ("tokens", "targets", "documents", "whether"),
    [
        ([3, 3, 4, 9], [3, 3, -1, -1], [1, 1, 0, 0], False),  # the same token twice, then padding
        ([3, 5, 4, 9], [3, 3, -1, -1], [1, 1, 0, 0], True),
        ([3, 5, 4, 9], [3, -1, -1, -1], [1, 1, 0, 0], False),  # what attends has no target
        ([3, 3, 4, 9], [3, 3, 1, 2], [1, 1, 2, 3], False),  # the others are documents of their own
        ([3, 3, 4, 9], [3, 3, 1, 2], [1, 1, 2, 2], True),
    ],
)
def test_queries_and_keys_have_a_gradient_where_tokens_differ(tokens, targets, documents, whether):
    assert attends(row(tokens, targets, documents)) == whether


def test_a_batch_without_such_a_gradient_is_known():
    assert not attends(tiny.batch(41959, 1, 16, 16, packed=True, padding=True))
    assert attends(tiny.batch(41960, 1, 16, 16, packed=True, padding=True))
