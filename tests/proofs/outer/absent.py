"""Absent experts: loss and gradients of a model without them."""

from __future__ import annotations

from tests.proofs.harness import proof
from tests.train.test_absent_experts import masked_error


@proof("outer", count=40, sample=1, float64=True, bound=1e-10)
def absent_experts_are_removed(seed: int) -> float:
    """Loss and gradients with two of eight experts away, less those of a model that has only the others."""
    return masked_error(seed)
