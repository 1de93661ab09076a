"""Trained drafts for tests: the first and the last layer of a tiny model, with random factors and mask tokens."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxllm.infer.speculate.trained_draft import TrainedDraft
from jaxllm.models import functional
from jaxllm.peft import AdapterConfig
from jaxllm.peft.low_rank_factors import LowRank
from jaxllm.posttrain.frozen.draft_training import new_draft
from sharding import MeshSpec
from tests.infer import engines

ADAPTER = AdapterConfig("lora", rank=2, targets=("attention", "mlp"))


def one_device() -> Any:
    return MeshSpec.parse("dp").build(jax.devices()[:1])


def layers_of(model: str) -> list[int]:
    """The first and the last layer."""
    return [0, engines.model_of(model, "float64").layers - 1]


def trained_draft(model: str, masks: int, rng: np.random.Generator) -> TrainedDraft:
    """A draft whose values are far from those before training."""
    whole, params = functional(engines.model_of(model, "float64")), engines.params_of(model, "float64")
    draft, _ = new_draft(whole, params, one_device(), layers_of(model), ADAPTER, masks, 0)

    def drawn(x: Any, size: float) -> np.ndarray:
        return size * rng.normal(size=x.shape)

    factors = {path: LowRank(drawn(one.a, 0.3), drawn(one.b, 0.3), one.scale) for path, one in draft.factors.items()}
    return TrainedDraft(draft.layers, drawn(draft.masks, 1.0), factors)
