"""Parameters and state in bfloat16: rounded-off bits are stored, or arrive on average."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxllm.optim import OptimConfig, ScheduleConfig, optimizer
from jaxllm.optim.bfloat16_params import round_stochastically, share_of_update, split_bfloat16, store_in_bfloat16
from tests import quick
from tests.models.jaxprs import equations

AXES = {"w": ("embed", "mlp"), "gain": ("embed",)}


def params() -> dict[str, Any]:
    return {"w": jnp.ones((64, 32), jnp.bfloat16), "gain": jnp.ones((64,), jnp.bfloat16)}


def test_two_numbers_hold_a_float32_but_for_its_last_bits(rng):
    x = np.asarray(rng.normal(size=4096) * 10 ** rng.uniform(-6, 6, 4096), np.float32)
    high, low = (np.asarray(part, np.float64) for part in quick.jit(split_bfloat16)(x))
    assert np.all(np.abs(x - high) <= 2.0**-8 * np.abs(x))
    assert np.all(np.abs(x - high - low) <= 2.0**-16 * np.abs(x))
    # What is cut off is a float32 itself: an error-free transformation.
    assert np.array_equal(np.float32(x - high) + high, x.astype(np.float64))


def test_stochastic_rounding_is_to_a_neighbour_and_right_on_average(rng):
    x = np.asarray(rng.normal(size=64), np.float32)
    draw = quick.jit(jax.vmap(round_stochastically, (None, 0)))
    made = np.asarray(draw(x, jax.random.split(jax.random.key(0), 4000)), np.float64)
    step = 2.0 ** (np.floor(np.log2(np.abs(x))) - 7)
    assert np.all(np.abs(made - x) < step)
    assert np.all(np.abs(made.mean(0) - x) < 5 * step * 0.5 / np.sqrt(4000))
    exact = jnp.asarray(x, jnp.bfloat16)
    assert np.array_equal(draw(exact.astype(jnp.float32), jax.random.split(jax.random.key(1), 10))[7], exact)
    assert np.isnan(float(round_stochastically(jnp.float32(np.nan), jax.random.key(0))))


@pytest.mark.parametrize("rounding", ["nearest", "collage", "stochastic"])
def test_updates_far_below_a_last_place_arrive(rounding):
    """A hundred steps of 1e-4 from 1, each a seventieth of bfloat16's step there."""
    rule = store_in_bfloat16(optax.sgd(1e-4), rounding)
    p = params()
    state, grads = rule.init(p), jax.tree.map(jnp.ones_like, p)

    @quick.jit
    def step(p: Any, state: Any) -> Any:
        updates, state = rule.update(grads, state, p)
        return optax.apply_updates(p, updates), state

    for _ in range(100):
        p, state = step(p, state)
    assert p["w"].dtype == jnp.bfloat16
    reached = np.asarray(p["w"], np.float64).mean() + (
        np.asarray(state.low["w"], np.float64).mean() if rounding == "collage" else 0.0
    )
    if rounding == "nearest":
        assert reached == 1.0
    else:
        # The lower number is rounded as well, by 2**-18 at most in each step; up or down at random adds up to less.
        assert abs(reached - 0.99) < 100 * 2**-18


def test_the_share_of_an_update_that_arrives_is_measured(rng):
    """Against numbers added up in float64: all but a thousandth in pairs, nothing to the nearest, the sum at random."""
    p = {"w": jnp.asarray(rng.uniform(1, 1.9, (64, 32)), jnp.bfloat16)}
    grads = {"w": jnp.asarray(rng.normal(size=(64, 32)), jnp.bfloat16)}
    missed = {}
    for rounding in ("collage", "stochastic"):
        rule = store_in_bfloat16(optax.sgd(1e-4), rounding)
        u = -1e-4 * np.asarray(grads["w"], np.float64)
        if rounding == "collage":  # whose update is a bfloat16 number
            u = u.astype(np.float32).astype(jnp.bfloat16).astype(np.float64)
        update, state, shares = quick.jit(rule.update), rule.init(p), []
        for _ in range(6):
            found = {}
            rule.update(grads, state, p, metrics=found)
            before = state
            moved, state = update(grads, state, p)
            arrived = np.asarray(moved["w"], np.float64)
            if rounding == "collage":
                arrived = arrived + np.asarray(state.low["w"], np.float64) - np.asarray(before.low["w"], np.float64)
            shares.append(float(found["update_share"]))
            assert shares[-1] == pytest.approx((u * arrived).sum() / (u * u).sum(), rel=1e-4)
        missed[rounding] = max(abs(share - 1) for share in shares)
    assert missed["collage"] < 2e-3
    # One draw in 27 comes within 0.01 of the whole update by luck, six in a row do not.
    assert missed["stochastic"] > 0.01
    nearest = jax.tree.map(lambda p, g: (p - 1e-4 * g.astype(jnp.float32)).astype(p.dtype) - p, p, grads)
    assert float(share_of_update({"w": u}, nearest)) < 0.01
    assert float(share_of_update({"w": jnp.zeros(3)}, {"w": jnp.zeros(3)})) == 1


