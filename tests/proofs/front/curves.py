"""Stored loss curves: their first steps, repeated."""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.curves import FOLDER
from tests.environment import ROOT
from tests.proofs.harness import proof
from tests.recipes.curves import BOUND

ALSO_COVERS = ("docs/curves/*.json",)

STORED = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


@proof("front", cases=STORED, sample=1, bound={"loss": BOUND})
def curves(name: str) -> dict[str, float]:
    """The largest difference of the first three losses, nats per token, on one CPU device, as a laptop has it."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environ.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.recipes.curves", name, "3"],
        env=environ, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return {"loss": float(done.stdout.splitlines()[-1])}
