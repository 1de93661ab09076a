"""The benchmark of kernels runs here, on tiny shapes, and counts what it says it counts."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from benchmarks import kernels


@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_flops_are_of_visible_pairs(window):
    shape = kernels.Shape(2, 17, 4, 2, 8, window)
    i, j = np.mgrid[:17, :17]
    pairs = int(((j <= i) & (i - j < (window or 17))).sum())
    assert shape.flops(backward=False) == 2 * 4 * pairs * (2 * 8 + 2 * 8)
    assert shape.flops(backward=True) == 2.5 * shape.flops(backward=False)


def test_bytes_are_of_each_array_once():
    shape = kernels.Shape(2, 17, 4, 2, 8, dtype="bfloat16")
    q, k, lse = 2 * 17 * 4 * 8 * 2, 2 * 17 * 2 * 8 * 2, 2 * 17 * 4 * 4
    assert shape.bytes(backward=False) == 2 * q + 2 * k + lse
    assert shape.bytes(backward=True) == 4 * q + 4 * k + 2 * lse


def test_it_runs_and_checks_values(tmp_path, capsys):
    rows = kernels.main(["--repeats", "1", "--json", str(tmp_path / "rows.json")])
    assert {(row["shape"], row["contender"]) for row in rows} == {
        (shape, name) for shape in kernels.TINY for name in ("xla", "jax.nn xla")
    }
    assert all(row["error"] < 1e-5 and row["forward_seconds"] > 0 for row in rows)
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == rows
    assert "flash_attention on cpu: xla" in capsys.readouterr().out


def test_wrong_values_show(monkeypatch):
    right = kernels.contenders
    wrong = {"wrong": lambda q, k, v: right(tiny)["xla"](q, k, v) * 1.1}
    tiny = dataclasses.replace(kernels.TINY["tiny"], s=8)
    monkeypatch.setattr(kernels, "contenders", lambda shape: wrong)
    [row] = kernels.measure("tiny", tiny, 1, None)
    assert row["error"] == pytest.approx(0.1, rel=0.01)
