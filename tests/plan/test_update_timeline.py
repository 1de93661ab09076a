"""Timeline of updates with the state on disk: by hand, and the figures of a run."""

from __future__ import annotations

import pytest

from benchmarks.memory import update_overlap
from jaxllm.plan.formulas.update_timeline import LayerTimes, Task, play, update_span, update_tasks
from jaxllm.plan.hardware import Cluster, HardwareError
from recipes.llama3 import llama3_8b


def test_two_layers_by_hand():
    """Forward 2; layers of backward 3, gradients 1, read 1, update 4, parameters 1, write 2."""
    layers = [LayerTimes(3, 1, 1, 2, 4, 1, 0, 0)] * 2
    after = play(update_tasks(layers, 2, 2, arriving=False))
    assert after["read 1"] == (1, 2)  # the window has room for both
    assert (after["update 0"], after["update 1"], after["write 1"]) == ((8, 12), (12, 16), (16, 18))
    arriving = play(update_tasks(layers, 2, 2, arriving=True))
    assert (arriving["update 0"], arriving["update 1"], arriving["write 1"]) == ((6, 10), (10, 14), (14, 16))
    # With a window of one layer the second is read when the first is written, at 12.
    assert play(update_tasks(layers, 2, 1, arriving=True))["update 1"] == (13, 17)
    assert update_span(update_tasks(layers, 2, 2, arriving=True)).idle == 16 - 8
    assert update_span(update_tasks(layers, 2, 2, arriving=False)).idle == 18 - 8


def test_the_device_updates_between_backward_passes():
    """State 1 each way, update 2 on the device: the second backward pass follows the first update."""
    layers = [LayerTimes(3, 9, 1, 2, 9, 9, 1, 2)] * 2
    times = play(update_tasks(layers, 2, 2, arriving=True, on="device"))
    assert [times[name] for name in ("backward 0", "update 0", "backward 1", "update 1")] == [
        (2, 5), (5, 7), (7, 10), (10, 12),
    ]  # fmt: skip
    assert (times["new state 1"], times["write 1"]) == ((12, 13), (13, 15))
    after = play(update_tasks(layers, 2, 2, arriving=False, on="device"))
    assert (after["backward 1"], after["update 0"], after["update 1"]) == ((5, 8), (8, 10), (10, 12))


def test_a_task_waits_for_known_ones_alone():
    with pytest.raises(KeyError, match="later"):
        play([Task("now", "host", 1, ("later",)), Task("later", "host", 1)])


def test_idle_time_of_a_run_falls():
    """Llama 8B on eight H100, a disk of 6 GB/s for each: idle seconds with one row and with four."""
    rows = update_overlap.table(llama3_8b(), Cluster.parse("h100:1x8"), 6e9, 4).splitlines()[1:]
    for line in rows:
        idle = [float(cell.split(" of ")[0]) for cell in line.split("  ") if " of " in cell]
        assert idle[1] < idle[0]
        assert idle[3] < idle[2]
    with pytest.raises(HardwareError, match="not published"):
        update_overlap.table(llama3_8b(), Cluster.parse("v6e:2x4"), 6e9, 4)
