"""Experts of low rank over one feed-forward layer: MixLoRA (arXiv:2404.15159).

Every expert is the same feed-forward layer with LoRA factors of its own on each projection, and a router sends each
token to its top-k experts. The shared matrices multiply a token once for the gate and up projections, and once for the
weighted sum of its experts in the down projection. The factors of all experts lie side by side in one matrix: the
inner activations of experts that a token did not choose are set to zero, so that no token is moved.

Legend: B batch, S sequence, D embed, F mlp, E experts, r rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import sharding
from jaxllm.models.attention_context import AttentionContext, LayerIndex, RoutingContext
from jaxllm.models.layers.mlp import ACTIVATIONS, INNER, Mlp, MlpConfig
from jaxllm.models.linear import linear, project_many
from jaxllm.models.moe.router import RouterConfig, Routing, route
from jaxllm.models.operand_specs import without_reduced
from jaxllm.models.params import at_least_f32, declare, use

RANKS = ("batch", "seq", None, None)
OUT = ("batch", "residual_seq", "act_embed")
ROUTER_STD = 0.02


@dataclass(frozen=True)
class LoraExpertsConfig(MlpConfig):
    """Feed-forward layer with experts of low rank.

    Attributes:
        lora_experts: number of experts.
        lora_top_k: experts per token.
        lora_rank: rank of an expert's factors.
        lora_scale: factor on their products.
    """

    lora_experts: int = 8
    lora_top_k: int = 2
    lora_rank: int = 8
    lora_scale: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts("mixlora", self.lora_experts, self.lora_top_k, self.lora_rank)

    @property
    def shared_fields(self) -> dict[str, Any]:
        """Refuses: experts of experts."""
        raise ValueError(f"experts share a dense feed-forward layer, not {type(self).__name__}")

    @property
    def routed_experts(self) -> int:
        """Experts that the router chooses from."""
        return self.lora_experts

    def build(self, embed_dim: int, *, out_scale: float, dtype: jnp.dtype) -> nnx.Module:
        """Module of the layer."""
        return LoraExperts(self, embed_dim, out_scale=out_scale, dtype=dtype)

    def weight_macs(self, embed_dim: int) -> int:
        """Multiply-adds of one token: the shared layer, the router, and the factors of all experts."""
        ranks = self.lora_experts * self.lora_rank
        inwards = 2 if self.gated else 1
        inner = (inwards + 1) * embed_dim + self.lora_top_k * (inwards + 1) * self.hidden
        return super().weight_macs(embed_dim) + embed_dim * self.lora_experts + ranks * inner

    def inner_widths(self, embed_dim: int) -> dict[str, int]:
        """Widths of the results of the gate and up projections, of all experts of a token."""
        return {name: (1 + self.lora_top_k) * width for name, width in super().inner_widths(embed_dim).items()}

    def without_traffic_formula(self, tensor: int) -> list[str]:
        """Features whose collectives have no formula."""
        return ["experts of low rank"] * (tensor > 1)


class LoraExperts(Mlp):
    """Feed-forward layer with experts of low rank: ``sum over chosen e of weight[e] * mlp_e(x)``."""

    def __init__(self, config: LoraExpertsConfig, embed_dim: int, *, out_scale: float, dtype: jnp.dtype):
        super().__init__(config, embed_dim, out_scale=out_scale, dtype=dtype)
        d, f, e, r = embed_dim, config.hidden, config.lora_experts, config.lora_rank
        self.lora = config
        self.expert_router = declare(nnx.Param, (d, e), ("embed", None), dtype, "router", std=ROUTER_STD)

        def factors(inputs: int, outputs: int, axes: tuple[str, str]) -> tuple[nnx.Param, nnx.Param]:
            std = 1 / math.sqrt(3)  # times 1 / sqrt(inputs), as PEFT draws LoRA's
            a = linear("expert_a", (inputs, e, r), (axes[0], None, None), dtype, role="adapter", scale=std)
            b = linear("expert_b", (e, r, outputs), (None, None, axes[1]), dtype, role="adapter", contract=2, scale=0)
            return a, b

        if config.gated:
            self.gate_a, self.gate_b = factors(d, f, ("embed", "mlp"))
        self.up_a, self.up_b = factors(d, f, ("embed", "mlp"))
        self.down_a, self.down_b = factors(f, d, ("mlp", "embed"))

    def __call__(
        self, x: Float[Array, "B S D"], layer: LayerIndex, ctx: AttentionContext
    ) -> tuple[Float[Array, "B S D"], AttentionContext]:
        """Output of the layer, and the context, which may record the routing of its tokens."""
        config = self.lora
        x = sharding.constrain(x, "batch", "seq", "act_embed")
        routing = routed(self.expert_router, x, config.lora_top_k)
        names = ("gate", "up") if config.gated else ("up",)
        shared = project_many(x, [getattr(self, name) for name in names], [INNER] * len(names), over="act_mlp")
        shared = [self._named(h, name) for h, name in zip(shared, names, strict=True)]
        here = without_reduced(sharding.fan_out(x, "batch", "seq", "act_embed", over="act_mlp"))
        ranks = [getattr(self, f"{name}_a")(here, RANKS) * config.lora_scale for name in names]
        inner, low = jnp.zeros_like(shared[0]), jnp.zeros_like(ranks[0])
        for choice in range(config.lora_top_k):
            weight, mine = chosen(routing, choice, config.lora_experts, x.dtype)
            own = [
                getattr(self, f"{name}_b")(without_reduced(a * mine), INNER)
                for name, a in zip(names, ranks, strict=True)
            ]
            first, *second = (h + more for h, more in zip(shared, own, strict=True))
            h = ACTIVATIONS[config.activation](first) * weight
            h = h * second[0] if second else h
            inner, low = inner + h, low + self.down_a(h, RANKS) * mine
        bias = self.down_bias if config.bias else None  # the combine weights sum to one
        out = self.down(inner, OUT, bias) + self.down_b(low * config.lora_scale, OUT)
        return out, ctx.record_routing(layer, routing) if isinstance(ctx, RoutingContext) else ctx


def routed(router: nnx.Param, x: Float[Array, "B S D"], top_k: int) -> Routing:
    """Choice of experts of each token; the combine weights of the chosen ones sum to one."""
    dtype = at_least_f32(x.dtype)
    logits = sharding.project(x.astype(dtype), use(router, dtype), ("batch", "seq", None))
    return route(RouterConfig(), top_k, logits, None)


def chosen(
    routing: Routing, choice: int, experts: int, dtype: jnp.dtype
) -> tuple[Float[Array, "B S 1"], Float[Array, "B S E 1"]]:
    """Combine weight of each token's expert of one rank of choice, and a one at its place among all experts."""
    mine = jax.nn.one_hot(routing.experts[..., choice], experts, dtype=dtype)
    return routing.weights[..., choice, None].astype(dtype), mine[..., None]


def check_experts(what: str, experts: int, top_k: int, rank: int) -> None:
    """Checks sizes of experts over one layer; raises ValueError."""
    if rank < 1:
        raise ValueError(f"{what}: rank = {rank}; give a positive number")
    if not 1 <= top_k <= experts:
        raise ValueError(f"{what}: top_k = {top_k} of experts = {experts}; choose 1 to {experts}")
