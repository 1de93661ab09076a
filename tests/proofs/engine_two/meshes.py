"""Serving on meshes: log-probabilities are those of the training forward on one device."""

from __future__ import annotations

import numpy as np

from tests.infer import engines, meshes
from tests.proofs.engine.programs import Compilations
from tests.proofs.harness import proof

DENSE = [
    ("tensor=8", "wide", "roomy"),
    ("tensor=8", "few kv heads", "tight, swap"),
    ("tensor=4", "llama", "tight, recompute"),
    ("tensor=4", "qwen3", "roomy"),
    ("tensor=2", "gemma2", "tight, swap"),
    ("tensor=2", "gpt2", "contiguous"),
    ("data=8", "smollm2", "tight, recompute"),
    ("data=2,tensor=4", "llama", "tight, swap"),
    ("data=2,tensor=4", "wide", "layers apart"),
    ("data=4,tensor=2", "gemma3", "tight, recompute"),
    ("data=2,tensor=2", "mistral", "contiguous"),
    ("fsdp=2,tensor=2", "olmo2", "roomy"),
    ("data=2,fsdp=2,tensor=2", "phi3", "tight, swap"),
]
MIXED = [
    ("expert=4", "mixtral", "tight, recompute"),
    ("expert=2,tensor=2", "mixtral", "tight, swap"),
    ("data=2,expert=2,tensor=2", "mixtral", "roomy"),
    ("expert=4,tensor=2", "gpt_oss", "tight, recompute"),
    ("data=2,expert=2", "deepseek_v3", "tight, swap"),
    ("expert=2,tensor=4", "deepseek_v3", "roomy"),
    ("tensor=2", "deepseek_v3", "contiguous"),
    ("fsdp=2,expert=2", "mixtral", "layers apart"),
]
"""(mesh, model, way to serve)."""


@proof("engine_two", cases=DENSE + MIXED, sample=1, float64=True, bound=1e-10)
def sharded_is_unsharded(case: tuple[str, str, str]) -> float:
    """Random traffic with continuous batching, too few pages where the way says so; nothing is compiled meanwhile."""
    mesh, model, way = case
    engine, heard = (
        meshes.over(mesh, model, engines.ENGINES[way], "float64", apart=way == "layers apart"),
        Compilations(),
    )
    worst = 0.0
    for seed in range(3):
        rng = np.random.default_rng([seed, *mesh.encode(), *model.encode()])
        asked = engines.traffic(rng, engine.config, 8 * engine.device.spec.replicas)
        with heard:
            made = engines.serve(engine, asked)
        assert heard.names == []
        worst = max(worst, engines.error(model, "float64", made))
    assert engine.device.manifest.counts.late == 0  # type: ignore[attr-defined]
    return worst
