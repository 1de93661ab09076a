"""Model architectures: weights are declared once in Flax NNX and executed as pure functions."""

from jaxllm.lazy import lazy_exports
from jaxllm.models.attention_context import AttentionContext as AttentionContext
from jaxllm.models.attention_context import AttentionParams as AttentionParams
from jaxllm.models.attention_context import KVSpec as KVSpec
from jaxllm.models.attention_context import Segments as Segments
from jaxllm.models.decoder import BlockConfig as BlockConfig
from jaxllm.models.decoder import DecoderConfig as DecoderConfig
from jaxllm.models.functional import Functional as Functional
from jaxllm.models.functional import functional as functional
from jaxllm.models.functional import has_unstacked_layers as has_unstacked_layers
from jaxllm.models.functional import param_count as param_count
from jaxllm.models.functional import unstack_layers as unstack_layers
from jaxllm.models.layers.attention import AttentionConfig as AttentionConfig
from jaxllm.models.layers.mla import MLAConfig as MLAConfig
from jaxllm.models.layers.mlp import MlpConfig as MlpConfig
from jaxllm.models.layers.recurrent import RecurrentConfig as RecurrentConfig
from jaxllm.models.layers.rope import RopeConfig as RopeConfig
from jaxllm.models.layers.rope_scaling import DynamicScaling as DynamicScaling
from jaxllm.models.layers.rope_scaling import LinearScaling as LinearScaling
from jaxllm.models.layers.rope_scaling import Llama3Scaling as Llama3Scaling
from jaxllm.models.layers.rope_scaling import LongRopeScaling as LongRopeScaling
from jaxllm.models.layers.rope_scaling import RopeScaling as RopeScaling
from jaxllm.models.layers.rope_scaling import YarnScaling as YarnScaling
from jaxllm.models.moe.moe import MoeConfig as MoeConfig
from jaxllm.models.moe.router import RouterConfig as RouterConfig
from jaxllm.models.packed_weight import PackedWeight as PackedWeight

__getattr__, _ = lazy_exports(
    __name__,
    {
        "jaxllm.models.attention_context": ("AttentionParams", "KVSpec"),
        "jaxllm.models.functional": ("has_unstacked_layers", "unstack_layers"),
        "jaxllm.models.layers.mla": ("MLAConfig",),
        "jaxllm.models.packed_weight": ("PackedWeight",),
    },
    renamed={
        "Cached": "KVSpec",
        "LatentConfig": "MLAConfig",
        "Packed": "PackedWeight",
        "PackedExperts": "PackedWeight",
        "Scoring": "AttentionParams",
        "layers_apart": "unstack_layers",
    },
)
