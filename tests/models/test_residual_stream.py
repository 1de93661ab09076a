"""Residual streams: ladder blocks against the recurrence of the paper in numpy, and what waits for what on shards."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from jaxllm.compiler import hlo
from jaxllm.config import ConfigError
from jaxllm.infer import EngineConfig, SamplingParams
from jaxllm.infer.engine.engine import Engine
from jaxllm.models import DecoderConfig, Segments, functional
from jaxllm.models.layers.residual_stream import residual_by_segment
from tests import quick, tiny
from tests.models import numpy_llama

LAYERS = 4


def model_of(residual: str, **fields: Any) -> DecoderConfig:
    sizes: dict[str, Any] = {"embed_dim": 8, "head_dim": 4, "mlp": 12, "vocab_size": 11, "heads": 2, "layers": LAYERS}
    sizes["residual"] = residual
    return tiny.decoder(**sizes | fields)


@pytest.mark.parametrize("norms", ["pre", "post", "sandwich"])
@pytest.mark.parametrize(("residual", "ladder"), [("ladder", range(4)), ("plain=1,ladder=2,plain", (1, 2))])
def test_equals_the_papers_recurrence(residual, ladder, norms, rng, float64):
    config = model_of(residual, norms=norms)
    params, tokens = quick.params(config), rng.integers(0, 11, (1, 5))
    got = quick.logits(config, params, tokens)[0]
    assert tiny.leaf_error(got, numpy_llama.logits(config, params, tokens[0], ladder=ladder)) < 1e-12
    assert tiny.leaf_error(got, numpy_llama.logits(config, params, tokens[0])) > 1e-3


def gradients(config: DecoderConfig, params: Any, tokens: Any) -> Any:
    model = functional(config)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)

    def loss(params: Any) -> Any:
        hidden, _ = model.forward(params, tokens, positions, Segments())
        return jnp.mean(jax.nn.logsumexp(model.head(params, hidden), -1) ** 2)

    return jax.tree.map(np.asarray, quick.jit(jax.value_and_grad(loss))(params))


@pytest.mark.drawn(3)
@pytest.mark.parametrize("fields", [{"unroll": 0}, {"remat": "full"}, {"remat": "sqrt"}, {"remat": "none=1,full"}])
def test_scanned_unrolled_and_recomputed_are_the_same_function(fields, rng, float64):
    config = model_of("ladder", remat="none")
    params, tokens = quick.params(config), jnp.asarray(rng.integers(0, 11, (2, 4)), jnp.int32)
    want, got = (gradients(one, params, tokens) for one in (config, dataclasses.replace(config, **fields)))
    assert tiny.leaf_error(got, want) < 1e-13


def longest_chain(config: DecoderConfig) -> int:
    """All-reduces on the longest path through the forward pass over two tensor shards."""
    model, mesh = functional(config), sharding.MeshSpec.parse("tensor=2").build(jax.devices()[:2])
    params = sharding.abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((2, 4, 8), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P()))
        positions = jax.ShapeDtypeStruct((2, 4), jnp.int32, sharding=jax.NamedSharding(mesh, jax.P()))
        lowered = jax.jit(lambda p, x, at: model.blocks(p, x, at, Segments())[0]).lower(params, x, positions)
    module = hlo.parse(lowered.compile().as_text() or "")
    chain: dict[str, int] = {}
    for one in module.entry.instructions.values():
        before = max((chain.get(name, 0) for name in one.operands), default=0)
        chain[one.name] = before + one.opcode.startswith("all-reduce")
    return max(chain.values())


def test_an_all_reduce_and_the_next_matmuls_do_not_wait_for_each_other():
    sizes: dict[str, Any] = {"kv_heads": 2, "vocab_size": 12, "dtype": "float32", "unroll": 0}
    assert longest_chain(model_of("plain", **sizes)) == 2 * LAYERS
    assert longest_chain(model_of("ladder", **sizes)) == LAYERS


@pytest.mark.drawn(2)
def test_an_engine_serves_it(rng, float64):
    config = model_of("plain=1,ladder")
    params, prompt = jax.tree.map(jnp.asarray, quick.params(config)), rng.integers(0, 11, 6).tolist()
    sizes = EngineConfig(max_sequences=2, max_batched_tokens=4, max_len=16, page_size=4, samplers=("plain",))
    engine = Engine.of(functional(config), params, sizes, strict=True)
    engine.submit(prompt, SamplingParams(max_tokens=6, temperature=0.0))
    made = [token for _ in range(40) if engine.busy for piece in engine.step() for token in piece.tokens]
    whole = np.array([[*prompt, *made]])
    assert len(made) == 6
    assert quick.logits(config, params, whole)[0, len(prompt) - 1 : -1].argmax(-1).tolist() == made


@pytest.mark.parametrize(
    ("residual", "said"),
    [
        ("steps", "there is no 'steps'. Give one of plain, ladder"),
        ("plain=2,ladder=3", "covers 5 layers, but the model has 4"),
        ("ladder,plain=2", "only the last value may omit"),
    ],
)
def test_what_does_not_fit_is_refused(residual, said):
    with pytest.raises(ValueError, match=said):
        model_of(residual)


def test_kinds_fall_into_segments():
    segments = ((("a",), 2), (("b", "c"), 3))
    assert residual_by_segment("plain=4,ladder", segments) == [[("plain", 2)], [("plain", 1), ("ladder", 2)]]


def test_layer_by_layer_is_refused():
    config = model_of("ladder")
    with pytest.raises(ConfigError, match="needs all layers in one program"):
        functional(config).group(0, {}, jnp.zeros((1, 1, 8)), jnp.zeros((1, 1), jnp.int32), 0, Segments())
