"""Parts of models beside transformers' own, at the bounds of their parameters: rotary scalings, the grouped router."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Config,
    DeepseekV3TopkRouter,
    yarn_apply_mscale,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from jaxllm.hub.families.field_reader import FieldReader
from jaxllm.hub.families.moe_families import score_growth
from jaxllm.hub.families.rope_fields import rope_config
from jaxllm.models.layers.rope import rotation
from jaxllm.models.layers.rope_scaling import LinearScaling, YarnScaling, magnitude
from jaxllm.models.moe.router import RouterConfig, route
from tests.hub import peers

HEAD_DIM = 16
YARNS: dict[str, dict[str, Any]] = {
    "ramp within": {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 2048},
    "begins before the first pair": {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    "ends at the last dimension": {"rope_theta": 10.0, "factor": 4.0, "original_max_position_embeddings": 4096},
    "begins before and ends after": {
        "rope_theta": 4.0, "factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 64.0, "beta_slow": 0.5
    },
    "begins and ends at once": {
        "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 10.0
    },
    "between pairs": {
        "rope_theta": 1e4, "factor": 3.0, "original_max_position_embeddings": 2048, "truncate": False, "beta_fast": 8.0
    },
    "no longer than before": {"rope_theta": 1e4, "factor": 1.0, "original_max_position_embeddings": 2048},
    "magnitude given": {
        "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 2048, "attention_factor": 1.3
    },
    "more above": {
        "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 2048, "mscale": 2.0, "mscale_all_dim": 0.5
    },
    "more below": {
        "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 2048, "mscale": 0.5, "mscale_all_dim": 2.0
    },
    "one of the two": {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 2048, "mscale": 2.0},
}  # fmt: skip


def llama(rope: dict[str, Any]) -> transformers.LlamaConfig:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": HEAD_DIM}
    return transformers.LlamaConfig(**peers.COMMON | sizes, rope_parameters=rope, max_position_embeddings=8192)


@pytest.mark.parametrize("name", YARNS)
def test_yarn_is_that_of_transformers(name):
    config = llama({"rope_type": "yarn"} | YARNS[name])
    with peers.float64():
        wanted, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    rope = rope_config(FieldReader(config.to_dict(), name))
    assert isinstance(rope.scaling, YarnScaling)
    got = rope.scaling.frequencies(rope.theta, HEAD_DIM)
    np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-12, atol=0)
    assert magnitude(rope.scaling) == pytest.approx(factor, rel=1e-12)


def test_the_yarns_reach_their_bounds():
    """The ramp of pairs, written out: it begins before pair 0, ends beyond the last, or both at one pair."""
    ends = {}
    for name, rope in YARNS.items():
        rotations = [rope.get("beta_fast", 32.0), rope.get("beta_slow", 1.0)]
        turns = [rope["original_max_position_embeddings"] / (2 * np.pi * r) for r in rotations]
        ends[name] = [HEAD_DIM * np.log(t) / (2 * np.log(rope["rope_theta"])) for t in turns]
    assert ends["begins before the first pair"][0] < 0
    assert ends["ends at the last dimension"][1] > HEAD_DIM
    assert ends["begins before and ends after"][0] < 0
    assert ends["begins before and ends after"][1] > HEAD_DIM
    assert ends["begins and ends at once"][1] < 0.5


@pytest.mark.parametrize("length", [1, 16, 17, 40])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_other_scalings_are_those_of_transformers(rope, length, float64):
    """Dynamic scaling changes with the length beyond 16 positions."""
    config = llama({"rope_theta": 100.0} | rope)
    config.max_position_embeddings = 16
    with peers.float64():
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, 1, 1), torch.arange(length)[None])
    mine = rope_config(FieldReader(config.to_dict(), "here"))
    got = rotation(mine, jnp.arange(length)[None], HEAD_DIM, jnp.dtype(jnp.float64))
    for ours, theirs in zip(got, (cos, sin), strict=True):
        np.testing.assert_allclose(np.asarray(ours), theirs.numpy()[..., : HEAD_DIM // 2], rtol=0, atol=1e-12)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 24])
def test_longrope_changes_beyond_the_original_length(length, float64):
    """Sixteen positions are the original length: a text of 16 tokens has the short factors, one of 17 the long ones."""
    pairs = HEAD_DIM // 2
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + 0.1 * n for n in range(pairs)],
        "long_factor": [2.0 + 0.5 * n for n in range(pairs)],
        "original_max_position_embeddings": 16,
    }
    config = transformers.Phi3Config(
        **peers.COMMON | {"hidden_size": 32, "num_attention_heads": 2},
        rope_parameters=rope,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
    )
    with peers.float64():
        cos, sin = Phi3RotaryEmbedding(config)(torch.zeros(1, 1, 1), torch.arange(length)[None])
    mine = rope_config(FieldReader(config.to_dict(), "here"), partial=True)
    got = rotation(mine, jnp.arange(length)[None], HEAD_DIM, jnp.dtype(jnp.float64))
    for ours, theirs in zip(got, (cos, sin), strict=True):
        np.testing.assert_allclose(np.asarray(ours), theirs.numpy()[..., :pairs], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "rope", [{"factor": 40.0, "mscale_all_dim": 0.9}, {"factor": 1.0, "mscale_all_dim": 0.9}, {"factor": 40.0}]
)
def test_growth_of_scores_is_that_of_transformers(rope):
    """Queries and keys are each multiplied by the growth, so that scores have its square."""
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 64} | rope
    growth = score_growth(FieldReader({"rope_parameters": rope}, "here"))
    assert growth**2 == pytest.approx(yarn_apply_mscale(rope, 1.0), rel=1e-12)


@pytest.mark.parametrize("bias", [-3.0, 0.0, 3.0])
def test_grouped_router_is_that_of_transformers(bias, rng, float64):
    """Two of four groups, scores with balance biases that are all negative, around zero, or all positive."""
    experts, chosen, tokens = 16, 3, 64
    config = DeepseekV3Config(
        n_routed_experts=experts, num_local_experts=experts, num_experts_per_tok=chosen, n_group=4, topk_group=2,
        hidden_size=8, routed_scaling_factor=2.5, norm_topk_prob=True,
    )  # fmt: skip
    weight, x = rng.normal(size=(experts, 8)), rng.normal(size=(tokens, 8))
    biases = bias + 0.5 * rng.normal(size=experts)
    if bias < 0:
        assert biases.max() < -1, "so that no expert's biased score is positive"
    with peers.float64():
        theirs = DeepseekV3TopkRouter(config)
        theirs.weight.data, theirs.e_score_correction_bias = torch.tensor(weight), torch.tensor(biases)
        _, weights, indices = theirs(torch.tensor(x))
    ours = RouterConfig("sigmoid", scale=2.5, groups=4, top_groups=2, group_score="best two", balance_bias=True)
    got = route(ours, chosen, jnp.asarray(x @ weight.T)[None], jnp.asarray(biases))
    wanted = np.zeros((tokens, experts))
    np.put_along_axis(wanted, indices.numpy(), weights.detach().numpy(), axis=1)
    found = np.zeros((tokens, experts))
    np.put_along_axis(found, np.asarray(got.experts)[0], np.asarray(got.weights)[0], axis=1)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)


def test_of_two_scalings_the_one_of_transformers_counts():
    """A file with the older field and the newer one, which differ."""
    given = {
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
    }
    theirs = transformers.LlamaConfig(**peers.COMMON | given).rope_parameters
    mine = rope_config(FieldReader(given, "here"))
    assert isinstance(mine.scaling, LinearScaling)
    assert mine.scaling.factor == theirs["factor"]
