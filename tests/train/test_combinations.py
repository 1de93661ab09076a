"""The combination table: every row can be met, its page is that of the rows, and drawn pairs run or are refused."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest

from jaxllm.config import ConfigError
from jaxllm.models import functional
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.train.combinations import REFUSALS, check_combinations, markdown, refused
from jaxllm.train.run import fitting_mesh
from jaxllm.train.run_features import FEATURES
from sharding import ShardingError
from tests.environment import ROOT
from tests.train.feature_pairs import BASE, BY_THE_OPTIMIZER, SETTINGS, check_pair, outcome, sizes_of, with_features

PAGE = ROOT / "docs" / "train" / "combinations.md"


def test_rows_name_features_and_no_pair_twice():
    named = [frozenset((row.one, row.other)) for row in REFUSALS]
    assert len(set(named)) == len(named)
    assert {name for pair in named for name in pair} <= set(FEATURES)
    assert all(len(pair) == 2 for pair in named)


def test_the_page_has_every_row():
    assert markdown() in PAGE.read_text(), "python -m jaxllm.train.combinations prints the table"


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: f"{row.one} / {row.other}")
def test_a_row_refuses_its_pair(row):
    if row.one not in SETTINGS or row.other not in SETTINGS:
        pytest.skip("one of the two is the rule in tiny runs, or needs a data source: see tests of objectives")
    for order in ((row.one, row.other), (row.other, row.one)):
        run = with_features(*order)
        if run is not None:
            break
    else:
        pytest.skip("no setting of the tests has both")
    assert row in refused(run, sizes_of(run), row.platform)
    with pytest.raises(ConfigError, match="does not go with"):
        check_combinations(run, sizes_of(run), row.platform)


@pytest.mark.parametrize(
    ("mesh", "experts", "folding", "message"),
    [
        ("fsdp=4", 0, "expert=4", "a model without experts.*nothing to fold"),
        ("stage=2,fsdp=2", 4, "expert=2", "sees its own rows alone.*give the mesh expert"),
        ("stage=2,fsdp=2,tensor=2", 4, "expert=1,tensor=4", "sees its own rows alone"),
        ("stage=2,expert=2,tensor=2", 4, "expert=4", None),
        ("fsdp=4,tensor=2", 4, "expert=4", "nearest that fit"),
    ],
)
def test_foldings_of_experts(mesh, experts, folding, message):
    parallel = dataclasses.replace(BASE.parallel, experts=folding)
    run = dataclasses.replace(BASE, mesh=mesh, accumulate=4, parallel=parallel)
    if experts:
        run = SETTINGS["experts"](run)
    if message is None:
        assert not refused(run, sizes_of(run), "tpu")
    else:
        with pytest.raises((ConfigError, ShardingError), match=message):
            check_combinations(run, sizes_of(run), "tpu")


@pytest.mark.parametrize("rings", ["context", "overlap"])
def test_rings_in_stages_are_refused_at_once_on_cpu_alone(rings):
    parallel, axis = {
        "context": (ParallelConfig(), "context"),
        "overlap": (ParallelConfig(sequence=True, overlap="ring"), "tensor"),
    }[rings]
    run = dataclasses.replace(BASE, mesh=f"stage=2,{axis}=2", accumulate=4, parallel=parallel)
    model = functional(run.model, run.parallel.rules())
    with pytest.raises(ConfigError, match=r'on cpu: .*give parallel.context = "all_gather" and parallel.overlap'):
        fitting_mesh(run, model, 4, "cpu")
    assert str(fitting_mesh(run, model, 4, "tpu")) == run.mesh


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("draw", range(3))
def test_a_drawn_pair_runs_or_is_refused(draw, rng):
    check_pair(int(rng.integers(2**31)))


@pytest.mark.parametrize("feature", ["optimizer state on disk", "parameters on disk"])
def test_each_way_of_building_a_step(feature):
    found = outcome(feature)
    assert found is not None
    assert found.program


@pytest.mark.drawn(1)
def test_a_lowered_rate_moves_a_trainable_subset():
    """Updates of a subset have no leaves for the other parameters, and are scaled nevertheless."""
    found = outcome("lowered rate", "trainable subset")
    assert found is not None
    assert found.rows == 0
    assert len({found.program, *(outcome(one).program for one in ("lowered rate", "trainable subset"))}) == 3


def test_settings_of_any_pair_are_made_or_refused_by_the_optimizers_table():
    """For all pairs, without a step: what a row of this table refuses is found after the settings are made."""
    refusals = []
    for names in itertools.permutations(sorted(SETTINGS), 2):
        try:
            with_features(*names)
        except ValueError as refusal:
            refusals.append(str(refusal))
    assert len(refusals) > 10
    assert all(re.search(BY_THE_OPTIMIZER, refusal) for refusal in refusals), refusals
