"""Learning-rate schedules at the steps where they change."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.optim import ScheduleConfig, schedule


def rates(total, **fields):
    """The learning rate at steps 0 .. total."""
    rate = schedule(ScheduleConfig(**fields), total)
    return np.asarray(jax.vmap(rate)(jnp.arange(total + 1)), np.float64)


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_warmup_rises_linearly_and_step_zero_learns(kind):
    found = rates(200, kind=kind, peak=0.5, warmup=0.1)
    np.testing.assert_allclose(found[:20], 0.5 * np.arange(1, 21) / 20, rtol=1e-6)
    assert found[20] == found[19] == 0.5
    assert found.max() == 0.5


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_no_warmup_begins_at_the_peak(kind):
    assert rates(50, kind=kind, peak=3e-4, warmup=0.0)[0] == pytest.approx(3e-4, rel=1e-6)


def test_constant_stays():
    assert (rates(100, kind="constant", peak=0.1, warmup=0.05)[5:] == np.float32(0.1)).all()


def test_cosine_falls_from_peak_to_floor():
    found = rates(1000, kind="cosine", peak=1.0, warmup=0.1, floor=0.2)
    want = [0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * (step - 100) / 900)) for step in range(100, 1001)]
    np.testing.assert_allclose(found[100:], want, rtol=1e-5)
    assert found[550] == pytest.approx(0.6, rel=1e-5)  # half way down, half way through
    assert found[1000] == pytest.approx(0.2, rel=1e-6)
    assert found[999] < 0.2001
    assert (np.diff(found[100:]) <= 0).all()


def test_wsd_is_flat_then_falls_linearly():
    found = rates(100, kind="wsd", peak=1.0, warmup=0.1, decay=0.3, floor=0.5)
    assert (found[9:71] == 1).all()
    np.testing.assert_allclose(found[70:], 1 - 0.5 * np.arange(31) / 30, rtol=1e-6)


def test_wsd_without_decay_falls_at_no_step_of_the_run():
    assert (rates(10, kind="wsd", peak=1.0, warmup=0.0, decay=0.0)[:10] == 1).all()


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_beyond_the_end_it_stays_at_the_floor(kind):
    rate = schedule(ScheduleConfig(kind=kind, peak=1.0, floor=0.1), 10)
    assert float(rate(10)) == float(rate(10_000)) == pytest.approx(0.1, rel=1e-6)


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("total", [1, 2, 3])
def test_runs_of_a_step_or_two_have_finite_positive_rates(kind, total):
    for warmup, decay in ((0.0, 0.0), (0.5, 0.5), (1.0, 0.0), (0.02, 0.2)):
        found = rates(total, kind=kind, peak=1e-3, warmup=warmup, decay=decay)
        assert ((found > 0) & (found <= np.float32(1e-3))).all(), (warmup, decay, found)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"warmup": 1.5}, r"warmup = 1.5 is a fraction"),
        ({"warmup": -0.1}, "warmup = -0.1"),
        ({"decay": 2}, "decay = 2"),
        ({"floor": 1.1}, "floor = 1.1"),
        ({"peak": 0.0}, "peak = 0.0"),
        ({"peak": -1e-3}, "peak = -0.001"),
        ({"kind": "wsd", "warmup": 0.6, "decay": 0.5}, "warmup 0.6 .* decay 0.5 exceed"),
        ({"floor": math.nan}, "floor = nan"),
        ({"peak": math.nan}, "peak = nan"),
    ],
)
def test_impossible_schedules_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        ScheduleConfig(**fields)


def test_an_unknown_kind_is_refused_where_types_are_not_checked():
    config = ScheduleConfig()
    object.__setattr__(config, "kind", "linear")
    with pytest.raises(ValueError, match="kind = 'linear'; legal: cosine, wsd, constant"):
        ScheduleConfig.__post_init__(config)


def test_float64_runs_have_float64_rates(float64):
    """The rounding of a float32 cosine differs between two programs, and would differ between two meshes."""
    rate = schedule(ScheduleConfig(peak=0.3, warmup=0.0, floor=0.0), 7)
    for step in range(8):
        assert rate(jnp.int32(step)).dtype == jnp.float64
        assert float(rate(jnp.int32(step))) == pytest.approx(0.15 * (1 + math.cos(math.pi * step / 7)), rel=1e-14)
