"""Trained drafts for tests: the first and the last layer of a tiny model, with random factors and mask tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxllm.data.batch import Batch
from jaxllm.infer.speculate.draft_head import KINDS, MODULE, DraftHead, new_head
from jaxllm.infer.speculate.trained_draft import TrainedDraft
from jaxllm.models import functional
from jaxllm.peft import AdapterConfig
from jaxllm.peft.low_rank_factors import LowRank
from jaxllm.posttrain.frozen.draft_training import new_draft
from jaxllm.posttrain.frozen.head_training import head_step
from sharding import MeshSpec
from tests.infer import engines

ADAPTER = AdapterConfig("lora", rank=2, targets=("attention", "mlp"))


def one_device() -> Any:
    return MeshSpec.parse("dp").build(jax.devices()[:1])


def layers_of(model: str) -> list[int]:
    """The first and the last layer."""
    return [0, engines.model_of(model, "float64").layers - 1]


def drawn_head(model: str, fusion: str, rng: np.random.Generator) -> DraftHead:
    """A draft head whose weights are far from those before training."""
    whole, params = functional(engines.model_of(model, "float64")), engines.params_of(model, "float64")
    head = new_head(whole, params, fusion, np.float64)
    return DraftHead(fusion, jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape), head.weights))


def drawn_module(model: str, rng: np.random.Generator) -> DraftHead:
    """A module for multi-token prediction, with random weights."""
    head, config = drawn_head(model, "concat", rng), engines.model_of(model, "float64")
    fusion = KINDS[MODULE].start(config.embed_dim)
    norm = engines.params_of(model, "float64")["head"]["norm"]
    own = jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape), {"fusion": fusion, "norm": norm})
    return DraftHead(MODULE, head.weights | own)


def learned_head(fusion: str, steps: int, seed: int) -> tuple[DraftHead, list[dict[str, float]]]:
    """A head of a tiny model after some steps on random text, never the same twice; its metrics."""
    model, params = functional(engines.model_of("llama", "float32")), engines.params_of("llama", "float32")
    head, rule, rng = new_head(model, params, fusion), optax.adam(1e-2), np.random.default_rng(seed)
    step, values, metrics = jax.jit(head_step(model, head, rule, 0.1, 0.1, seed)), head.weights, []
    state, positions = rule.init(values), np.tile(np.arange(32, dtype=np.int32), (32, 1))
    for _ in range(steps):
        rows = rng.integers(0, engines.VOCAB, (32, 32)).astype(np.int32)
        batch = jax.tree.map(jnp.asarray, Batch(rows, rows, np.ones_like(rows), positions))
        values, state, found = step(values, state, params, batch)
        metrics.append({name: float(value) for name, value in found.items()})
    return dataclasses.replace(head, weights=values), metrics


def trained_draft(model: str, masks: int, rng: np.random.Generator) -> TrainedDraft:
    """A draft whose values are far from those before training."""
    whole, params = functional(engines.model_of(model, "float64")), engines.params_of(model, "float64")
    draft, _ = new_draft(whole, params, one_device(), layers_of(model), ADAPTER, masks, 0)

    def drawn(x: Any, size: float) -> np.ndarray:
        return size * rng.normal(size=x.shape)

    factors = {path: LowRank(drawn(one.a, 0.3), drawn(one.b, 0.3), one.scale) for path, one in draft.factors.items()}
    return TrainedDraft(draft.layers, drawn(draft.masks, 1.0), factors)
