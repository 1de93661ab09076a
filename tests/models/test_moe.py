"""A mixture of experts is the sum over the chosen ones, written as a loop."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import from_dict, to_dict
from jaxllm.models import DecoderConfig, MoeConfig, RouterConfig, Segments, functional
from jaxllm.models.dispatch import _experts_of, sum_of_experts
from jaxllm.train.flops import forward_flops_per_token
from pallas_kernels.grouped_matmul import grouped_matmul
from tests import quick, tiny


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def loop(x, experts, weights, gate, up, down) -> np.ndarray:
    out = np.zeros_like(x)
    for t in range(len(x)):
        for e, w in zip(experts[t], weights[t], strict=True):
            out[t] += w * (silu(x[t] @ gate[e]) * (x[t] @ up[e])) @ down[e]
    return out


def experts_of(gate, up, down):
    """Gated layers as the dispatch runs them."""

    def run(rows, sizes):
        return grouped_matmul(
            jax.nn.silu(grouped_matmul(rows, gate, sizes)) * grouped_matmul(rows, up, sizes), down, sizes
        )

    return run


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
    run = experts_of(*map(jnp.asarray, matrices))
    got = sum_of_experts(jnp.asarray(x), jnp.asarray(chosen), jnp.asarray(weights), run, 5)
    np.testing.assert_allclose(got, loop(x, np.array(chosen), weights, *matrices), rtol=0, atol=1e-12)


@pytest.mark.parametrize("normalize", [False, True])
def test_router(normalize, rng, float64):
    """The chosen experts are the likeliest, their weights the softmax over all, or over these."""

    @functools.partial(jax.tree_util.register_dataclass, data_fields=["segment_ids", "experts"], meta_fields=["layout"])
    @dataclasses.dataclass(frozen=True)
    class Watching(Segments):
        experts: jax.Array = dataclasses.field(default_factory=lambda: jnp.zeros((2, 2, 3, 2), jnp.int32))

        def routed(self, layer, routing):
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


@pytest.mark.parametrize("slot", [None, 4])
def test_rows_of_a_receive_buffer(slot):
    arrived = jnp.array([[1, 0, 2], [0, 3, 0]])
    want = [0, 2, 2, 1, 1, 1, 3, 3] if slot is None else [0, 2, 2, 3, 1, 1, 1, 3]
    assert _experts_of(arrived, 8, slot).tolist() == want


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
