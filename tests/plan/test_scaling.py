"""Scaling laws: budgets are split as in the papers, and models have the stated sizes."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm import cli
from jaxllm.cli.commands.planning.size import round_rows
from jaxllm.models import functional
from jaxllm.plan.scaling_laws import (
    EXCESS,
    LAWS,
    ParametricLaw,
    RepeatedDataPlan,
    ScalingError,
    count_parameters,
    effective_data,
    model_of_size,
    plan_repeated_data,
    step_law,
)

BUDGETS = st.floats(17, 26).map(lambda power: 10.0**power)


def test_chinchilla_is_the_best_of_its_own_budget():
    """70 B parameters and 1.4 T tokens, arXiv:2203.15556; the refit says within a tenth of it."""
    made = LAWS["chinchilla"].best(5.76e23)
    assert made.parameters == pytest.approx(70e9, rel=0.1)
    assert made.tokens == pytest.approx(1.4e12, rel=0.1)


def test_kaplan_grows_the_model():
    """arXiv:2001.08361: 5.3 times the parameters for ten times the arithmetic."""
    first, second = (LAWS["kaplan"].best(flops).parameters for flops in (1e21, 1e22))
    assert second / first == pytest.approx(10**0.73)
    assert LAWS["kaplan"].best(1e15 * 86_400).parameters == pytest.approx(1.3e9)


@given(BUDGETS, st.sampled_from(["chinchilla", "hoffmann"]), st.floats(0.2, 5))
def test_no_other_split_is_better(flops, name, factor):
    law = LAWS[name]
    assert isinstance(law, ParametricLaw)
    best = law.best(flops)
    assert best.flops == pytest.approx(flops)
    assert best.loss is not None
    other = law.loss(best.parameters * factor, best.tokens / factor)
    assert other >= best.loss or math.isclose(other, best.loss, rel_tol=1e-12)


@given(st.floats(7, 12.5).map(lambda power: 10.0**power))
def test_a_shape_has_the_size(parameters):
    vocab = 32_000 if parameters < 3e8 else 128_256
    try:
        made = model_of_size(parameters, vocab)
    except ScalingError:
        assert parameters < vocab * 128 * 1.5
        return
    whole, body = count_parameters(made)
    leaves = jax.tree.leaves(functional(made).abstract())
    assert whole == sum(math.prod(leaf.shape) for leaf in leaves)
    assert whole - body == vocab * made.embed_dim * (1 if made.tied else 2)
    if parameters > 3e7:
        assert whole == pytest.approx(parameters, rel=0.15)
        assert 30 < made.embed_dim / made.layers < 350


def test_step_law_at_what_its_paper_trained():
    """Figure 1 of arXiv:2503.04715: 1 B parameters on 100 B tokens."""
    rate, batch = step_law(1e9, 1e11)
    assert rate == pytest.approx(1.79 * 1e9**-0.713 * 1e11**0.307)
    assert 1.0e-3 < rate < 2.0e-3
    assert 1.0e6 < batch < 1.2e6


def test_repeats_are_worth_less_and_less():
    """arXiv:2305.16264: four epochs hardly less than fresh tokens; never more than 16.4, and little after 16."""
    assert effective_data(5e9, 1e10) == 5e9
    assert 0.93 < effective_data(4e10, 1e10) / 4e10 < 0.94, "1 + 15.39 (1 - exp(-3 / 15.39)) = 3.73 of 4"
    values = [effective_data(epochs * 1e10, 1e10) for epochs in (1, 2, 4, 16, 64, 1e6)]
    assert values == sorted(values)
    assert values[-1] == pytest.approx(16.387756e10)
    assert effective_data(16e10, 1e10) - effective_data(15e10, 1e10) < 0.4e10
    assert effective_data(1e12, 1e9, EXCESS) == pytest.approx(6.309743e9)


@given(BUDGETS, st.sampled_from(["chinchilla", "hoffmann"]), st.floats(0.02, 3))
@settings(max_examples=40)
def test_the_split_with_little_data_is_that_of_a_search(flops, name, share):
    """Against every split on a fine grid; equations 5 and 6 written out."""
    law = LAWS[name]
    assert isinstance(law, ParametricLaw)
    free = law.best(flops)
    unique = share * free.tokens
    found = plan_repeated_data(law, flops, unique)
    if share >= 1:
        assert found == RepeatedDataPlan(free, free.tokens, 0.0)
        return
    grid = free.parameters * np.exp(np.linspace(-7, 7, 20_001))
    # U_N: what the law trains on so many tokens, found by halving.
    low, high = 1e3, 1e30
    while high / low > 1 + 1e-12:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if law.best(middle).tokens < unique else (low, middle)
    asked = law.best(low).parameters
    tokens = flops / 6 / grid
    n = np.where(grid > asked, asked * (1 + 5.309743 * (1 - np.exp(-(grid / asked - 1) / 5.309743))), grid)
    d = np.where(tokens > unique, unique * (1 + 15.387756 * (1 - np.exp(-(tokens / unique - 1) / 15.387756))), tokens)
    losses = law.floor + law.a / n**law.alpha + law.b / d**law.beta
    best = int(np.argmin(losses))
    assert found.size.loss == pytest.approx(losses[best], rel=1e-7)
    assert found.size.loss <= losses[best] * (1 + 1e-12)
    assert found.size.parameters == pytest.approx(grid[best], rel=0.01)
    assert found.size.flops == pytest.approx(flops)
    assert found.size.parameters <= free.parameters * (1 + 1e-6), "epochs before parameters"
    assert found.lost == pytest.approx(losses[best] - free.loss, abs=1e-7)
    assert found.worth == pytest.approx(effective_data(found.size.tokens, unique))


@given(st.floats(0.3, 1e5))
def test_rows_are_what_devices_divide(rows):
    made = round_rows(rows)
    assert made / (made & -made) in (1, 3)
    assert 0.79 < made / rows < 1.34 or rows < 1.5


def test_the_command(tmp_path, capsys):
    path = tmp_path / "sized.py"
    assert cli.main(["size", "--flops", "1e21", "--on", "v6e:8x8", "--unique", "2e10", "--save", str(path)]) == 0
    said = capsys.readouterr().out
    assert "2.39 B parameters, 69.9 B tokens, loss 2.32" in said
    assert "of these, 20 B different tokens: 0.014 more than with as many fresh ones" in said
    assert "3.5 epochs of 20 B, worth 66.7 B fresh ones" in said
    assert "v6e:8x8 at 40% MFU" in said
    made = cli.find_recipe(f"{path}:sized")
    made = made() if callable(made) else made
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(functional(made.model).abstract())) == 2_357_252_480
    assert made.data.batch_size == 128
    assert cli.main(["size", "--flops", "1e21", "--unique", "1e12"]) == 0
    assert "2.78 B parameters, 60 B tokens" in capsys.readouterr().out
    assert cli.main(["size", "--flops", "1e21", "--unique", "1e9", "--law", "kaplan"]) == 2
    assert "has no loss to weigh repeats by" in capsys.readouterr().err
    for wrong in (["--flops", "-1"], ["--flops", "1e12"], ["--flops", "1e21", "--on", "v9:8x8"]):
        assert cli.main(["size", *wrong]) == 2
    assert "smaller vocabulary" in capsys.readouterr().err
