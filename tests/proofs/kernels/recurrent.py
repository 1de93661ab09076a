"""Head-wise recurrent network: drawn cases of every implementation against a loop in numpy and the reference."""

from __future__ import annotations

import numpy as np

from tests.kernels.recurrent_body import BOUNDS, PALLAS, Case, error
from tests.proofs.harness import proof

ALSO_COVERS = ("tests/kernels/recurrent_body.py",)


@proof("kernels", count=30, sample=1, bound=1.0)
def recurrent_kernels_agree(seed: int) -> float:
    """Error of XLA and of both kernels, interpreted, over what the dtype allows: forward and backward."""
    rng = np.random.default_rng(seed)
    dtype = str(rng.choice(["float32", "bfloat16"]))
    case = Case(
        cell=str(rng.choice(["lstm", "gru", "slstm"])),
        rows=int(rng.integers(1, 36)),
        tokens=int(rng.integers(1, 14)),
        heads=int(rng.integers(1, 4)),
        dim=int(rng.choice([16, 32])),
        dtype=dtype,
        resets=bool(rng.integers(2)),
        initial=bool(rng.integers(2)),
        chunk=int(rng.choice([1, 2, 4, 8])),
    )
    exact = error(case._replace(dtype="float64"), "xla", seed) / BOUNDS["float64"]
    return float(np.max([exact, *(error(case, name, seed) / BOUNDS[dtype] for name in ("xla", *PALLAS))]))
