"""Rollouts of SmolLM2: their log-probabilities are those of training, as exactly as the dtype has them."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.proofs.harness import proof

ALSO_COVERS = ("tests/posttrain/smollm2_mismatch.py", "tests/posttrain/checked_feed.py")


@proof("posttraining", cases=["float32", "bfloat16"], sample=1, bound={"mean": 1.25, "largest": 2.5}, parallel=False)
def rollouts_of_smollm2_are_on_policy(dtype: str) -> dict[str, float]:
    """Mean and largest difference over 200 rollouts after swaps, over those of another pass of the same weights.

    float32: over what the training forward pass differs from float64 by, so that no pass in float32 could be much
    closer; bfloat16: over what a pass in float32 differs by.
    """
    found = _differences(dtype)
    return {name: found[name] / found[f"other_{name}"] for name in ("mean", "largest")}


@proof("posttraining", cases=["float64"], sample=1, bound=1e-6, parallel=False)
def rollouts_of_smollm2_are_exact(dtype: str) -> float:
    """The largest difference in nats over 200 rollouts after swaps, where the forward passes do not round."""
    return _differences(dtype)["largest"]


def _differences(dtype: str) -> dict[str, float]:
    """Figures of ``tests.posttrain.smollm2_mismatch``, from a process of its own."""
    command = [sys.executable, "-m", "tests.posttrain.smollm2_mismatch", dtype]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    print({"dtype": dtype, **found}, flush=True)
    assert found["tokens"] > 2000
    return found
