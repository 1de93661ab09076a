"""Memory layouts of served weights: those of heads lie head by head on TPUs, and completions do not change."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxllm.infer import Engine, SamplingParams
from jaxllm.infer.runner import model_runner, serving_mesh
from jaxllm.models import functional, unstack_layers
from tests.infer import engines


@pytest.fixture
def tpu_layouts(monkeypatch):
    """Engines lay weights out as on a TPU, whose tiles are narrow."""
    own = serving_mesh.with_layouts
    monkeypatch.setattr(serving_mesh, "LANES", 8)
    monkeypatch.setattr(model_runner, "with_layouts", lambda model, params, _: own(model, params, "tpu"))


def orders(params):
    """Order of dimensions in memory of each weight of attention, of an engine's first layers."""
    (block,) = jax.tree.leaves(params["segments"], is_leaf=lambda x: isinstance(x, dict) and "attention" in x)[:1]
    attention = block["attention"]
    return {name: attention[name].format.layout.major_to_minor for name in "qkvo"}


def completions(engine: Engine) -> list[list[int]]:
    requests = [
        {"prompt": [1, 2, 3, 4, 5][:n], "params": SamplingParams(max_tokens=20, seed=n, temperature=heat)}
        for n, heat in ((5, 1.0), (3, 0.0))
    ]
    return [one.sequences[0].tokens for one in engines.serve(engine, requests)]


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("apart", [False, True], ids=["stacked", "apart"])
def test_completions_do_not_change_and_new_weights_are_laid_out_too(apart, tpu_layouts, float64):
    engine = engines.build(engines.ENGINES["roomy"], "llama", "float64", apart=apart)
    first = (0,) if not apart else ()
    by_head = (*first, *(n + len(first) for n in (1, 0, 2)))
    plain = tuple(range(3 + len(first)))
    want = {"q": by_head, "k": by_head, "v": by_head, "o": plain}
    assert orders(engine.runner.params) == want
    params = engines.params_of("llama", "float64")
    other = engines.params_of("llama", "float64", seed=5)
    said = completions(engine)
    for given, tokens in ((engine.runner.params, said), (other, None), (params, said)):
        engine.swap(unstack_layers(given) if apart and given is not engine.runner.params else given)
        assert orders(engine.runner.params) == want
        got = completions(engine)
        assert got == tokens if tokens is not None else got != said
    assert engine.runner.program_cache is not None
    assert engine.runner.program_cache.counts.late == 0
    greedy = engines.logprobs_of("llama", "float64", said[1]).argmax(-1)
    assert greedy[2:-1].tolist() == said[1][3:]


def test_layouts_are_of_tpus_and_of_heads_that_fill_tiles(monkeypatch):
    model = functional(engines.model_of("llama", "float32"))
    params = jax.tree.map(np.asarray, engines.params_of("llama", "float32"))
    params = jax.device_put(params)
    for platform, lanes in (("tpu", 128), ("gpu", 8), ("cpu", 8)):
        monkeypatch.setattr(serving_mesh, "LANES", lanes)
        shapes = serving_mesh.with_layouts(model, params, platform)
        assert all(x.format.layout is None for x in jax.tree.leaves(shapes))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), params)
