"""A 4-bit format of dense weights: served sharded as its dense weights compute."""

from __future__ import annotations

import numpy as np

from tests.infer import engines
from tests.proofs.harness import proof
from tests.seams.test_int4_format import served_error

MESHES = ["fsdp=2,tensor=2", "data=2,fsdp=2,tensor=2", "tensor=2"]


@proof("seams", cases=MESHES, sample=1, float64=True, bound=1e-10)
def packed_weights_are_served(mesh: str) -> float:
    """Greedy completions with continuous batching, and their log-probabilities."""
    return served_error(mesh, engines.ENGINES["tight, swap"], np.random.default_rng([*mesh.encode()]))
