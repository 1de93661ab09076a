"""Quantised checkpoints: number by number, and experts that stay packed."""

from __future__ import annotations

import tempfile
from pathlib import Path

import jax
import numpy as np

from jaxllm.models import PackedWeight
from tests.hub import test_quantised
from tests.infer.test_packed import FORMATS, both
from tests.proofs.harness import proof
from tests.proofs.real_models.families import cached, error, full


@proof("moe_models", count=200, sample=2)
def block_float8(seed: int) -> None:
    """Random matrices in blocks of random sizes, every byte among them, as their bits say; any slice."""
    assert test_quantised.fp8_blocks(np.random.default_rng(seed)) >= 2


@proof("moe_models", count=200, sample=2)
def mxfp4(seed: int) -> None:
    """Random bytes under every scale there is, as ml_dtypes' own four-bit numbers and powers of two; any slice."""
    test_quantised.mxfp4_blocks(np.random.default_rng(seed))


@proof(
    "moe_models",
    cases=[(kind, seed) for kind in FORMATS for seed in range(10)],
    sample=1,
    bound={"forward": 1e-10, "decode": 1e-10},
    float64=True,
)
def packed_experts(case: tuple[str, int]) -> dict[str, float]:
    """Logits with experts packed and plain, of one checkpoint; the numbers that packed ones stand for are equal."""
    kind, seed = case
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        plain, packed = both(kind, Path(folder), rng, "float64")
    is_packed = lambda x: isinstance(x, PackedWeight)  # noqa: E731
    wide = jax.tree.map(lambda x: x.dense("float64") if is_packed(x) else x, packed.params, is_leaf=is_packed)
    jax.tree.map(np.testing.assert_array_equal, wide, plain.params)
    tokens = rng.integers(0, plain.config.vocab_size, (2, 14), np.int32)
    made = [(full(plain.config, m.params, tokens), cached(plain.config, m.params, tokens)) for m in (packed, plain)]
    return {"forward": error(made[0][0], made[1][0]), "decode": error(made[0][1], made[1][1])}
