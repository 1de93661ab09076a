"""Load balancing of experts in training: loss formulas, biases moved by load, figures in the log."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from jaxllm.models import BlockConfig, DecoderConfig, MlpConfig, MoeConfig, RouterConfig, Segments, functional
from jaxllm.models.moe.router import Routing
from jaxllm.train import value_and_grad
from jaxllm.train.step.routing_losses import (
    RoutingAccumulator,
    RoutingConfig,
    RoutingSums,
    routing_metrics,
    update_balance_biases,
)
from tests import quick, tiny
from tests.train import runs

pytestmark = pytest.mark.usefixtures("shared_programs")


def mixture(**router: object) -> DecoderConfig:
    """A dense layer, then two with five experts."""
    config = tiny.decoder(vocab_size=16, embed_dim=8, layers=3)
    attention = config.pattern[0].attention
    moe = MoeConfig(5, 2, 4, router=RouterConfig(**router))  # type: ignore[arg-type]
    return dataclasses.replace(
        config, prefix=(BlockConfig(attention, MlpConfig(6)),), pattern=(BlockConfig(attention, moe),)
    )


def test_losses_are_their_formulas(rng: np.random.Generator, float64: None) -> None:
    ids = np.array([[1, 1, 2, 0], [1, 1, 1, 1]])
    logits = rng.normal(size=(2, 2, 4, 5))
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    experts = np.argsort(-logits, axis=-1)[..., :2]
    tally = RoutingAccumulator.of(mixture(), Segments(jnp.asarray(ids)))
    assert tally is not None
    for layer in (0, 1):
        parts = (jnp.asarray(x[layer]) for x in (logits, shares, experts))
        tally = tally.record_routing(jnp.int32(layer + 1), Routing(*parts, jnp.ones((2, 4, 2)), jnp.float64(3)))
    sums = tally.sums(mixture(), jnp.float64(10))
    real = ids > 0
    counts = np.zeros((3, 5))
    for layer in (0, 1):
        np.add.at(counts[layer + 1], experts[layer][real].reshape(-1), 1)
    np.testing.assert_array_equal(sums.counts, counts)
    balance = [5 * (counts[i + 1] / 14 * shares[i][real].mean(0)).sum() for i in (0, 1)]
    z = [(np.log(np.exp(logits[i]).sum(-1)) ** 2)[real].mean() for i in (0, 1)]
    np.testing.assert_allclose([sums.balance, sums.z], [10 * np.mean(balance), 10 * np.mean(z)], rtol=1e-12)
    figures = routing_metrics(mixture(), sums, jnp.float64(10))
    load = counts[1:] * 5 / 14
    np.testing.assert_allclose(figures["expert_load"], load)
    np.testing.assert_allclose(figures["expert_load_max"], load.max())
    np.testing.assert_allclose(figures["expert_load_min"], load.min())
    np.testing.assert_allclose(figures["expert_dropped"], 6 / 28)


@pytest.mark.drawn(0.3)
def test_the_losses_reach_the_routers_and_accumulate(float64: None) -> None:
    """For one micro-batch, and as the sum over several; the z-loss does not depend on their number."""
    config = mixture()
    params = quick.params(config)
    batch = jax.tree.map(jnp.asarray, tiny.batch(0, 4, 6, 16, packed=False))

    def grads(routing: RoutingConfig | None, accumulate: int = 1) -> tuple[object, object]:
        run = quick.jit(value_and_grad(functional(config), routing=routing, accumulate=accumulate))
        return run(params, batch)

    plain, without = grads(None)
    counted, same = grads(RoutingConfig())
    assert plain.routing is None  # type: ignore[attr-defined]
    assert tiny.leaf_error(same, without) < 1e-12
    assert float(counted.routing.counts.sum()) == 2 * 2 * 24  # type: ignore[attr-defined]
    sums, pushed = grads(RoutingConfig(balance_loss=0.1, z_loss=0.1))
    router = pushed["segments"]["1"]["0"]["mlp"]["router"] - without["segments"]["1"]["0"]["mlp"]["router"]  # type: ignore[index]
    assert np.linalg.norm(router) > 1e-4
    own = sums.routing  # type: ignore[attr-defined]
    np.testing.assert_allclose(sums.loss, plain.loss + 0.1 * (own.balance + own.z), rtol=1e-9)  # type: ignore[attr-defined]
    parts, _ = grads(RoutingConfig(), 2)
    np.testing.assert_array_equal(parts.routing.counts, counted.routing.counts)  # type: ignore[attr-defined]


def test_biases_move_towards_even_loads() -> None:
    config = mixture(balance_bias=True)
    params = jax.tree.map(jnp.asarray, quick.params(config))
    counts = jnp.array([[0.0] * 5, [4, 1, 1, 1, 3], [2, 2, 2, 2, 2]])
    zero = jnp.zeros(())
    moved = update_balance_biases(config, 0.5)(params, RoutingSums(counts, zero, zero, zero))
    before = params["segments"]["1"]["0"]["mlp"]["balance_bias"]
    after = moved["segments"]["1"]["0"]["mlp"]["balance_bias"]
    want = 0.5 * np.array([[-1, 1, 1, 1, -1], [0, 0, 0, 0, 0]])
    np.testing.assert_allclose(after - before, want, atol=1e-6)
    assert jax.tree.structure(moved) == jax.tree.structure(params)
    assert moved["segments"]["0"]["0"]["mlp"] is params["segments"]["0"]["0"]["mlp"]


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (RoutingConfig(balance_loss=0.1), "balance_loss = 0.1, but the model has no experts"),
        (RoutingConfig(bias_rate=0.1), "bias_rate = 0.1, but the model has no experts"),
    ],
)
def test_what_has_nothing_to_act_on_is_refused(routing: RoutingConfig, message: str, tmp_path) -> None:
    with pytest.raises(ValueError, match=message):
        runs.run_config(tmp_path, routing=routing)
    with pytest.raises(ValueError, match="a router has no balance bias; set balance_bias"):
        RoutingConfig(bias_rate=0.1).check(mixture())
    with pytest.raises(ValueError, match="z_loss = -1"):
        RoutingConfig(z_loss=-1.0)


@pytest.mark.drawn(0.3)
def test_a_run_goes_on_with_its_biases_bit_for_bit(tmp_path) -> None:
    router = RouterConfig("sigmoid", balance_bias=True)
    whole = runs.run_config(tmp_path)
    block = dataclasses.replace(whole.model.pattern[0], mlp=MoeConfig(4, 1, 8, router=router))
    fields = {
        "model": dataclasses.replace(whole.model, pattern=(block,)),
        "routing": RoutingConfig(bias_rate=0.01, balance_loss=0.01, log_loads=True),
        "steps": 6,
        "every": 3,
    }
    once = runs.train(runs.run_config(tmp_path / "once", **fields)).directory
    stopped = runs.stopped_at(tmp_path / "twice", 3, **fields)
    twice = runs.train(runs.run_config(tmp_path / "twice", **fields)).directory
    assert stopped == twice
    rows = [runs.RunDirectory(directory).read_metrics() for directory in (once, twice)]
    names = ("loss", "grad_norm", "expert_load", "expert_load_max", "expert_load_min", "balance_loss", "router_z")
    assert [[row.get(n) for n in names] for row in rows[0]] == [[row.get(n) for n in names] for row in rows[1]]
    assert any(row.get("expert_load_max", 0) > 1 for row in rows[0])
    loads = [np.array(row["expert_load"]) for row in rows[0] if "expert_load" in row]
    assert len(loads) == 6
    for load in loads:
        assert load.shape == (whole.model.layers, 4)
        np.testing.assert_allclose(load.mean(axis=1), 1, rtol=1e-6)


@pytest.mark.drawn(0.3)
def test_the_same_on_a_mesh(float64: None) -> None:
    """Experts and rows split: losses, loads and gradients of one device."""
    config = dataclasses.replace(mixture(balance_bias=True), vocab_size=16)
    block = dataclasses.replace(config.pattern[0], mlp=MoeConfig(4, 2, 4, router=RouterConfig(balance_bias=True)))
    config = dataclasses.replace(config, pattern=(block,))
    model, routing = functional(config), RoutingConfig(balance_loss=0.1, z_loss=0.1)
    params = jax.tree.map(jnp.asarray, quick.params(config))
    batch = jax.tree.map(jnp.asarray, tiny.batch(0, 4, 6, 16, packed=True, padding=True))
    run = quick.jit(value_and_grad(model, routing=routing))
    sums, grads = run(params, batch)
    mesh = sharding.MeshSpec.parse("fsdp=2,expert=2").build(jax.devices()[:4])
    shardings = sharding.shardings_of(
        sharding.abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
    )
    spec = jax.NamedSharding(mesh, model.rules.spec(("batch", "seq"), mesh))
    with jax.set_mesh(mesh):
        there = run(jax.device_put(params, shardings), jax.device_put(batch, spec))
        moved = quick.jit(update_balance_biases(config, 0.1))(jax.device_put(params, shardings), there[0].routing)
    assert tiny.leaf_error(there[0], sums) < 1e-12
    assert tiny.leaf_error(there[1], grads) < 1e-10
    assert tiny.leaf_error(moved, update_balance_biases(config, 0.1)(params, sums.routing)) < 1e-12
