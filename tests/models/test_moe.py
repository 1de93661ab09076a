"""Mixture of experts: the sum over the chosen experts, against a loop."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import ConfigError, from_dict, to_dict
from jaxllm.models import DecoderConfig, MoeConfig, RouterConfig, Segments, functional
from jaxllm.models.moe import moe
from jaxllm.models.moe.expert_dispatch import dispatch_and_combine, dispatch_within_capacity
from jaxllm.models.moe.router import route
from jaxllm.train.model_flops import forward_flops_per_token
from pallas_kernels._compat import interpreting
from pallas_kernels.fused_moe import fused_moe
from pallas_kernels.grouped_matmul import grouped_matmul
from sharding import MeshSpec, shardings_of
from sharding.state import abstract_params
from tests import quick, tiny


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def loop(x, experts, weights, gate, up, down) -> np.ndarray:
    out = np.zeros_like(x)
    for t in range(len(x)):
        for e, w in zip(experts[t], weights[t], strict=True):
            out[t] += w * (silu(x[t] @ gate[e]) * (x[t] @ up[e])) @ down[e]
    return out


def gated(matrices, rows, scales, sizes):
    """Gated layers as the dispatch runs them."""
    gate, up, down = matrices
    inner = jax.nn.silu(grouped_matmul(rows, gate, sizes)) * grouped_matmul(rows, up, sizes)
    return grouped_matmul(inner if scales is None else inner * scales[:, None], down, sizes)


def mixture(**router) -> DecoderConfig:
    config = tiny.decoder(embed_dim=6, vocab_size=16)
    layer = MoeConfig(experts=5, top_k=2, hidden=3, router=RouterConfig(**router))
    block = dataclasses.replace(config.pattern[0], mlp=layer)
    return dataclasses.replace(config, pattern=(block,))


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("all_to_one", [False, True])
def test_is_the_loop(tokens, all_to_one, rng, float64):
    chosen = [np.arange(2) if all_to_one else rng.permutation(5)[:2] for _ in range(tokens)]
    x, weights = rng.normal(size=(tokens, 6)), rng.random((tokens, 2))
    matrices = rng.normal(size=(5, 6, 3)), rng.normal(size=(5, 6, 3)), rng.normal(size=(5, 3, 6))
    x, chosen, weights = map(jnp.asarray, (x, chosen, weights))
    got = dispatch_and_combine(x, chosen, weights, gated, list(map(jnp.asarray, matrices)), 5)
    np.testing.assert_allclose(got, loop(x, np.array(chosen), weights, *matrices), rtol=0, atol=1e-12)


@pytest.mark.parametrize("mesh", ["data=1", "fsdp=2,tensor=2"])
def test_few_tokens_go_through_one_kernel(mesh, rng, monkeypatch):
    """Hidden states of a mixture on a TPU, whose kernel is interpreted, are those of sorted rows; so are gradients.

    These on one device alone: gathered weights make layers recompute, which interpreted kernels cannot.
    """
    config = tiny.decoder(heads=4, kv_heads=2, head_dim=4, embed_dim=8, vocab_size=16, dtype="float32", remat="none")
    layer = MoeConfig(experts=5, top_k=2, hidden=4, shared=4)
    config = dataclasses.replace(config, pattern=(dataclasses.replace(config.pattern[0], mlp=layer),))
    model, spec = functional(config), MeshSpec.parse(mesh)
    on = spec.build(jax.devices()[: math.prod(n for _, n in spec.axes)])
    abstract = abstract_params(model.abstract(), model.logical_axes(), on, model.rules)
    params = jax.device_put(quick.params(config), shardings_of(abstract))
    tokens = jnp.asarray(rng.integers(0, 16, (4, 3)), jnp.int32)
    seen = []

    def kernel(*args):
        seen.append(args[0].shape)
        return fused_moe(*args, implementation="pallas_tpu")

    def norm(params, tokens):
        hidden, _ = model.forward(params, tokens, jnp.broadcast_to(jnp.arange(3), tokens.shape), Segments())
        return jnp.sum(hidden**2), hidden

    def run():
        with jax.set_mesh(on):
            batch = jax.device_put(tokens, jax.NamedSharding(on, model.rules.spec(("batch", "seq"), on)))
            if mesh != "data=1":
                return jax.device_get((jax.jit(lambda *a: norm(*a))(params, batch)[1], {}))
            (_, hidden), grads = jax.jit(jax.value_and_grad(lambda *a: norm(*a), has_aux=True))(params, batch)
            return jax.device_get((hidden, grads))

    want, want_grads = run()
    monkeypatch.setattr(moe, "may_be_default", lambda operation, name: (operation, name) == ("fused_moe", "pallas_tpu"))
    monkeypatch.setattr(moe, "fused_moe", kernel)
    with interpreting():
        found, grads = run()
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5)
    assert mesh != "data=1" or tiny.leaf_error(grads, want_grads) < 1e-5
    assert set(seen) == {(12, 8) if mesh == "data=1" else (6, 8)}, "the layers went through the kernel"


@pytest.mark.parametrize("normalize", [False, True])
def test_router(normalize, rng, float64):
    """The chosen experts are the likeliest, their weights the softmax over all, or over these."""

    @functools.partial(
        jax.tree_util.register_dataclass,
        data_fields=["segment_ids", "ring", "experts"],
        meta_fields=["layout", "ring_sizes"],
    )
    @dataclasses.dataclass(frozen=True)
    class Watching(Segments):
        experts: jax.Array = dataclasses.field(default_factory=lambda: jnp.zeros((2, 2, 3, 2), jnp.int32))

        def record_routing(self, layer, routing):
            return dataclasses.replace(self, experts=self.experts.at[layer].set(routing.experts))

        def attend(self, *args):
            return Segments.attend(self, *args)[0], self

    config = mixture(normalize=normalize)
    params = quick.params(config)
    positions = jnp.broadcast_to(jnp.arange(3), (2, 3))
    x = jnp.asarray(rng.normal(size=(2, 3, 6)))
    without = {**params["segments"]["0"]["0"], "mlp": {**params["segments"]["0"]["0"]["mlp"]}}
    without["mlp"]["experts"] = {**without["mlp"]["experts"]}
    without["mlp"]["experts"]["down"] = np.zeros_like(without["mlp"]["experts"]["down"])
    # The first layer's mixture, from what the layer itself would see.
    layer = jax.tree.map(lambda leaf: leaf[0], params["segments"]["0"]["0"])
    one = functional(dataclasses.replace(config, layers=1))
    alone = {**params, "segments": {"0": {"0": jax.tree.map(lambda leaf: leaf[:1], params["segments"]["0"]["0"])}}}
    silent = jax.tree.map(lambda leaf: leaf[:1], without)
    full, watched = one.blocks(alone, x, positions, Watching())
    attended, _ = one.blocks({**alone, "segments": {"0": {"0": silent}}}, x, positions, Segments())
    h = np.asarray(attended).reshape(-1, 6)
    h = h / np.sqrt((h * h).mean(-1, keepdims=True) + config.norm_eps) * layer["mlp_norm"]["gain"]
    scores = h @ layer["mlp"]["router"]
    share = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    chosen = np.argsort(-share, axis=-1)[:, :2]
    np.testing.assert_array_equal(np.asarray(watched.experts)[0].reshape(-1, 2), chosen)
    weights = np.take_along_axis(share, chosen, -1)
    weights = weights / weights.sum(-1, keepdims=True) if normalize else weights
    want = loop(h, chosen, weights, *(np.asarray(layer["mlp"]["experts"][n]) for n in ("gate", "up", "down")))
    np.testing.assert_allclose(np.asarray(full - attended).reshape(-1, 6), want, rtol=0, atol=1e-12)


def test_counts_what_a_token_meets():
    dense, sparse = tiny.decoder(embed_dim=6, vocab_size=16, mlp=3), mixture()
    more = forward_flops_per_token(sparse, lambda _: 0.0) - forward_flops_per_token(dense, lambda _: 0.0)
    assert more == 2 * (2 * 6 * 5 + 2 * 3 * 6 * 3)  # a router and one expert more, in two layers


def test_survives_json_and_refuses_nonsense():
    assert from_dict(DecoderConfig, to_dict(mixture())) == mixture()
    with pytest.raises(ValueError, match="top_k = 3 of experts = 2; choose 2 or fewer"):
        MoeConfig(experts=2, top_k=3)
    with pytest.raises(ValueError, match="hidden = 0"):
        MoeConfig(hidden=0)


@pytest.mark.parametrize("capacity", [0.4, 1.0, 9.0])
def test_capacity_keeps_first_choices_and_counts_what_it_drops(capacity, rng, float64):
    tokens, experts = 11, 5
    chosen = np.stack([rng.permutation(experts)[:2] for _ in range(tokens)])
    chosen[:6, 0] = 3  # more than there is room for
    chosen[:, 1] = np.where(chosen[:, 1] == chosen[:, 0], (chosen[:, 0] + 1) % experts, chosen[:, 1])
    x, weights = rng.normal(size=(tokens, 6)), rng.random((tokens, 2))
    matrices = rng.normal(size=(5, 6, 3)), rng.normal(size=(5, 6, 3)), rng.normal(size=(5, 3, 6))
    room = min(tokens, math.ceil(capacity * tokens * 2 / experts))
    kept, taken = weights.copy(), np.zeros(experts, int)
    for choice in range(2):
        for t in range(tokens):
            e = chosen[t, choice]
            kept[t, choice] *= taken[e] < room
            taken[e] += 1
    args = map(jnp.asarray, (x, chosen, weights))
    got, dropped = dispatch_within_capacity(*args, gated, list(map(jnp.asarray, matrices)), experts, capacity)
    np.testing.assert_allclose(got, loop(x, chosen, kept, *matrices), rtol=0, atol=1e-12)
    assert int(dropped) == np.maximum(taken - room, 0).sum()


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("capacity", [0.5, 9.0])
def test_capacity_where_experts_are_split(capacity, rng, float64):
    """Each shard's rows find the room that they would find alone, whichever device their experts are on."""
    tokens, experts, shards = 7, 4, 2
    x, weights = rng.normal(size=(shards * tokens, 6)), rng.random((shards * tokens, 2))
    chosen = np.stack([rng.permutation(experts)[:2] for _ in range(shards * tokens)])
    matrices = [jnp.asarray(rng.normal(size=size)) for size in ((4, 6, 3), (4, 6, 3), (4, 3, 6))]
    rows = [jnp.asarray(a) for a in (x, chosen, weights)]
    mesh = jax.make_mesh((shards,), ("expert",), devices=jax.devices()[:shards])

    def local(x, chosen, weights, *own):
        out, dropped = dispatch_within_capacity(
            x, chosen, weights, gated, own, experts // shards, capacity, expert_axes=("expert",)
        )
        return out, dropped[None]

    split = jax.P("expert")
    there = jax.shard_map(local, mesh=mesh, in_specs=(split,) * 6, out_specs=(split, split))
    with jax.set_mesh(mesh):
        got, dropped = quick.jit(there)(
            *(jax.device_put(a, jax.NamedSharding(mesh, split)) for a in (*rows, *matrices))
        )
    got, dropped = np.asarray(got), np.asarray(dropped)
    for shard in range(shards):
        part = [a[shard * tokens : (shard + 1) * tokens] for a in rows]
        want, lost = dispatch_within_capacity(*part, gated, matrices, experts, capacity)
        np.testing.assert_allclose(got[shard * tokens : (shard + 1) * tokens], want, rtol=0, atol=1e-12)
        assert int(dropped[shard]) == int(lost)
    assert (dropped.sum() > 0) == (capacity < 1)


