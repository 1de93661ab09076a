"""Quantised checkpoints, number by number."""

from __future__ import annotations

import numpy as np

from tests.hub import test_quantised
from tests.proofs.harness import proof


@proof("moe_models", count=200, sample=2)
def block_float8(seed: int) -> None:
    """Random matrices in blocks of random sizes, every byte among them, as their bits say; any slice."""
    assert test_quantised.fp8_blocks(np.random.default_rng(seed)) >= 2


@proof("moe_models", count=200, sample=2)
def mxfp4(seed: int) -> None:
    """Random bytes under every scale there is, as ml_dtypes' own four-bit numbers and powers of two; any slice."""
    test_quantised.mxfp4_blocks(np.random.default_rng(seed))
