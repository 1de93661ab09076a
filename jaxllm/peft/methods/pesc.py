"""PESC, parameter-efficient sparsity crafting: experts that share a frozen feed-forward layer and differ by adapters
on its output; LoRA on the targets (arXiv:2401.02731).

``adapter.rank`` is the rank of LoRA and ``adapter.width`` the inner width of an expert's adapter.
``routing.balance_loss`` keeps the load of experts even; the paper has 0.01.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.models import BlockConfig, DecoderConfig
from jaxllm.models.layers.adapter_experts import AdapterExpertsConfig
from jaxllm.peft.adapter_method import AdapterConfig, AdapterMethod
from jaxllm.peft.methods.lora import declare_lora


def _architecture(config: AdapterConfig, base: DecoderConfig) -> DecoderConfig:
    def block(one: BlockConfig) -> BlockConfig:
        experts: dict[str, Any] = {
            "adapter_experts": config.experts,
            "adapter_top_k": config.top_k,
            "adapter_width": config.width,
        }
        try:
            return replace(one, mlp=AdapterExpertsConfig(**one.mlp.shared_fields, **experts))
        except ValueError as error:
            raise ConfigError(f"adapter.kind = 'pesc': {error}.") from error

    return replace(base, prefix=tuple(map(block, base.prefix)), pattern=tuple(map(block, base.pattern)))


PESC = AdapterMethod(
    declare_lora,
    trained=("low_rank", "expert_router", "adapter_down", "adapter_up"),
    architecture=_architecture,
    fields=("rank", "alpha", "targets", "experts", "top_k", "width"),
)