def test_experts_of_the_best_groups_alone_are_chosen(rng):
    """Chosen by score and bias, weighed by score alone, scaled."""
    config = RouterConfig("sigmoid", scale=2.5, groups=3, top_groups=2, group_score="best two", balance_bias=True)
    logits, bias = rng.normal(size=(2, 7, 12)).astype(np.float32), rng.normal(size=12).astype(np.float32)
    routing = route(config, 3, jnp.asarray(logits), jnp.asarray(bias))
    scores = 1 / (1 + np.exp(-logits))
    for place in np.ndindex(2, 7):
        worth = (scores[place] + bias).reshape(3, 4)
        groups = np.argsort(-np.sort(worth, axis=1)[:, -2:].sum(1))[:2]
        allowed = [e for g in groups for e in range(4 * g, 4 * g + 4)]
        best = sorted(allowed, key=lambda e: -worth.reshape(-1)[e])[:3]
        assert np.asarray(routing.experts)[place].tolist() == best
        own = scores[place][best]
        np.testing.assert_allclose(np.asarray(routing.weights)[place], 2.5 * own / own.sum(), rtol=1e-5)
    np.testing.assert_allclose(routing.shares.sum(-1), 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"groups": 2}, "groups = 2 does not divide experts = 5; legal: "),
        ({"groups": 5, "top_groups": 1}, "top_k = 2, but top_groups = 1 of 1 experts hold 1; choose 1 or fewer"),
        ({"groups": 5, "top_groups": 6}, "top_groups = 6 of groups = 5"),
        ({"groups": 5, "top_groups": 5, "group_score": "best two"}, "a group of 1 has no 'best two' experts"),
        ({"scale": 0.0}, "scale = 0.0"),
    ],
)
def test_routers_that_cannot_choose_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        MoeConfig(5, 2, 3, router=RouterConfig(**fields))


def test_a_scoring_function_that_is_not_known_is_named():
    fields = to_dict(mixture())
    fields["pattern"][0]["mlp"]["router"]["scoring"] = "relu"
    with pytest.raises(ConfigError, match=r"pattern.*scoring.*'relu'"):
        from_dict(DecoderConfig, fields)
