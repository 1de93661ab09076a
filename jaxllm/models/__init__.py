"""Architectures: weights declared once in NNX, executed as pure functions."""

from jaxllm.models.attention_context import AttentionContext as AttentionContext
from jaxllm.models.attention_context import Cached as Cached
from jaxllm.models.attention_context import Scoring as Scoring
from jaxllm.models.attention_context import Segments as Segments
from jaxllm.models.decoder import BlockConfig as BlockConfig
from jaxllm.models.decoder import DecoderConfig as DecoderConfig
from jaxllm.models.functional import Functional as Functional
from jaxllm.models.functional import functional as functional
from jaxllm.models.functional import layers_apart as layers_apart
from jaxllm.models.functional import param_count as param_count
from jaxllm.models.layers.attention import AttentionConfig as AttentionConfig
from jaxllm.models.layers.mla import LatentConfig as LatentConfig
from jaxllm.models.layers.mlp import MlpConfig as MlpConfig
from jaxllm.models.layers.rope import RopeConfig as RopeConfig
from jaxllm.models.layers.rope_scaling import DynamicScaling as DynamicScaling
from jaxllm.models.layers.rope_scaling import LinearScaling as LinearScaling
from jaxllm.models.layers.rope_scaling import Llama3Scaling as Llama3Scaling
from jaxllm.models.layers.rope_scaling import LongRopeScaling as LongRopeScaling
from jaxllm.models.layers.rope_scaling import RopeScaling as RopeScaling
from jaxllm.models.layers.rope_scaling import YarnScaling as YarnScaling
from jaxllm.models.moe.moe import MoeConfig as MoeConfig
from jaxllm.models.moe.packed_experts import Packed as Packed
from jaxllm.models.moe.router import RouterConfig as RouterConfig
