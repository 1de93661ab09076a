"""A gated attention layer: trained on meshes and served as its reference computes."""

from __future__ import annotations

import numpy as np

from tests.infer import engines
from tests.proofs.harness import proof
from tests.seams.test_gated_attention import served_error, trained_error

TRAINED = [("element", "fsdp=2,context=2,tensor=2"), ("head", "data=2,fsdp=2,tensor=2")]
"""(gate, mesh)."""


@proof("seams", cases=TRAINED, sample=1, float64=True, bound=1e-10)
def gated_attention_is_trained(case: tuple[str, str]) -> float:
    """Loss and gradients on eight devices."""
    gate, mesh = case
    return trained_error(gate, mesh, np.random.default_rng([*mesh.encode()]))


@proof("seams", cases=["tight, swap"], sample=1, float64=True, bound=1e-10)
def gated_attention_is_served(way: str) -> float:
    """Log-probabilities of completions."""
    return served_error(engines.ENGINES[way], np.random.default_rng([*way.encode()]))
