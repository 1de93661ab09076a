"""Shardings inferred from forward passes of models that declare none."""

from __future__ import annotations

import itertools

import numpy as np

from tests.proofs.harness import proof
from tests.sharding.foreign_models import FAMILIES
from tests.sharding.test_infer import inference_error


@proof("layouts", cases=list(itertools.product(FAMILIES, (2, 4))), sample=1, float64=True, bound=1e-12)
def inferred_shardings(case: tuple[str, int]) -> float:
    """Error of loss and gradients against one device; each device has its share of the matrices' bytes."""
    family, size = case
    return inference_error(FAMILIES[family](np.random.default_rng([*family.encode()])), size)
