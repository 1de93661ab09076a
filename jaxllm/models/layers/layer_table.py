"""Layer table: every kind of attention and feed-forward layer that a block can have, one row each.

A row's class is found by its field names when a configuration is read from JSON, so no two rows have the same fields.
"""

from __future__ import annotations

from jaxllm.models.layers.adapter_experts import AdapterExpertsConfig
from jaxllm.models.layers.attention import AttentionConfig
from jaxllm.models.layers.layer import AttentionLayer, FeedForwardLayer
from jaxllm.models.layers.lora_experts import LoraExpertsConfig
from jaxllm.models.layers.mla import MLAConfig
from jaxllm.models.layers.mlp import MlpConfig
from jaxllm.models.layers.recurrent import RecurrentConfig
from jaxllm.models.moe.moe import MoeConfig

ATTENTION_LAYERS: list[type[AttentionLayer]] = [AttentionConfig, MLAConfig, RecurrentConfig]
FEED_FORWARD_LAYERS: list[type[FeedForwardLayer]] = [MlpConfig, MoeConfig, LoraExpertsConfig, AdapterExpertsConfig]
