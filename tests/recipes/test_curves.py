"""Stored loss curves are complete, and the quickstart repeats its first steps. The proof ``curves`` repeats all."""

from __future__ import annotations

import math

import pytest

from benchmarks.curves import COMMANDS, FOLDER, read
from tests.recipes.curves import BOUND, differences

STORED = sorted(path.stem for path in FOLDER.glob("*.json"))


def test_a_curve_is_of_a_command():
    assert set(STORED) <= set(COMMANDS)
    assert "quickstart" in STORED


@pytest.mark.parametrize("name", STORED)
def test_a_receipt_says_what_is_needed_to_run_it_again(name):
    curve = read(name)
    assert curve.command == COMMANDS[name]
    assert {"commit", "versions", "device", "config", "config_hash", "data_hash", "result"} <= set(curve.receipt)
    assert "seed" in curve.receipt["config"]
    assert len(curve.losses) == curve.receipt["config"]["steps"]
    assert all(map(math.isfinite, curve.losses))
    assert curve.losses[-1] < curve.losses[0]
    assert (FOLDER / f"{name}.png").is_file()


@pytest.mark.drawn(0.3)
def test_the_quickstart_begins_as_stored(tmp_path):
    assert max(differences(read("quickstart"), 5, tmp_path)) < BOUND
