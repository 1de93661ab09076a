"""Prefix tuning: learned keys and values before the text in every layer (arXiv:2101.00190; P-tuning v2,
arXiv:2110.07602).

They are parameters themselves, without the MLP of the first paper, as in P-tuning v2; keys are not rotated.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from jaxllm.config import ConfigError
from jaxllm.models import BlockConfig, DecoderConfig
from jaxllm.peft.adapter_method import AdapterConfig, AdapterMethod
from jaxllm.peft.virtual_tokens import VirtualTokens

KEYS, VALUES = "prefix_keys", "prefix_values"
"""Names of the parameters in a layer."""


def _architecture(config: AdapterConfig, base: DecoderConfig) -> DecoderConfig:
    def block(one: BlockConfig) -> BlockConfig:
        try:
            return replace(one, attention=one.attention.with_prefix(config.tokens))
        except ValueError as error:
            raise ConfigError(f"adapter.kind = 'prefix': {error}; choose prompt or lora.") from error

    return replace(base, prefix=tuple(map(block, base.prefix)), pattern=tuple(map(block, base.pattern)))


PREFIX = AdapterMethod(
    architecture=_architecture,
    trained=(KEYS, VALUES),
    text_context=lambda config: functools.partial(VirtualTokens, tokens=config.tokens),
    fields=("tokens",),
)