@pytest.mark.parametrize(
    ("rounding", "kind", "bytes_each"),
    [("collage", "adamw", 8), ("collage", "lion", 4), ("stochastic", "adamw", 4), ("stochastic", "muon", None)],
)
def test_no_array_of_float32_is_kept(rounding, kind, bytes_each):
    """Bytes of the optimizer's state a parameter, beside the parameter's own two."""
    rule = optimizer(OptimConfig(kind=kind, rounding=rounding), 10, AXES)
    state = jax.eval_shape(rule.init, params())
    arrays = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert {leaf.dtype for leaf in arrays} == {np.dtype(jnp.bfloat16)}
    if bytes_each is not None:
        assert sum(2 * leaf.size for leaf in arrays) == bytes_each * (64 * 32 + 64)
    _, after = jax.eval_shape(rule.update, params(), state, params())
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)


@pytest.mark.parametrize("kind", ["adamw", "lion"])
def test_collage_s_update_is_bfloat16_between_kernels(kind):
    """Every array that crosses the barrier: compilers do not fuse across it, so kernels read and write bfloat16."""
    rule = optimizer(OptimConfig(kind=kind, rounding="collage"), 10, AXES)
    state = jax.eval_shape(rule.init, params())
    program = jax.make_jaxpr(rule.update)(params(), state, params())
    (barrier,) = [e for e in equations(program.jaxpr) if e.primitive.name == "optimization_barrier"]
    crossing = [v.aval for v in barrier.outvars if v.aval.ndim]
    assert {aval.dtype for aval in crossing} == {np.dtype(jnp.bfloat16)}
    assert len(crossing) == 2 * (1 + {"adamw": 3, "lion": 1}[kind])


def test_collage_follows_float32(rng):
    """Fifty steps of AdamW with a slow second moment on a noisy quadratic: bfloat16's own numbers would be stuck."""
    config = OptimConfig(b2=0.999, weight_decay=0.0, schedule=ScheduleConfig(kind="constant", peak=1e-3, warmup=0.0))
    goal = jnp.asarray(rng.normal(size=(64, 32)), jnp.float32)
    noise = np.asarray(rng.normal(size=(50, 64, 32)) * 0.1, np.float32)
    ends = {}
    for name, dtype, rounding in (
        ("f32", "float32", "nearest"),
        ("pair", "bfloat16", "collage"),
        ("bf16", "bfloat16", "nearest"),
    ):
        rule = optimizer(OptimConfig(**{**vars(config), "rounding": rounding}), 50, {"w": ("embed", "mlp")})

        @quick.jit
        def step(p: Any, state: Any, noise: Any, rule: Any = rule) -> Any:
            grads = jax.tree.map(lambda x: (x - goal + noise).astype(x.dtype), p)
            updates, state = rule.update(grads, state, p)
            return optax.apply_updates(p, updates), state

        p = {"w": jnp.ones((64, 32), dtype)}
        state = rule.init(p)
        for one in noise:
            p, state = step(p, state, one)
        ends[name] = np.asarray(p["w"], np.float64) + (
            np.asarray(state.low["w"], np.float64) if rounding == "collage" else 0
        )
    apart = {name: np.abs(ends[name] - ends["f32"]).mean() for name in ("pair", "bf16")}
    assert apart["pair"] < 1e-3
    assert apart["pair"] < 0.1 * apart["bf16"]


def test_refusals():
    with pytest.raises(ValueError, match='rounding = "collage" supports adamw, lion, sgd'):
        OptimConfig(kind="muon", rounding="collage")
