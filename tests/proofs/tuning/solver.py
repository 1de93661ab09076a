"""Integer constraint solver of block sizes: the same solutions as brute force."""

from __future__ import annotations

import numpy as np

from tests.proofs.harness import proof
from tests.tune.test_block_solver import check, random_problem


@proof("tuning", count=2000, sample=20)
def solver_is_brute_force(seed: int) -> None:
    """Random problems: one to four variables, limits of sums of products, divisions of numbers and of variables."""
    check(random_problem(np.random.default_rng(seed)))
