"""A seed-rotated sample of every registered proof. The full counts: `make proof NAME`."""

from __future__ import annotations

import pytest

from tests import environment
from tests.proofs import harness

PROOFS = [proof for issue in harness.issues() for proof in harness.load(issue).values()]


@pytest.mark.parametrize("proof", PROOFS, ids=lambda p: f"{p.issue}-{p.name}")
def test_sample(proof: harness.Proof):
    if (proof.issue, proof.name) in harness.left_out(PROOFS, environment.seed()):
        pytest.skip("costly, and of those another seed's turn; in full: make proof " + proof.issue)
    for index in proof.sampled(environment.seed()):
        unit = harness.run_unit(proof, environment.seed(), index, examples=proof.sample)
        size = "" if proof.strategy is None else f" EXAMPLES={proof.sample}"
        if unit.failure is not None:
            again = f"make proof {proof.issue} SEED={environment.seed()} ONLY={proof.name} UNIT={index}{size}"
            pytest.fail(f"{unit.failure}\nagain: {again}", pytrace=False)
        assert unit.run > 0
