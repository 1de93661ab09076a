"""Techniques of training beside their definitions: an optimizer, an objective, parameter averages and replicas."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

from jaxllm.train import ResumeError, train
from jaxllm.train.records.run_directory import RunDirectory
from tests.proofs.harness import proof
from tests.seams import test_optimizer, test_preference_objective
from tests.seams.test_preference_objective import MODEL, dataset, dpo_run
from tests.train import runs
from tests.train.test_param_average import RUNS, average_error, check_evaluation
from tests.train.test_replicas import check_traffic, replica_error


@proof("seams", cases=["fsdp=4,tensor=2", "stage=2,fsdp=2,data=2"], sample=1, float64=True, bound=1e-10)
def sharpness_aware_steps(mesh: str) -> float:
    """Losses and parameters of an optimizer with its own step, on eight devices."""
    with test_optimizer.with_row():
        return test_optimizer.trained_error(mesh)


@proof("seams", cases=["data=2,fsdp=2,tensor=2", "fsdp=4,tensor=2"], sample=1, float64=True, bound=1e-10)
def preferences_are_trained(mesh: str) -> float:
    """Losses and saved parameters of a DPO run, on eight devices."""
    with tempfile.TemporaryDirectory() as folder:
        return test_preference_objective.trained_error(dpo_run(Path(folder), mesh=mesh))


@proof("seams", cases=["another run"], sample=1)
def another_reference_is_refused(_: str) -> None:
    """A run's parameters are the reference of another; they are checked when that resumes."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = dataclasses.replace(MODEL, dtype="float32", param_dtype="float32")
        whole = dpo_run(folder, model=model, name="whole")
        train(whole, data=dataset(whole))
        other = dpo_run(folder, model=model, name="other", reference=str(folder / "runs" / "whole"))
        with pytest.MonkeyPatch.context() as monkeypatch:
            runs.signal_at(monkeypatch, 2)
            train(other, data=dataset(other))
        first = RunDirectory(folder / "runs" / "other").read_metrics()[0]
        assert first["loss"] != pytest.approx(np.log(2), abs=1e-6)
        trained = dataclasses.replace(whole, seed=1, name="whole")
        shutil.rmtree(folder / "runs" / "whole")
        train(trained, data=dataset(trained))
        with pytest.raises(ResumeError, match="was trained with another reference model"):
            train(other, data=dataset(other))


@proof("seams", cases=list(RUNS), sample=1, float64=True, bound=1e-13)
def averages_by_definition(name: str) -> float:
    """The parameter average, on eight devices."""
    return average_error(name)


@proof("seams", cases=["average", "trained parameters"], sample=1)
def evaluated_parameters(which: str) -> None:
    """An evaluation is that of the parameters that the configuration says."""
    with tempfile.TemporaryDirectory() as folder:
        check_evaluation(Path(folder), which == "average")


@proof("seams", cases=["averaged", "apart"], sample=1, float64=True, bound=1e-10)
def replicas_are_separate_runs(kind: str) -> float:
    """Losses, parameters and their averages of replicas, beside separate runs."""
    return replica_error(averages=kind == "averaged")[0]


@proof("seams", cases=["averaged", "apart"], sample=1)
def traffic_of_replicas(kind: str) -> None:
    """Over the axis of the replicas go scalars, and parameters where they are averaged."""
    check_traffic(averages=kind == "averaged")
