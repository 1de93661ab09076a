"""Clustered heads (CHAI): with heads that attend alike they are exact, and keys of one head of a cluster are kept."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxllm.infer.runner.retention.chai import HeadClusters, clusters
from jaxllm.models import functional
from tests.infer import engines
from tests.proofs.harness import proof

CASES = [
    (model, way, size)
    for model, size in (("wide", 2), ("wide", 4), ("few kv heads", 2), ("qwen3", 2), ("gemma2", 2), ("gpt_oss", 2))
    for way in ("roomy", "tight, recompute", "tight, swap")
]
"""(model, way to serve, kv heads of a cluster)."""


def with_alike_heads(model: str, dtype: str, size: int, rng: np.random.Generator) -> Any:
    """Weights in which queries and keys of so many kv heads at a time, drawn in each layer, are the same; sinks too."""
    params, config = engines.params_of(model, dtype), engines.model_of(model, dtype)
    segments = {name: dict(groups) for name, groups in params["segments"].items()}
    for name, groups in segments.items():
        for number, group in groups.items():
            attention = dict(group["attention"])
            layers, _, kv, _ = attention["k"].shape
            per_kv = config.blocks[0].attention.heads // kv
            for layer in range(layers):
                for cluster in rng.permutation(kv).reshape(-1, size):
                    for kind, many in (("k", 1), ("q", per_kv)):
                        first, *others = (slice(head * many, (head + 1) * many) for head in cluster)
                        for one in others:
                            for weight in (kind, f"{kind}_bias"):
                                if weight in attention:
                                    x = attention[weight]
                                    attention[weight] = x.at[layer, ..., one, :].set(x[layer, ..., first, :])
                            if kind == "q" and "sinks" in attention:
                                x = attention["sinks"]
                                attention["sinks"] = x.at[layer, one].set(x[layer, first])
            segments[name][number] = {**group, "attention": attention}
    return {**params, "segments": segments}


@proof("kv_cache", cases=CASES, sample=1, float64=True, bound=1e-10)
def alike_heads_are_exact_in_clusters(case: tuple[str, str, int]) -> float:
    """Random traffic on an engine with clustered heads, less the training forward of the whole model; bytes of a token
    are those of the formula, and keys of heads that are not representatives are in no page."""
    model, way, size = case
    rng = np.random.default_rng([*model.encode(), *way.encode(), size])
    params = with_alike_heads(model, "float64", size, rng)
    config = dataclasses.replace(engines.ENGINES[way], head_clusters=size)
    engine = engines.build(config, model, "float64", params=params)
    attention = engines.model_of(model, "float64").blocks[0].attention
    kv, dim = attention.kv_heads, attention.key_dim
    layers = engines.model_of(model, "float64").layers
    assert engine.runner.token_bytes == layers * (kv // size) * (dim + size * dim) * 8
    assert engine.runner.token_bytes < layers * kv * 2 * dim * 8
    made = engines.serve(engine, engines.traffic(rng, config, 6))
    return engines.error(model, "float64", made, params)


@proof("kv_cache", count=200, sample=5, float64=True)
def clusters_are_of_heads_that_attend_alike(seed: int) -> None:
    """Heads drawn alike in pairs, or in fours, and a little apart: clusters are these; every head is in one."""
    rng = np.random.default_rng(seed)
    size = int(rng.choice([2, 4]))
    drawn = np.sort(rng.permutation(8).reshape(-1, size), axis=1)
    base = rng.normal(size=(8 // size, 300))
    heads = np.empty((8, 300))
    for cluster, own in zip(drawn, base, strict=True):
        heads[cluster] = own + rng.normal(size=(size, 300)) * 0.3
    found = clusters(np.corrcoef(heads), size)
    assert sorted(map(tuple, np.sort(found, axis=1))) == sorted(map(tuple, drawn))


@proof("kv_cache", cases=["wide", "few kv heads", "qwen3"], sample=1, float64=True)
def unlike_heads_change_the_result(model: str) -> None:
    """Without heads that are alike, a clustered model is another one: logits differ."""
    config, params = engines.model_of(model, "float64"), engines.params_of(model, "float64")
    tokens = np.random.default_rng(1).integers(0, engines.VOCAB, (2, 16))
    order = HeadClusters(functional(config), params, 2, tokens)
    from tests.proofs.kv_cache.channel_order import logits

    one = logits(functional(config), params, tokens)
    two = logits(order.model, order.fold(params), tokens)
    assert jnp.abs(one - two).max() > 1e-3
