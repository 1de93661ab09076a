"""Memory of a process that serves with streamed weights, against the formula of tiers.

What is on the device is the live arrays of JAX, and counted exactly; on a CPU that is host memory too, so the peak of
the process, as the system counts it, has both, and what is read, and programs. It is compared between processes that
differ in one size by many units of what that size counts; it is off by up to two, since what is freed leaves a process
late. The bounds of what is live are tighter: a layer, an expert or a part of the KV cache more would be seen. Programs
wait for what is read ahead, so that the windows are full.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.process_memory import measurable, numbers_of

NEAR = 2.2
"""Units that peaks of two processes may be off; what is live is exact."""


class Measured(NamedTuple):
    """What a process prints, see ``peak_memory``."""

    layer: int
    expert: int
    part: int
    live: int
    formula: int
    peak: int


def measured(folder: Path, devices: int = 1, **served: Any) -> Measured:
    """Measures a process of its own."""
    return Measured(*numbers_of("tests.infer.peak_memory", json.dumps(served), folder, devices=devices))


@pytest.mark.drawn(3)
@measurable
def test_memory_is_the_windows_and_the_hosts_layers(tmp_path):
    """Layers of 22 MiB, while tokens are served: eight more in files take no memory, where all in memory would take
    eight; a window of three more takes three on the device; in host memory all twelve are there, in the place of the
    window's one."""
    few, many = (measured(tmp_path, layers=layers) for layers in (4, 12))
    wide, host = measured(tmp_path, layers=12, window=4), measured(tmp_path, layers=12, where="host")
    size = many.layer
    for one in (few, many, wide, host):
        assert 0 <= one.live - one.formula < 0.2 * size
    assert abs(many.peak - few.peak) < NEAR * size
    assert (wide.live - many.live) / size == pytest.approx(3, abs=0.2)
    assert (host.peak - many.peak) / size == pytest.approx(11, abs=NEAR)


@pytest.mark.drawn(3)
@measurable
def test_resident_experts_are_the_slots(tmp_path):
    """Experts of 24 MiB, six in each layer. On the device are the slots of all layers, and an expert on its way; in
    host memory as many as the budget says, and those of one round of loads; all others are in files.
    """
    base = {"layers": 3, "slots": 2, "experts": 0}
    few = measured(tmp_path, **base)
    others = {
        "slots": measured(tmp_path, **base | {"slots": 4}),
        "host": measured(tmp_path, **base | {"experts": 12}),
        "layers": measured(tmp_path, **base | {"layers": 5}),
        "all": measured(tmp_path, **base | {"experts": None}),
    }
    size = few.expert
    more = {name: (one.peak - few.peak) / size for name, one in others.items()}
    for one in (few, *others.values()):
        assert 0 <= one.live - one.formula < 1.2 * size
    assert more["slots"] == pytest.approx(3 * 2 + 2, abs=NEAR)  # two more in each layer, and in a round
    assert more["host"] == pytest.approx(12, abs=NEAR)
    assert more["layers"] == pytest.approx(2 * 2, abs=NEAR)
    assert more["all"] == pytest.approx(3 * 6 - 2, abs=NEAR)  # those of a round are there already


@pytest.mark.drawn(3)
@measurable
def test_the_kv_cache_is_where_it_was_placed(tmp_path):
    """Parts of 16 MiB, of two batches in each of four layers: in files those of the window are in memory, and no more
    with eight layers; on the host all are there besides, and none that is read from a file.
    """
    base = {"layers": 4, "batches": 2, "cache": "files"}
    files = measured(tmp_path, **base)
    others = {
        "layers": measured(tmp_path, **base | {"layers": 8}),
        "window": measured(tmp_path, **base | {"parts": 4}),
        "host": measured(tmp_path, **base | {"cache": "host"}),
        "device": measured(tmp_path, **base | {"cache": "device"}),
    }
    size = files.part
    more = {name: (one.peak - files.peak) / size for name, one in others.items()}
    for one in (files, *others.values()):
        assert 0 <= one.live - one.formula < 0.2 * size
    assert more["layers"] == pytest.approx(0, abs=NEAR)
    assert (others["window"].live - files.live) / size == pytest.approx(2, abs=0.2)
    assert more["host"] == pytest.approx(8 - 1, abs=NEAR)  # a part that is read from a file is copied once more


@pytest.mark.drawn(3)
@measurable
def test_each_shard_holds_its_own_part(tmp_path):
    """Over two devices a window of two more layers takes one layer more on each, half of both."""
    one, two = (measured(tmp_path, devices=2, layers=4, window=window, tensor=2) for window in (1, 3))
    for found in (one, two):
        assert 0 <= found.live - found.formula < 0.1 * found.layer
    assert (two.live - one.live) / one.layer == pytest.approx(1, abs=0.05)
