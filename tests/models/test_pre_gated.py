"""Pre-gated mixtures: a router reads the input of the mixture before, in training and while experts are in slots."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.infer.streaming.streamed_runner import StreamedRunner
from jaxllm.infer.streaming.streamed_weights import WeightPlacement
from jaxllm.models import BlockConfig, DecoderConfig, MlpConfig, MoeConfig, Segments, functional
from tests import quick, tiny
from tests.infer import engines


def pre_gated(config: DecoderConfig) -> DecoderConfig:
    """The model with routers that read the mixture before."""

    def block(one: BlockConfig) -> BlockConfig:
        if not isinstance(one.mlp, MoeConfig):
            return one
        return dataclasses.replace(
            one, mlp=dataclasses.replace(one.mlp, router=dataclasses.replace(one.mlp.router, input="previous"))
        )

    return dataclasses.replace(
        config, pattern=tuple(map(block, config.pattern)), prefix=tuple(map(block, config.prefix))
    )


def by_hand(config: DecoderConfig, params: Any, tokens: jax.Array) -> tuple[np.ndarray, list[np.ndarray]]:
    """Hidden states of a text, and the experts that mixtures choose: attention of the model, the rest in numpy."""
    model = functional(config)
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    x, before, first, chosen = model.embed(params, tokens, positions), None, 0, []
    for s, (group, repeats) in enumerate(config.segments):
        for repeat in range(repeats):
            for b, block in enumerate(group):
                own = jax.tree.map(lambda leaf, r=repeat: jnp.asarray(leaf[r]), params["segments"][str(s)][str(b)])
                module = model.block(s, b, own, jnp.int32(first), gated=True)
                x, h, ctx = module.attend(x, positions, jnp.int32(first), Segments(jnp.zeros_like(positions)))
                first += 1
                if isinstance(block.mlp, MlpConfig):
                    x = module.add(x, module.mlp(h, jnp.int32(0), ctx)[0])
                    continue
                read = np.asarray(h if before is None else before)[0]
                scores = read @ own["mlp"]["router"]
                shares = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
                best = np.argsort(-shares, axis=-1)[:, : block.mlp.top_k]
                out = np.zeros_like(read)
                matrices = own["mlp"]["experts"]
                for t, experts in enumerate(best):
                    for e in experts:
                        row = np.asarray(h)[0, t]
                        gate = row @ matrices["gate"][e]
                        inner = gate / (1 + np.exp(-gate)) * (row @ matrices["up"][e])
                        out[t] += shares[t, e] / shares[t, experts].sum() * (inner @ matrices["down"][e])
                chosen.append(best)
                before = h
                x = module.add(x, jnp.asarray(out)[None])
    return np.asarray(x), chosen


MIXED = dataclasses.replace(
    tiny.decoder(vocab_size=11, layers=5, moe=(4, 2, 12, True)),
    prefix=(BlockConfig(tiny.decoder(vocab_size=11).pattern[0].attention, MlpConfig(12)),),
    dtype="float64",
    param_dtype="float64",
)
"""A dense layer, then four mixtures."""


@pytest.mark.drawn(3)
@pytest.mark.parametrize("fields", [{}, {"remat": "full", "unroll": 0}])
def test_routers_read_the_mixture_before(fields, rng, float64):
    config = dataclasses.replace(pre_gated(MIXED), **fields)
    model, tokens = functional(config), jnp.asarray(rng.integers(0, 11, (1, 7)), jnp.int32)
    params = jax.tree.map(jnp.asarray, quick.params(config, scale=0.5))
    positions = jnp.arange(7, dtype=jnp.int32)[None]
    run = quick.jit(lambda p: model.forward(p, tokens, positions, Segments(jnp.zeros_like(positions)))[0])
    want, chosen = by_hand(config, params, tokens)
    assert tiny.leaf_error(run(params), want) < 1e-12
    assert len(chosen) == 4
    plain = functional(MIXED)
    own = quick.jit(lambda p: plain.forward(p, tokens, positions, Segments(jnp.zeros_like(positions)))[0])(params)
    assert tiny.leaf_error(own, want) > 1e-3


def test_what_cannot_pass_the_input_on_is_refused():
    config = pre_gated(MIXED)
    model = functional(config)
    x, positions = jnp.zeros((1, 2, config.embed_dim)), jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(ConfigError, match=r"router\.input = 'previous' passes the input"):
        model.group(0, {}, x, positions, jnp.int32(0), Segments())
    with pytest.raises(ValueError, match=r"residual = 'ladder' does not go with router\.input"):
        dataclasses.replace(config, residual="ladder")
    own = jax.tree.map(lambda p: jnp.asarray(p[0]), quick.params(config)["segments"]["1"]["0"])
    block = model.block(1, 0, own, jnp.int32(1), gated=True)
    with pytest.raises(ValueError, match="reads the layer before"):
        block.mlp.routing(x)


def streamed(engine: Any) -> StreamedRunner:
    assert isinstance(engine.runner, StreamedRunner)
    return engine.runner


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a pre-gated model of the engines."""
    monkeypatch.setitem(engines.MIXTURES, "pre-gated", pre_gated(engines.MODELS["mixtral"]))
    return "pre-gated"


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("placement", [None, WeightPlacement(1)])
def test_the_engine_serves_what_was_trained(placement, served, rng, float64):
    config = engines.ENGINES["tight, recompute"]
    engine = engines.build(config, served, "float64", placement=placement)
    made = engines.serve(engine, engines.traffic(rng, config, 4))
    assert engines.error(served, "float64", made) <= 1e-10


@pytest.mark.drawn(2)
def test_programs_of_experts_in_slots_are_found_again(served, rng, float64, tmp_path):
    """Kept in files with what they return: slots, and a stream with the input of the last mixture."""
    config = engines.ENGINES["one after the other"]
    for compiled in (True, False):
        placement = WeightPlacement(1, 9, expert_slots=2, absent="host")
        engine = engines.build(config, served, "float64", placement=placement, manifest=tmp_path)
        made = engines.serve(engine, engines.traffic(rng, config, 2))
        assert engines.error(served, "float64", made) <= 1e-10
        runner = streamed(engine)
        assert runner.program_cache is not None
        counts = runner.program_cache.counts
        assert (counts.compiled > 0, counts.loaded > 0, counts.late) == (compiled, not compiled, 0)
        assert runner.experts is not None
        assert runner.experts.counts.predicted > 0
