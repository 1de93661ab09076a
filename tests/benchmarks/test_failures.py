"""Goodput of a failing run: the table of docs/train/failures.md is of the stored numbers, which the command gives."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest

from benchmarks.replicas.failures import ROWS, main, shown

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_table_is_of_the_stored_numbers():
    stored = json.loads((DOCS / "figures/failures.json").read_text("utf-8"))
    page = (DOCS / "train/failures.md").read_text("utf-8")
    assert set(stored["rows"]) == set(ROWS)
    for name, row in stored["rows"].items():
        assert shown(name, row) in page


def test_the_command_gives_the_stored_numbers(tmp_path, capsys):
    assert main(["--json", str(tmp_path / "found.json")]) == 0
    assert "| all | 97." in capsys.readouterr().out
    found, stored = (
        jax.tree.flatten_with_path(json.loads(file.read_text("utf-8")))[0]
        for file in (tmp_path / "found.json", DOCS / "figures/failures.json")
    )
    assert [path for path, _ in found] == [path for path, _ in stored]
    for (path, value), (_, known) in zip(found, stored, strict=True):  # Python 3.12 adds floats with less rounding
        assert value == (pytest.approx(known, rel=1e-9) if isinstance(known, float) else known), path
