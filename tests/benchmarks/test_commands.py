"""Benchmarks keep up with the code that they measure: all can be imported, and small cases run."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re

import pytest

import benchmarks

NAMES = [found.name for found in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")]


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("_worker")])  # these take over the output
def test_can_be_imported(name):
    assert importlib.import_module(name).__doc__


@pytest.mark.drawn(0.3)
def test_bytes_of_a_decode_step(capsys):
    """Nearly all bytes are those of the weights and the cache, which are counted by hand."""
    engine_bytes = importlib.import_module("benchmarks.engine_bytes")
    assert engine_bytes.main(["--on", "v5e:1x1", "--batches", "4", "--layers", "stacked", "--tiny", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    layer = 4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336 + 2 * 4096
    assert row["weights"] == 2 * (2 * layer + 4096 + 512 * 4096)
    assert row["cache"] == 4 * 1024 * 2 * 2 * 2 * 8 * 128
    assert 0.95 < row["moved"] / (row["weights"] + row["cache"]) < 1.3


@pytest.mark.drawn(0.3)
def test_the_sampler_keeps_one_copy_of_the_logits_on_a_tpu(capsys):
    sampler = importlib.import_module("benchmarks.serving.sampler")
    assert sampler.main(["--on", "v6e:1x1", "--rows", "256", "--vocab", "131072", "--width", "256"]) == 0
    said = capsys.readouterr().out
    ((cycles, copies),) = re.findall(r"sampler ([\d,]+); temporaries ([\d.]+)", said)
    assert 0 < int(cycles.replace(",", "")) < 1200
    assert float(copies) < 1.5
