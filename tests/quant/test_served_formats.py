"""Packed weights in the engine: what is served is what their forward pass computes, on one device and on a mesh."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.infer import Engine, SamplingParams
from jaxllm.models import functional
from jaxllm.models.attention_context import Segments
from jaxllm.quant import pack_params
from sharding import MeshSpec
from tests import quick, tiny
from tests.infer import engines

CONFIG = tiny.decoder(vocab_size=engines.VOCAB, embed_dim=64, heads=4, kv_heads=2, head_dim=16, mlp=128, layers=1)
SIZES = dataclasses.replace(engines.ENGINES["tight, swap"], max_sequences=2, decode_steps=1)


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize(("name", "mesh"), [("w8a8", ""), ("w4a8", "tensor=2"), ("lut4", "tensor=2")])
def test_served_is_the_forward_pass(name, mesh, rng, float64):
    """Log-probabilities of greedy completions; scales of tokens are their own, whatever they are batched with."""
    model = functional(CONFIG)
    params = pack_params(model, jax.tree.map(jnp.asarray, quick.params(CONFIG, scale=0.5)), name)
    there = MeshSpec.parse(mesh).build(jax.devices()[:2]) if mesh else None
    asked = [
        {"prompt": rng.integers(0, engines.VOCAB, n).tolist(),
         "params": SamplingParams(max_tokens=5, temperature=0.0, logprobs=0)}
        for n in (3, 12)
    ]  # fmt: skip
    made = engines.serve(Engine.of(model, params, SIZES, mesh=there, strict=True), asked)
    for request in made:
        (own,), begin = request.sequences, len(request.prompt)
        tokens = jnp.asarray(own.tokens)[None]
        hidden, _ = model.forward(params, tokens, jnp.arange(tokens.shape[1])[None], Segments())
        scores = np.asarray(jax.nn.log_softmax(model.head(params, hidden)))[0]
        assert own.tokens[begin:] == scores[begin - 1 : -1].argmax(-1).tolist()
        wanted = scores[np.arange(begin - 1, len(own.tokens) - 1), own.tokens[begin:]]
        np.testing.assert_allclose(own.logprobs, wanted, rtol=0, atol=1e-9)


def test_outliers_of_a_batch_are_not_batch_invariant():
    model = functional(CONFIG)
    params = pack_params(model, jax.tree.map(jnp.asarray, quick.params(CONFIG, scale=0.5)), "llm_int8")
    with pytest.raises(ValueError, match="batch_invariant does not go with llm_int8"):
        Engine.of(model, params, dataclasses.replace(SIZES, batch_invariant=True))
