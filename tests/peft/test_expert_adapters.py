"""MixLoRA and PESC against their definitions, in float64: every token through the experts that it chose, one by one."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.config import ConfigError
from jaxllm.data import DataConfig
from jaxllm.models import functional
from jaxllm.models.attention_context import Segments
from jaxllm.models.param_subset import select
from jaxllm.peft import AdapterConfig, merge_adapters, start_params
from jaxllm.peft.adapted_model import adapted_model
from jaxllm.train import RoutingConfig, RunConfig
from jaxllm.train.run_model import run_model, trained_params
from jaxllm.train.step.loss import loss_sums
from sharding import MeshSpec
from tests import quick, tiny

KINDS = ("mixlora", "pesc")
MODEL = tiny.decoder(layers=1)
EXPERTS, TOP = 4, 2
ROUTING = RoutingConfig(balance_loss=0.5)


def start(kind: str, **fields: Any) -> tuple[RunConfig, Any, Any, Any]:
    """(run, adapted model, base, parameters before training)."""
    more = {"width": 5} if kind == "pesc" else {}
    adapter = AdapterConfig(kind, 3, 6.0, ("attention",), experts=EXPERTS, top_k=TOP, **more)  # type: ignore[arg-type]
    run = RunConfig(model=replace(MODEL, **fields), adapter=adapter, data=DataConfig(batch_size=2, seq_len=8))
    base = functional(run.model).init(jax.random.key(0))
    model = run_model(run)
    return run, model, base, start_params(model, adapter, base, MeshSpec.parse("dp").build(jax.devices()[:1]), 1)


def moved(run: RunConfig, model: Any, params: Any) -> Any:
    mask, keys = trained_params(run, model), iter(jax.random.split(jax.random.key(2), 99))
    return jax.tree.map(
        lambda on, x: x + 0.3 * jax.random.normal(next(keys), x.shape, x.dtype) if on else x, mask, params
    )


def token_output(kind: str, own: Any, x: Any) -> Any:
    """Output of the layer for one token, and its router's probabilities."""
    dense = jax.tree.map(lambda leaf: leaf[0], own)
    shares = jax.nn.softmax(x @ dense["expert_router"])
    weights, experts = jax.lax.top_k(shares, TOP)
    weights = weights / weights.sum()

    def expert(e: Any) -> Any:
        if kind == "pesc":
            y = (jax.nn.silu(x @ dense["gate"]) * (x @ dense["up"])) @ dense["down"]
            return y + jax.nn.gelu(y @ dense["adapter_down"][:, e], approximate=False) @ dense["adapter_up"][e]
        whole = {n: dense[n] + 2.0 * dense[f"{n}_a"][:, e] @ dense[f"{n}_b"][e] for n in ("gate", "up", "down")}
        return (jax.nn.silu(x @ whole["gate"]) * (x @ whole["up"])) @ whole["down"]

    return sum(weights[i] * expert(experts[i]) for i in range(TOP)), shares, experts


def hidden(model: Any, params: Any, tokens: Any) -> Any:
    positions = jnp.arange(tokens.shape[1])[None]
    run = quick.jit(lambda p: model.forward(p, tokens, positions, Segments(jnp.ones_like(tokens)))[0])
    return np.asarray(run(params))


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("float64")
def test_experts_are_their_definition(kind: str) -> None:
    assert error_of_definition(kind) < 1e-10


def error_of_definition(kind: str) -> float:
    """It starts as its base; later, outputs and gradients are those of whole experts, token by token.

    Returns:
        the largest relative difference of an output and of a parameter's gradients.
    """
    run, model, base, params = start(kind)
    tokens = jnp.asarray([[3, 1, 4, 1, 5, 9, 2, 6]])
    want = hidden(functional(run.model), base, tokens)
    np.testing.assert_allclose(hidden(model, params, tokens), want, rtol=0, atol=1e-12)
    params = moved(run, model, params)
    assert np.abs(hidden(model, params, tokens) - want).max() > 1e-3
    served = dataclasses.replace(model, adapt=None)
    np.testing.assert_allclose(
        hidden(served, merge_adapters(model, params), tokens), hidden(model, params, tokens), rtol=0, atol=1e-12
    )
    mlp = model.config.pattern[0].mlp
    graphdef, _ = nnx.split(mlp.build(MODEL.embed_dim, out_scale=1.0, dtype=jnp.dtype("float64")))
    x = jax.random.normal(jax.random.key(5), (1, 8, MODEL.embed_dim), jnp.float64)
    own = params["segments"]["0"]["0"]["mlp"]

    def by_layer(own: Any, x: Any) -> Any:
        return nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[0], own))(x, jnp.int32(0), Segments())[0]

    def by_definition(own: Any, x: Any) -> Any:
        return jax.vmap(lambda one: token_output(kind, own, one)[0])(x[0])[None]

    ways = [
        quick.jit(jax.value_and_grad(lambda own, x, fn=fn: jnp.sum(jnp.sin(3 * fn(own, x))), argnums=(0, 1)))(own, x)
        for fn in (by_layer, by_definition)
    ]
    return tiny.leaf_error(*map(jax.device_get, ways))


