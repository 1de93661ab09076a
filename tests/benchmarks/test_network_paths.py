"""Paths of collectives: the table of docs/train/network_paths.md is of the stored numbers, which the command gives."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.replicas.network_paths import CHANGES, JOBS, compared, main, shown
from jaxllm.simulate.network_paths import LeafSpineNetwork

DOCS = Path(__file__).resolve().parents[2] / "docs"
STORED = json.loads((DOCS / "figures/network_paths.json").read_text("utf-8"))


def test_the_table_is_of_the_stored_numbers():
    page = (DOCS / "train/network_paths.md").read_text("utf-8")
    assert set(STORED["rows"]) == set(JOBS)
    for job, changes in STORED["rows"].items():
        assert set(changes) == set(CHANGES)
        for change, row in changes.items():
            assert shown(job, change, row) in page
            assert row["planned"] <= row["hash_least"] * (1 + 1e-9)


def test_a_row_is_that_of_the_command():
    options = Namespace(**STORED["options"])
    network = LeafSpineNetwork(options.racks, options.hosts, options.ports, options.spines, options.port, options.port)
    found = compared(network, "one ring", "four dead spine links", options)
    assert found == pytest.approx(STORED["rows"]["one ring"]["four dead spine links"], rel=1e-9)


@pytest.mark.drawn(3)
def test_the_command(tmp_path, capsys):
    small = ["--racks", "4", "--hosts", "4", "--spines", "4", "--flows", "2", "--seeds", "2"]
    assert main([*small, "--json", str(tmp_path / "found.json")]) == 0
    rows = json.loads((tmp_path / "found.json").read_text("utf-8"))["rows"]
    printed = capsys.readouterr().out
    for job, change in [("rings", "healthy"), ("mixed", "a spine link at half speed")]:
        assert shown(job, change, rows[job][change]) in printed


def test_networks_that_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--racks", "2", "--hosts", "2", "--ports", "1", "--spines", "2", "--seeds", "1"])
    assert "no path from host 0" in capsys.readouterr().err  # four dead links are all of a leaf's
