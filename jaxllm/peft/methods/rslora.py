"""Rank-stabilised LoRA: the product is scaled by ``alpha / sqrt(r)``, so high ranks learn too (arXiv:2312.03732)."""

from __future__ import annotations

import math

from jaxllm.models.functional import DeclaredParam, LinearShape
from jaxllm.peft.adapter_method import AdapterConfig, AdapterMethod, declare_factors
from jaxllm.peft.low_rank_factors import LoraWeight


def _declare(config: AdapterConfig, base: DeclaredParam, linear: LinearShape) -> LoraWeight:
    return LoraWeight(base, declare_factors(config, linear, config.alpha / math.sqrt(config.rank)))


RSLORA = AdapterMethod(_declare, experts=True)
