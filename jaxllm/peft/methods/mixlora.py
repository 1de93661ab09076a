"""MixLoRA: a mixture of LoRA experts over the frozen feed-forward layers, and LoRA on the other targets
(arXiv:2404.15159).

``routing.balance_loss`` keeps the load of experts even; the paper has 0.01.
"""

from __future__ import annotations

from dataclasses import replace

from jaxllm.config import ConfigError
from jaxllm.models import BlockConfig, DecoderConfig
from jaxllm.models.layers.lora_experts import LoraExpertsConfig
from jaxllm.peft.adapter_method import AdapterConfig, AdapterMethod, lora_scale
from jaxllm.peft.methods.lora import declare_lora

FACTORS = ("expert_router", "gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")


def _architecture(config: AdapterConfig, base: DecoderConfig) -> DecoderConfig:
    def block(one: BlockConfig) -> BlockConfig:
        experts = {
            "lora_experts": config.experts,
            "lora_top_k": config.top_k,
            "lora_rank": config.rank,
            "lora_scale": lora_scale(config),
        }
        try:
            return replace(one, mlp=LoraExpertsConfig(**one.mlp.shared_fields, **experts))
        except ValueError as error:
            raise ConfigError(f"adapter.kind = 'mixlora': {error}.") from error

    return replace(base, prefix=tuple(map(block, base.prefix)), pattern=tuple(map(block, base.pattern)))


MIXLORA = AdapterMethod(
    declare_lora,
    trained=("low_rank", *FACTORS),
    architecture=_architecture,
    not_adapted=("mlp",),
    fields=("rank", "alpha", "targets", "experts", "top_k"),
)
