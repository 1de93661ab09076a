"""Experts that are bottleneck adapters behind one feed-forward layer: parameter-efficient sparsity crafting (PESC,
arXiv:2401.02731).

Every expert is the same feed-forward layer with an adapter of its own on its output, ``y + up_e(gelu(down_e(y)))``, and
a router sends each token to its top-k experts. The layer runs once for a token. The adapters of all experts lie side by
side in one matrix; those that a token did not choose are multiplied by zero, so that no token is moved.

Legend: B batch, S sequence, D embed, E experts, r width of an adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import sharding
from jaxllm.models.attention_context import AttentionContext, LayerIndex, RoutingContext
from jaxllm.models.layers.lora_experts import OUT, ROUTER_STD, check_experts, chosen, routed
from jaxllm.models.layers.mlp import Mlp, MlpConfig
from jaxllm.models.linear import linear
from jaxllm.models.params import declare

INNER_RANKS = ("batch", "residual_seq", None, None)


@dataclass(frozen=True)
class AdapterExpertsConfig(MlpConfig):
    """Feed-forward layer with experts that are adapters on its output.

    Attributes:
        adapter_experts: number of experts.
        adapter_top_k: experts per token.
        adapter_width: inner width of an adapter.
    """

    adapter_experts: int = 8
    adapter_top_k: int = 2
    adapter_width: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts("pesc", self.adapter_experts, self.adapter_top_k, self.adapter_width)

    @property
    def shared_fields(self) -> dict[str, Any]:
        """Refuses: experts of experts."""
        raise ValueError(f"experts share a dense feed-forward layer, not {type(self).__name__}")

    @property
    def routed_experts(self) -> int:
        """Experts that the router chooses from."""
        return self.adapter_experts

    def build(self, embed_dim: int, *, out_scale: float, dtype: jnp.dtype) -> nnx.Module:
        """Module of the layer."""
        return AdapterExperts(self, embed_dim, out_scale=out_scale, dtype=dtype)

    def weight_macs(self, embed_dim: int) -> int:
        """Multiply-adds of one token: the shared layer, the router, and the adapters of all experts."""
        more = embed_dim * self.adapter_experts * (1 + 2 * self.adapter_width)
        return super().weight_macs(embed_dim) + more


class AdapterExperts(Mlp):
    """Feed-forward layer with adapters as experts: ``y + sum over chosen e of weight[e] * up_e(gelu(down_e(y)))``."""

    def __init__(self, config: AdapterExpertsConfig, embed_dim: int, *, out_scale: float, dtype: jnp.dtype):
        super().__init__(config, embed_dim, out_scale=out_scale, dtype=dtype)
        d, e, r = embed_dim, config.adapter_experts, config.adapter_width
        self.adapters = config
        self.expert_router = declare(nnx.Param, (d, e), ("embed", None), dtype, "router", std=ROUTER_STD)
        self.adapter_down = linear("adapter_down", (d, e, r), ("embed", None, None), dtype, role="adapter")
        axes = (None, None, "embed")
        self.adapter_up = linear("adapter_up", (e, r, d), axes, dtype, role="adapter", contract=2, scale=0)

    def __call__(
        self, x: Float[Array, "B S D"], layer: LayerIndex, ctx: AttentionContext
    ) -> tuple[Float[Array, "B S D"], AttentionContext]:
        """Output of the layer, and the context, which may record the routing of its tokens."""
        config = self.adapters
        routing = routed(self.expert_router, sharding.constrain(x, "batch", "seq", "act_embed"), config.adapter_top_k)
        y = self.transform(x)
        shares = jnp.zeros((), y.dtype)
        for choice in range(config.adapter_top_k):
            weight, mine = chosen(routing, choice, config.adapter_experts, y.dtype)
            shares = shares + weight[..., None] * mine
        inner = jax.nn.gelu(self.adapter_down(y, INNER_RANKS), approximate=False)
        out = y + self.adapter_up(inner * sharding.constrain(shares, *INNER_RANKS), OUT)
        return out, ctx.record_routing(layer, routing) if isinstance(ctx, RoutingContext) else ctx
