"""SmolLM2 learns on two CPU cores: sums by GRPO, beside a control with shuffled rewards, and preferences by DPO."""

from __future__ import annotations

import numpy as np

from tests.posttrain.smollm2_runs import run_alone
from tests.proofs.harness import proof

PAIRS = 115
"""Held-out pairs of a run."""
ABOVE_CHANCE = 0.5 + 2 * 0.5 / PAIRS**0.5


@proof("posttraining", cases=[0, 1, 2, "shuffled"], sample=1, bound=0.0, parallel=False)
def smollm2_learns_sums(case: int | str) -> float:
    """By how much the mean reward on held-out sums falls short of 0.2 above the start's, or, with shuffled rewards,
    rises by more than 0.1, three standard errors of a difference between means of 320 samples.
    """
    shuffled = case == "shuffled"
    found = run_alone("shuffled", 0) if isinstance(case, str) else run_alone("sums", case)
    print(f"{case}: {found}", flush=True)
    gain = found["after"] - found["before"]
    return max(gain - 0.1, 0.0) if shuffled else max(0.2 - gain, 0.0)


@proof("posttraining", cases=[0, 1, 2], sample=1, bound={"accuracy": 0.0, "margin": 0.0}, parallel=False)
def smollm2_learns_preferences(seed: int) -> dict[str, float]:
    """Held-out pairs after DPO: by how much the share whose chosen answer has the higher implicit reward falls short of
    two standard errors above chance, and the margin of both rewards of 0.02. At the start all rewards are 0: the policy
    is its reference.
    """
    found = run_alone("preferences", seed)
    print(f"{seed}: {found}", flush=True)
    assert abs(found["first"] - np.log(2)) < 1e-5, "the policy starts as its reference"
    return {"accuracy": max(ABOVE_CHANCE - found["accuracy"], 0.0), "margin": max(0.02 - found["margin"], 0.0)}
