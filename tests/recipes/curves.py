"""The first steps of a stored curve, run again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.curves import Curve
from jaxllm.config import from_dict
from jaxllm.train import RunConfig, train
from jaxllm.train.directory import RunDirectory
from tests.train import runs

BOUND = 2e-3
"""Nats per token that a loss may differ by: other numbers of devices and versions add up in another order. A step of
the quickstart's beginning changes its loss by a hundred times as much; another seed, batch or schedule by ten."""


def differences(curve: Curve, steps: int, folder: Path) -> list[float]:
    """How far the losses of the first steps are from the stored ones, nats per token."""
    run = from_dict(RunConfig, curve.receipt["config"], "the receipt's config")
    with pytest.MonkeyPatch.context() as patch:
        runs.signal_at(patch, steps)
        finished = train(dataclasses.replace(run, out=str(folder)))
    rows = [row for row in RunDirectory(finished.directory).read_metrics() if "nll" in row]
    assert len(rows) >= steps
    return [abs(row["loss"] - stored) for row, stored in zip(rows[:steps], curve.losses, strict=False)]
