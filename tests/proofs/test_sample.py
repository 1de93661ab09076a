"""Samples of registered proofs, as many as fit into the run's time budget. The full counts: `make proof NAME`."""

from __future__ import annotations

import pytest

from tests import environment
from tests.proofs import harness, sampling


@pytest.mark.parametrize(
    ("proof", "seconds"), [pytest.param(p, s, id=f"{p.issue}-{p.name}") for p, s in sampling.planned()]
)
def test_sample(proof: harness.Proof, seconds: float):
    budget = sampling.Budget.here()
    with environment.optimized():  # as `make proof` compiles
        units = sampling.sample(proof, environment.seed(), budget, seconds)
    if not units and seconds > max(sampling.COSTLY, budget.seconds / 2):
        pytest.skip("a unit takes longer than half of --sample-minutes; in full: make proof NAME")
    if not units:
        pytest.skip(f"--sample-minutes {sampling.minutes():g} are over, or too short for it; in full: make proof NAME")
    if units[-1].failure is not None:
        size = "" if proof.strategy is None else f" EXAMPLES={proof.sample}"
        index = units[-1].index
        again = f"make proof {proof.issue} SEED={environment.seed()} ONLY={proof.name} UNIT={index}{size}"
        pytest.fail(f"{units[-1].failure}\nagain: {again}", pytrace=False)
    assert all(unit.run > 0 for unit in units)
