"""Clustered heads (CHAI): option, refusals, weights that are swapped, and that they load again."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxllm.infer import EngineConfig, SamplingParams
from jaxllm.infer.kv_cache_options import with_kv_cache
from jaxllm.infer.runner.retention.chai import HeadClusters, calibration_tokens
from jaxllm.models import functional, unstack_layers
from jaxllm.text import ByteTokenizer
from tests.infer import engines
from tests.proofs.kv_cache.head_clusters import with_alike_heads

ROOMY = dataclasses.replace(engines.ENGINES["roomy"], head_clusters=2)


def test_option_sets_the_size_and_keeps_the_prefix_cache() -> None:
    assert with_kv_cache(EngineConfig(), kv_keep="chai").head_clusters == 2
    config = with_kv_cache(EngineConfig(), kv_format="int8", kv_keep="chai:4")
    assert (config.head_clusters, config.prefix_cache, config.retention) == (4, True, None)
    for wrong in ("chai:1", "chai:x", "chai:"):
        with pytest.raises(ValueError, match="give chai:SIZE"):
            with_kv_cache(EngineConfig(), kv_keep=wrong)


@pytest.mark.parametrize(
    ("model", "size", "message"),
    [
        ("smollm2", 2, "clusters of 2 of 1 kv heads; legal sizes: none"),
        ("wide", 3, r"clusters of 3 of 8 kv heads; legal sizes: \[2, 4, 8\]"),
        ("olmo2", 2, "a norm over the heads that are left out"),
        ("deepseek_v3", 2, "MLAConfig has no keys of its own heads"),
    ],
)
def test_models_that_are_refused(model: str, size: int, message: str) -> None:
    config = functional(engines.model_of(model, "float32"))
    with pytest.raises(ValueError, match=message):
        HeadClusters(config, engines.params_of(model, "float32"), size, np.zeros((1, 4), int))


def test_other_weights_are_refused() -> None:
    config, params = functional(engines.model_of("wide", "float32")), engines.params_of("wide", "float32")
    with pytest.raises(ValueError, match="the model has layers apart"):
        HeadClusters(config, unstack_layers(params), 2, np.zeros((1, 4), int))
    clustered = HeadClusters(config, params, 2, np.zeros((1, 4), int))
    with pytest.raises(ValueError, match="in clusters of 2 already"):
        HeadClusters(clustered.model, clustered.fold(params), 2, np.zeros((1, 4), int))


@pytest.mark.parametrize(
    "fields",
    [
        {"adapter_slots": 2},
        {"layer_window": 1},
        {"kv_dtype": "bfp4"},
        {"retention": "locret:heads.safetensors", "prefix_cache": False},
    ],
)
def test_combinations_that_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"does not go with head_clusters = 2 \(chai\)"):
        EngineConfig(head_clusters=2, **fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give 2 or more, or 1 for none"):
        EngineConfig(head_clusters=0)


def test_no_mesh() -> None:
    with pytest.raises(ValueError, match="folds weights on one device"):
        engines.build(ROOMY, "wide", mesh=jax.make_mesh((2,), ("tensor",)))


@pytest.mark.drawn(1)
def test_swapped_weights_are_folded_alike() -> None:
    rng = np.random.default_rng(0)
    params = with_alike_heads("wide", "float32", 2, rng)
    engine = engines.build(ROOMY, "wide", params=params)
    prompt = {"prompt": [3, 1, 4, 1, 5], "params": SamplingParams(max_tokens=6, temperature=0.0, logprobs=0)}
    (before,) = engines.serve(engine, [prompt])
    other = dict(params) | {"embedding": jax.tree.map(lambda x: x * 0.5, params["embedding"])}
    engine.swap(other)
    (after,) = engines.serve(engine, [prompt])
    assert engines.error("wide", "float32", [before], params) < 1e-4
    assert engines.error("wide", "float32", [after], other) < 1e-4


def test_text_of_the_calibration() -> None:
    tokens = calibration_tokens(256, ByteTokenizer())
    assert tokens.shape == calibration_tokens(7, None).shape
    assert calibration_tokens(7, None).max() < 7
    assert len(set(tokens.ravel().tolist())) > 20
