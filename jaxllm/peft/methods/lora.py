"""LoRA: trains low-rank factors beside a frozen weight (arXiv:2106.09685), ``W + (alpha / r) A B``."""

from __future__ import annotations

from jaxllm.models.functional import DeclaredParam, LinearShape
from jaxllm.peft.adapter_method import AdapterConfig, AdapterMethod, declare_factors, lora_scale
from jaxllm.peft.low_rank_factors import LoraWeight


def declare_lora(config: AdapterConfig, base: DeclaredParam, linear: LinearShape) -> LoraWeight:
    """A weight with LoRA's factors beside it."""
    return LoraWeight(base, declare_factors(config, linear, lora_scale(config)))


LORA = AdapterMethod(declare_lora, experts=True)
