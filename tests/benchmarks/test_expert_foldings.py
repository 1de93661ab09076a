"""Folded experts beside experts that lie as attention does: the same work, and the page has the stored figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.layouts.expert_foldings import (
    BEGIN,
    END,
    PAGE,
    PAIRS,
    PUBLISHED,
    main,
    name_of,
    predicted_mfu,
    stored,
    tables,
)
from jaxllm.train.combinations import check_combinations
from sharding import MeshSpec
from sharding.topology import Topology


@pytest.mark.parametrize("model", list(PAIRS))
def test_pairs_are_the_same_work_on_all_devices(model):
    pair = PAIRS[model]
    plain, folded = pair.of(False), pair.of(True)
    assert replace(folded, parallel=plain.parallel) == plain
    for on in pair.on:
        devices = Topology.parse(on).num_devices
        MeshSpec.parse(pair.mesh).resolve(devices)
        for run in (plain, folded):
            check_combinations(run, dict(MeshSpec.parse(pair.mesh).axes))


def test_the_page_has_the_stored_figures():
    assert set(stored()) <= {name_of(m, on, f) for m, pair in PAIRS.items() for on in pair.on for f in (False, True)}
    page = PAGE.read_text()
    start = page.index(BEGIN) + len(BEGIN)
    assert page[start : page.index(END, start)] == tables(), "python -m benchmarks.layouts.expert_foldings --table"


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_folding_is_predicted_to_be_faster_where_programs_are(name):
    """As in the paper, but for Qwen2-57B: folded, a device has twice the expert weights there, for micro-batches of one
    row. The compiled programs are in that order too (docs/compiled.md)."""
    row = PUBLISHED[name]
    assert row.mfu > row.mfu_unfolded
    assert (predicted_mfu(row, True) > predicted_mfu(row, False)) == name.startswith("Mixtral")


def test_an_unknown_program_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "no such program"])
    assert "no program is called no such program; there are: Mixtral 8x22B" in capsys.readouterr().err
