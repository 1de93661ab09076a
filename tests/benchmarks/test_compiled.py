"""Compiled steps beside MaxText's: what is compared is the same work, and the page has the stored figures."""

from __future__ import annotations

import pytest

from benchmarks.compiled import BEGIN, END, PAGE, PEERS, STEPS, growth, main, ratio, stored, table
from sharding.topology import Topology


def test_steps_have_the_tokens_of_their_peers():
    for name in (name for name in STEPS if name.startswith(("Llama", "Mixtral"))):
        run, chips = STEPS[name].run(), Topology.parse(STEPS[name].on).num_devices
        assert run.data.batch_size * run.data.seq_len == 8192 * chips, name
        assert run.model.remat == "full"
    assert set(PEERS) <= set(STEPS)
    assert set(stored()) <= set(STEPS)


def test_the_page_has_the_stored_figures():
    page = PAGE.read_text()
    start = page.index(BEGIN) + len(BEGIN)
    assert page[start : page.index(END, start)] == table(stored()), "python -m benchmarks.compiled --table"


def test_growth_and_ratios():
    before = {"cycles": 100, "argument_bytes": 30, "temp_bytes": 70}
    now = {"cycles": 90, "argument_bytes": 30, "temp_bytes": 72}
    assert growth(now, before) == pytest.approx({"cycles": 0.0, "memory": 0.02})
    assert growth(before, before) == {"cycles": 0.0, "memory": 0.0}
    assert (ratio(3.0, 2.0), ratio(3.0, None)) == ("1.500", "-")


def test_an_unknown_step_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "no such step"])
    assert "no step is called no such step; there are: Llama 3.1 8B" in capsys.readouterr().err
