"""Kernel benchmark: runs here on tiny shapes, and its counts are right."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels import __main__ as command
from benchmarks.kernels import cross_entropy, flash, grouped, paged
from benchmarks.kernels.measure import Cost, measure


@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_flops_are_of_visible_pairs(window):
    shape = flash.Shape(2, 17, 4, 2, 8, window)
    i, j = np.mgrid[:17, :17]
    pairs = int(((j <= i) & (i - j < (window or 17))).sum())
    assert shape.cost(backward=False).flops == 2 * 4 * pairs * (2 * 8 + 2 * 8)
    assert shape.cost(backward=True).flops == 2.5 * shape.cost(backward=False).flops


def test_bytes_are_of_each_array_once():
    shape = flash.Shape(2, 17, 4, 2, 8, dtype="bfloat16")
    q, k, lse = 2 * 17 * 4 * 8 * 2, 2 * 17 * 2 * 8 * 2, 2 * 17 * 4 * 4
    assert shape.cost(backward=False).bytes == 2 * q + 2 * k + lse
    assert shape.cost(backward=True).bytes == 4 * q + 4 * k + 2 * lse


def test_other_operations_count_what_goes_in_and_out():
    work = grouped.work(grouped.Shape(40, 16, 24, 4, "float32"))
    lhs, rhs, sizes = work.inputs
    assert sizes.sum() == 40
    used = int((sizes > 0).sum())
    matrices = 4 * used * 16 * 24
    assert work.costs[0] == Cost(2 * 40 * 16 * 24, lhs.nbytes + matrices + work.d_out.nbytes)
    assert work.costs[1] == Cost(4 * 40 * 16 * 24, 2 * lhs.nbytes + matrices + rhs.nbytes + work.d_out.nbytes)
    hidden, head, _ = (work := cross_entropy.work(cross_entropy.TINY["tiny"])).inputs
    assert work.costs[0] == Cost(2 * 24 * 16 * 70, hidden.nbytes + head.nbytes)
    assert work.costs[1] == Cost(4 * 24 * 16 * 70, 2 * (hidden.nbytes + head.nbytes))
    shape = paged.TINY["tiny"]
    q, k, v, *_ = (work := paged.work(shape)).inputs
    seen = int(shape.lengths().sum()) * 2 * 2 * 16 * 4
    assert work.costs == (Cost(seen // 4 * 2 * 2, seen + k.nbytes + v.nbytes + 2 * q.nbytes),)


@pytest.mark.drawn(0.3)
def test_it_runs_and_checks_values(tmp_path, capsys):
    rows = command.main(["--repeats", "1", "--json", str(tmp_path / "rows.json")])
    assert {(row["op"], row["contender"]) for row in rows} == {
        ("flash_attention", "xla"),
        ("flash_attention", "jax.nn xla"),
        ("ring_attention", "xla"),
        ("ring_attention", "keys gathered"),
        ("paged_attention", "xla"),
        ("grouped_matmul", "xla"),
        ("grouped_matmul", "ragged_dot"),
        ("grouped_matmul", "dense product"),
        ("linear_cross_entropy", "xla"),
        ("linear_cross_entropy", "logits, optax"),
    }
    assert all(row["error"] < 1e-5 and row["forward_seconds"] > 0 and row["forward_roofline"] > 0 for row in rows)
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == rows
    assert "flash_attention on cpu: xla" in capsys.readouterr().out


def test_wrong_values_and_failures_show():
    work = flash.work(dataclasses.replace(flash.TINY["tiny"], s=8))

    def fails(q, k, v):
        raise NotImplementedError("not today")

    wrong = {"wrong": lambda q, k, v: work.truth(q, k, v) * 1.1, "fails": fails}
    row, failed = measure("tiny", dataclasses.replace(work, contenders=wrong), 1)
    assert row["error"] == pytest.approx(0.1, rel=0.01)
    assert failed["failed"] == "NotImplementedError: not today"


def test_a_pool_is_updated_in_place_and_checked():
    work = paged.work(paged.TINY["tiny"])
    before = jnp.copy(work.inputs[-1].rows)
    wrong = {"wrong": lambda *inputs: (1.1 * work.truth(*inputs)[0], inputs[-1])}
    [row] = measure("tiny", dataclasses.replace(work, contenders=wrong), 2)
    assert row["error"] == pytest.approx(0.1, rel=0.01)
    np.testing.assert_array_equal(before, work.inputs[-1].rows)
