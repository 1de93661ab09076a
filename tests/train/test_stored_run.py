"""A run that version 0.1.0 stored before configuration fields and modules were renamed: it loads and resumes.

`stored/run_int8.tar.gz` holds its text, configuration, metrics of all twelve steps and the checkpoint after step 8. The
configuration has the old field names (`products`).
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from jaxllm.config import from_dict
from jaxllm.convert.load import load_model
from jaxllm.train import RunConfig, train
from jaxllm.train.records.run_directory import RunDirectory

STORED = Path(__file__).with_name("stored") / "run_int8.tar.gz"


@pytest.fixture
def stored(tmp_path, monkeypatch) -> Path:
    with tarfile.open(STORED) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "tiny"


def test_its_configuration_is_read_under_the_new_names(stored):
    raw = json.loads((stored / "config.json").read_text())
    assert raw["model"]["products"] == "int8"
    assert from_dict(RunConfig, raw).model.matmul_precision == "int8"


@pytest.mark.drawn(0.3)
def test_it_resumes_with_the_losses_that_it_had(stored):
    """Steps 9 to 12 after the stored checkpoint; processors differ in the last bits."""
    before = {row["step"]: row["loss"] for row in RunDirectory(stored).read_metrics() if "nll" in row}
    assert sorted(before) == list(range(1, 13))
    finished = train(from_dict(RunConfig, json.loads((stored / "config.json").read_text())))
    assert finished.complete
    after = {row["step"]: row["loss"] for row in RunDirectory(stored).read_metrics() if "nll" in row}
    steps = list(range(9, 13))
    np.testing.assert_allclose([after[s] for s in steps], [before[s] for s in steps], rtol=1e-4)


def test_it_loads_as_a_model(stored):
    assert load_model(stored).model.config.matmul_precision == "int8"