@pytest.mark.drawn(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("float64")
def test_the_balance_loss_is_that_of_the_router(kind: str) -> None:
    """Experts times the sum over experts of the share of tokens and the mean probability, over tokens of the batch."""
    run, model, _, params = start(kind)
    params = moved(run, model, params)
    batch = jax.tree.map(jnp.asarray, tiny.batch(3, 2, 8, 64, packed=True))
    sums = quick.jit(lambda p: loss_sums(model, p, batch, routing=ROUTING))(params)
    plain = quick.jit(lambda p: loss_sums(model, p, batch))(params)
    own = params["segments"]["0"]["0"]
    inputs = layer_inputs(model, params, batch)
    shares = jax.nn.softmax(inputs @ own["mlp"]["expert_router"][0])
    real = np.asarray(batch.segment_ids) > 0
    counts = np.bincount(np.asarray(jax.lax.top_k(shares, TOP)[1])[real].ravel(), minlength=EXPERTS)
    balance = EXPERTS * np.sum(counts / counts.sum() * np.asarray(shares)[real].mean(0))
    assert float((sums.loss - plain.loss) / sums.total) == pytest.approx(0.5 * balance, abs=1e-10)
    np.testing.assert_array_equal(sums.routing.counts[0], counts)


def layer_inputs(model: Any, params: Any, batch: Any) -> Any:
    """Inputs of the only feed-forward layer: the stream after attention, which a silent layer leaves, normed."""
    block = params["segments"]["0"]["0"]
    silent = {"0": {"0": block | {"mlp": jax.tree.map(jnp.zeros_like, block["mlp"])}}}
    x = model.embed(params, batch.tokens, batch.positions)
    x, _ = model.blocks(params | {"segments": silent}, x, batch.positions, Segments(batch.segment_ids))
    normed = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + model.config.norm_eps)
    return normed * block["mlp_norm"]["gain"][0]


def test_what_is_trained_grows_with_the_adapters_alone() -> None:
    """Bytes of an expert: factors or adapters and a column of the router; the feed-forward layer stays one."""
    for kind, each in (("mixlora", 3 * 3 * (16 + 32) + 16), ("pesc", 2 * 5 * 16 + 16)):
        sizes = []
        for experts in (4, 7):
            more = {"width": 5} if kind == "pesc" else {}
            adapter = AdapterConfig(kind, 3, 6.0, ("attention",), experts=experts, **more)  # type: ignore[arg-type]
            run = RunConfig(model=MODEL, adapter=adapter, data=DataConfig(batch_size=2, seq_len=8))
            model = run_model(run)
            trained = select(trained_params(run, model), model.abstract())
            sizes.append(sum(leaf.size for leaf in jax.tree.leaves(trained)))
            names = {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in
                     jax.tree_util.tree_leaves_with_path(trained)}  # fmt: skip
            assert not [name for name in names if name.endswith(("/base", "mlp/gate", "mlp/up", "mlp/down"))]
        assert sizes[1] - sizes[0] == 3 * each


def test_layers_that_cannot_are_refused() -> None:
    mixture = functional(tiny.decoder(moe=(4, 2, 8, True)))
    for kind in KINDS:
        with pytest.raises(ConfigError, match="not MoeConfig"):
            adapted_model(mixture, AdapterConfig(kind))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="choose 1 to 2"):
            adapted_model(functional(MODEL), AdapterConfig(kind, experts=2, top_k=3))  # type: ignore[arg-type]
