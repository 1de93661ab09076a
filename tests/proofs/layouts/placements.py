"""Placements of an array over a mesh of two axes, and all conversions between them."""

from __future__ import annotations

import itertools

import numpy as np

from sharding.placement import ArrayPlacement
from tests.proofs.harness import proof
from tests.sharding.test_placement import PLACEMENTS, conversion_error


@proof("layouts", cases=list(itertools.product(PLACEMENTS, PLACEMENTS)), sample=6, float64=True, bound=1e-12)
def conversions(case: tuple[str, str]) -> float:
    """Error of the converted array; its program has the collectives of the steps, no others, and sends their bytes."""
    before, after = map(ArrayPlacement.parse, case)
    return conversion_error(before, after, np.random.default_rng([*case[0].encode(), *case[1].encode()]))
