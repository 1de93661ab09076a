"""Preference objectives: loss and gradients against their papers' formulas, micro-batches, and refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.data import DataConfig
from jaxllm.train import ObjectiveConfig, RunConfig
from jaxllm.train.objectives.preference_losses import log_odds
from jaxllm.train.step.objective import OBJECTIVES, make_objective
from jaxllm.train.step.objective_support import check_content
from tests.posttrain.pairs import OPTIONS, objective_error


@pytest.mark.drawn(0.3)
def test_loss_and_gradients(rng, float64):
    """Of one objective, in three rows; of each: `make proof posttraining ONLY=preference_losses`."""
    assert objective_error(str(rng.choice(list(OPTIONS))), rng, (3,)) < 1e-10


def test_log_odds_are_precise_at_both_ends(float64):
    x = jnp.array([-1e-300, -1e-12, -0.5, -np.log(2), -5.0, -800.0])
    p = np.array([1 - 1e-12, np.exp(-0.5), 0.5, np.exp(-5)])
    assert np.asarray(log_odds(x))[1:5] == pytest.approx(np.log(p) - np.log(-np.expm1([-1e-12, -0.5, -np.log(2), -5])))
    assert float(log_odds(x)[-1]) == -800
    slopes = np.asarray(jax.grad(lambda x: log_odds(x).sum())(x))
    assert np.isfinite(slopes).all()
    assert slopes[2:] == pytest.approx(1 / -np.expm1(np.asarray(x))[2:])


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("dpo", "beta=0", "beta = 0.*strength of the constraint"),
        ("dpo", "label_smoothing=0.5", "label_smoothing = 0.5.*up to, not including, 0.5"),
        ("simpo", "gamma=-1", "gamma = -1.*positive margin"),
        ("kto", "undesirable=0", "undesirable = 0.*positive number"),
        ("reward_model", "reward_token=-1", "a token of the vocabulary"),
        ("orpo", "betta=1", "Did you mean 'beta'"),
    ],
)
def test_options_are_checked(name, option, message):
    with pytest.raises(ConfigError, match=message):
        make_objective(ObjectiveConfig(name, (option,)))


def test_an_objective_takes_the_data_that_it_is_for():
    run = RunConfig(objective=ObjectiveConfig("dpo"))
    with pytest.raises(ConfigError, match=r'"dpo" takes data.content = "preference", not "text"'):
        check_content(run)
    pairs = DataConfig("pairs.jsonl", content="preference", packing="documents", tokenizer="byte")
    with pytest.raises(ConfigError, match=r'takes data.content = "text" or "chat", not "preference"'):
        check_content(RunConfig(data=pairs))
    check_content(RunConfig(data=pairs, objective=ObjectiveConfig("simpo")))
    assert set(OPTIONS) < set(OBJECTIVES)
