"""Absent experts: masked in the router, renormalised, kept as they were, and back later."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.models import MoeConfig, RouterConfig, functional
from jaxllm.models.moe.router import only_experts, route
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.train import value_and_grad
from jaxllm.train.outer.config import OuterConfig
from jaxllm.train.run import fitting_mesh
from jaxllm.train.step.absent_experts import available_experts, keep_absent
from jaxllm.train.step.routing_losses import RoutingConfig
from jaxllm.train.step.step_builder import init_run_state
from sharding import shardings_of
from tests import quick, tiny
from tests.train.outer_runs import batch_at, parts_of, run_of

EXPERTS = 8
AWAY = RoutingConfig(absent=0.25, absent_steps=2)
CONFIG = tiny.decoder(kv_heads=4, layers=2, moe=(EXPERTS, 2, 8, True))


@pytest.mark.parametrize(
    "router", [RouterConfig(), RouterConfig("sigmoid", normalize=False), RouterConfig(balance_bias=True)]
)
def test_the_router_is_that_of_the_experts_that_are_there(router, float64, rng):
    logits = rng.normal(size=(3, 5, EXPERTS))
    available = np.array([True, False, True, True, False, True, True, True])
    bias = jnp.asarray(rng.normal(size=EXPERTS)) if router.balance_bias else None
    with only_experts(jnp.asarray(available)):
        found = route(router, 3, jnp.asarray(logits), bias)
    want = route(router, 3, jnp.asarray(logits[..., available]), bias if bias is None else bias[available])
    names = np.flatnonzero(available)
    np.testing.assert_array_equal(found.experts, names[np.asarray(want.experts)])
    np.testing.assert_allclose(found.weights, want.weights, atol=1e-14)
    np.testing.assert_allclose(np.asarray(found.shares)[..., available], want.shares, atol=1e-14)
    assert not np.asarray(found.shares)[..., ~available].any()
    if router.normalize:
        np.testing.assert_allclose(np.asarray(found.weights).sum(-1), 1, atol=1e-14)
    assert route(router, 3, jnp.asarray(logits), bias).experts.shape == found.experts.shape


def masked_error(seed: int) -> float:
    """Loss and gradients with absent experts, against those of a model from which these are removed."""
    rng = np.random.default_rng(seed)
    available = np.ones(EXPERTS, bool)
    available[rng.choice(EXPERTS, 2, replace=False)] = False
    smaller = tiny.decoder(kv_heads=4, layers=2, moe=(EXPERTS - 2, 2, 8, True))
    axes, params = functional(CONFIG).logical_axes(), quick.params(CONFIG, seed)
    batch = tiny.batch(seed, 4, 8, CONFIG.vocab_size, packed=True)
    routing = RoutingConfig(balance_loss=0.0, z_loss=0.01)

    def kept(x, names):
        at = next((i for i, name in enumerate(names) if name == "experts"), None)
        if at is None and x.shape[-1] == EXPERTS and len(names) == 3 and names[1] == "embed":
            at = 2  # of the router
        return x if at is None else np.compress(available, x, axis=at)

    few = jax.tree.map(kept, params, axes, is_leaf=lambda x: isinstance(x, np.ndarray))

    def masked(params, batch):
        with only_experts(jnp.asarray(available)):
            return value_and_grad(functional(CONFIG), routing=routing)(params, batch)

    (sums, grads), (want, removed) = (
        jax.device_get(quick.jit(run)(given, batch))
        for run, given in ((masked, params), (value_and_grad(functional(smaller), routing=routing), few))
    )
    left = jax.tree.map(kept, grads, axes, is_leaf=lambda x: isinstance(x, np.ndarray))
    return max(tiny.leaf_error(left, removed), abs(float(sums.loss / want.loss) - 1))


@pytest.mark.drawn(0.5)
def test_gradients_are_those_of_a_model_without_the_absent_experts(float64, rng):
    assert masked_error(int(rng.integers(2**16))) < 1e-10


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize(("mesh", "optimizer"), [("data=2", {}), ("expert=4", {"kind": "soap"})])
def test_absent_experts_come_back_as_they_were(mesh, optimizer, float64):
    """Parameters and moments: the same bits while they are away, and others once they are back."""
    optim = OptimConfig(ScheduleConfig("constant", peak=1e-2), **optimizer)
    run = run_of(mesh, OuterConfig(), optim, 6, model=CONFIG, routing=AWAY)
    model, transform, devices, abstract, step = parts_of(run)
    jitted, states = quick.jit(step, out_shardings=(shardings_of(abstract), None)), []
    with jax.set_mesh(devices):
        params = jax.device_put(quick.params(run.model), shardings_of(abstract.params))
        state = init_run_state(run, model, transform, devices, abstract, params)
        placed = jax.NamedSharding(devices, model.rules.spec(("batch", "seq"), devices))
        for number in range(6):
            state, metrics = jitted(state, jax.device_put(batch_at(number), placed))
            assert int(metrics["absent_experts"]) == 2
            states.append(state)
    states = states[1::2]
    there = [np.asarray(available_experts(states[0].rng, jnp.asarray(step), EXPERTS, AWAY)) for step in (0, 2, 4)]
    assert [int(one.sum()) for one in there] == [6, 6, 6]
    start = quick.params(CONFIG)
    names = ("gate", "up", "down")

    def experts(tree):
        """Arrays of experts [layers experts ...] in a tree that has the parameters in it."""
        found = [
            (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        ]
        return [np.asarray(leaf) for path, leaf in found if any(f"experts/{name}" in path for name in names)]

    before = experts(start)
    for state, available in zip(states, there, strict=True):
        after = experts(state.params)
        for old, new in zip(before, after, strict=True):
            same = np.array([np.array_equal(old[:, e], new[:, e]) for e in range(EXPERTS)])
            np.testing.assert_array_equal(same, ~available)
        before = after
    moments = [experts(state.opt_state) for state in states]
    assert len(moments[0]) >= 2 * len(before)
    changed = 0
    for old, new in zip(*moments[:2], strict=True):
        same = np.array([np.array_equal(old[:, e], new[:, e]) for e in range(EXPERTS)])
        assert same[~there[1]].all()
        changed += not same[there[1]].any()
    assert changed >= 2 * len(before)


def test_what_leaves_too_few_experts_is_refused():
    for fields, said in (
        ({"absent": 0.8}, "leaves 2 of 8 experts"),
        ({"absent": 1.0}, "below 1"),
        ({"absent": 0.1, "absent_steps": 0}, "1 or more steps"),
    ):
        model = dataclasses.replace(CONFIG, pattern=(dataclasses.replace(CONFIG.pattern[0], mlp=MoeConfig(8, 3, 8)),))
        with pytest.raises(ValueError, match=said):
            run_of("data=1", OuterConfig(), model=model, routing=RoutingConfig(**fields))
    with pytest.raises(ValueError, match="layers with experts"):
        run_of("data=1", OuterConfig(), routing=AWAY)
    run = run_of("stage=2", OuterConfig(), model=CONFIG, routing=AWAY)
    with pytest.raises(ConfigError, match=r"routing\.absent"):
        fitting_mesh(run, functional(CONFIG), 2)
    tree, dims = {"mu": {"experts": {"up": {"codes": jnp.zeros((2, 5))}}}}, {"experts/up": 1}
    with pytest.raises(ConfigError, match=r"mu/experts/up/codes has the shape \(2, 5\)"):
        keep_absent(tree, tree, jnp.ones(EXPERTS, bool), dims)
