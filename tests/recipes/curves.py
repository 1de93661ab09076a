"""First steps of a stored curve, run again.

python -m tests.recipes.curves NAME STEPS    prints the largest difference; on one device, unless JAX is told otherwise
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.curves import Curve, read
from jaxllm.config import from_dict
from jaxllm.train import RunConfig, train
from jaxllm.train.records.run_directory import RunDirectory
from tests.train import runs

BOUND = 2e-3
"""Nats per token that a loss may differ by: other numbers of devices and versions add up in another order, which moved
the quickstart's first five by 1e-6 at most. With another seed the largest of the five moves by 0.08, with other batches
by 0.17, with twice the warm-up by 0.28."""


def differences(curve: Curve, steps: int, folder: Path) -> list[float]:
    """Differences of the losses of the first steps from the stored ones, nats per token."""
    run = from_dict(RunConfig, curve.receipt["config"], "the receipt's config")
    with pytest.MonkeyPatch.context() as patch:
        runs.signal_at(patch, steps)
        finished = train(dataclasses.replace(run, out=str(folder)))
    rows = [row for row in RunDirectory(finished.directory).read_metrics() if "nll" in row]
    assert len(rows) >= steps
    return [abs(row["loss"] - stored) for row, stored in zip(rows[:steps], curve.losses, strict=False)]


if __name__ == "__main__":
    name, steps = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        print(max(differences(read(name), int(steps), Path(folder))))
