"""Quantised checkpoints: number by number, and experts that stay packed."""

from __future__ import annotations

import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxllm.infer import Engine, SamplingParams
from jaxllm.models import PackedWeight, functional
from tests import quick
from tests.hub import test_quantised
from tests.infer import engines
from tests.infer.test_packed import FORMATS, MIXTURES, both, mixture
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


MESHES = ("expert=2", "tensor=2", "expert=2,tensor=2", "fsdp=2,expert=2,tensor=2", "data=2,expert=2,tensor=2")


@proof(
    "moe_models",
    cases=[(kind, mesh) for kind in MIXTURES for mesh in MESHES],
    sample=1,
    bound={"forward": 1e-10, "served": 1e-10},
    float64=True,
)
def packed_experts_on_meshes(case: tuple[str, str]) -> dict[str, float]:
    """Logits, and greedy completions with their log-probabilities, packed on a mesh and plain on one device."""
    kind, mesh = case
    rng = np.random.default_rng([*kind.encode(), *mesh.encode()])
    with tempfile.TemporaryDirectory() as folder:
        plain, packed = mixture(kind, Path(folder), rng, mesh)
    tokens = rng.integers(0, plain.config.vocab_size, (8, 6), np.int32)
    forward = error(*(quick.logits(m.config, m.params, tokens) for m in (packed, plain)))
    there = jax.tree.leaves(packed.params)[0].sharding.mesh
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", quick.jit)
        model = functional(packed.config)
        engine = Engine.of(model, packed.params, engines.ENGINES["tight, swap"], mesh=there, strict=True)
    greedy = SamplingParams(max_tokens=6, temperature=0.0, logprobs=0)
    asked = [{"prompt": rng.integers(3, engines.VOCAB, n).tolist(), "params": greedy} for n in (3, 12, 17)]
    made = engines.serve(engine, asked)
    texts = np.zeros((len(made), 24), np.int32)
    for row, request in zip(texts, made, strict=True):
        row[: len(request.sequences[0].tokens)] = request.sequences[0].tokens
    scores = np.asarray(jax.nn.log_softmax(quick.logits(plain.config, plain.params, texts)))
    served = 0.0
    for row, request in zip(scores, made, strict=True):
        (own,), begin = request.sequences, len(request.prompt)
        assert own.tokens[begin:] == row[begin - 1 : len(own.tokens) - 1].argmax(-1).tolist()
        wanted = row[np.arange(begin - 1, len(own.tokens) - 1), own.tokens[begin:]]
        served = max(served, float(np.abs(wanted - own.logprobs).max()))
    return {"forward": forward, "served": served}
