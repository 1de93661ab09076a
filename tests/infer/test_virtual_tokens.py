"""Models with virtual tokens in the engine: completions and scores are those of a forward pass over the whole text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.infer import EngineConfig, SamplingParams
from jaxllm.infer.embedder import Embedder
from jaxllm.infer.engine.engine import Engine
from jaxllm.models import functional
from jaxllm.peft.adapted_model import adapted_model
from jaxllm.peft.adapter_method import AdapterConfig
from tests import quick, tiny

pytestmark = pytest.mark.usefixtures("float64")
TOKENS = 3
CONFIG = EngineConfig(max_sequences=2, max_batched_tokens=8, pages=24, page_size=4, samplers=("full",), max_len=24)


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("kind", ["prefix", "prompt"])
def test_the_engine_serves_virtual_tokens(kind: str) -> None:
    """Tokens, log-probabilities and prompt scores of two requests; the client sees none of the virtual tokens."""
    base = replace(tiny.decoder(layers=2, window=7), dtype="float64", param_dtype="float64")
    model = adapted_model(functional(base), AdapterConfig(kind, tokens=TOKENS))  # type: ignore[arg-type]
    params = model.init(jax.random.key(1))
    engine = Engine.of(model, params, CONFIG)
    assert engine.max_len == 24 - TOKENS
    prompts = [[5, 6, 7, 8, 9], [5, 6, 3]]
    sampling = SamplingParams(max_tokens=4, temperature=0.0, logprobs=0, prompt_logprobs=0)
    requests = [engine.submit(prompt, sampling) for prompt in prompts]
    while engine.busy:
        engine.step()
    for prompt, request in zip(prompts, requests, strict=True):
        (found,) = request.outputs
        assert request.text == prompt
        whole = found.tokens[TOKENS:]
        logprobs = np.asarray(jax.nn.log_softmax(alone(model, params, whole)))
        want = [logprobs[i, token] for i, token in enumerate(whole[1:])]
        got = [score for score, _ in request.text_scores] + found.logprobs
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)
        assert whole[len(prompt) :] == [int(logprobs[i].argmax()) for i in range(len(prompt) - 1, len(whole) - 1)]
        plain = np.asarray(
            jax.nn.log_softmax(quick.logits(base, base_only(functional(base), params), np.array([whole]))[0])
        )
        assert abs(plain[0, whole[1]] - want[0]) > 1e-4
    with pytest.raises(ValueError, match="have 21 at most"):
        engine.submit(list(range(20)), SamplingParams(max_tokens=2))


def alone(model: Any, params: Any, tokens: list[int]) -> Any:
    """Logits of one text after the virtual tokens, in a row of its own."""
    row = jnp.asarray([[0] * TOKENS + tokens])
    ids = jnp.asarray([[0] * TOKENS + [1] * len(tokens)])
    places = jnp.arange(row.shape[1])[None]
    run = quick.jit(lambda p: model.head(p, model.forward(p, row, places, model.text_context(ids))[0]))
    return run(params)[0, TOKENS:]


def base_only(base: Any, params: Any) -> Any:
    """Parameters of the base alone."""
    given = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    return jax.tree.map_with_path(lambda path, _: given[jax.tree_util.keystr(path)], base.abstract())


def test_an_embedding_is_of_the_text_alone() -> None:
    """Mean and last state of the client's tokens, after the virtual ones."""
    model = adapted_model(functional(tiny.decoder(layers=1)), AdapterConfig("prompt", tokens=TOKENS))
    params, ids = model.init(jax.random.key(2)), [4, 9, 2, 7]
    row = jnp.asarray([[0] * TOKENS + ids])
    segments = model.text_context(jnp.asarray([[0] * TOKENS + [1] * len(ids)]))
    hidden, _ = model.forward(params, row, jnp.arange(row.shape[1])[None], segments)
    states = np.asarray(model.unembed(params, hidden)[0])[0, TOKENS:]
    embedder = Embedder(model, params, 20)
    for pooling, want in (("mean", states.mean(0)), ("last", states[-1])):
        np.testing.assert_allclose(embedder(ids, pooling), want / np.linalg.norm(want), rtol=0, atol=2e-6)  # type: ignore
