"""Served log-probabilities of latent attention, sinks and routers with biases equal the training forward's."""

from __future__ import annotations

from tests.infer import engines
from tests.proofs.engine.serving import families_in_every_way
from tests.proofs.harness import proof

WAYS = [(model, way) for model in engines.MIXTURES for way in engines.ENGINES]


@proof("moe_models", cases=WAYS, sample=1, float64=True, bound=1e-10)
def served_in_every_way(case: tuple[str, str]) -> float:
    """Each tiny model, served in each way to random traffic: log-probabilities are the training forward's."""
    return families_in_every_way(case)
