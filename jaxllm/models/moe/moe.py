"""Mixture of experts (MoE, arXiv:1701.06538): a router sends each token to its top-k experts (feed-forward layers).

Legend: B batch, S sequence, D embed, F width of an expert, E experts, A experts per token (top-k), X experts of a
shard, M rows (tokens times top-k).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

import sharding
from jaxllm.models.attention_context import AttentionContext, LayerIndex, RoutingContext
from jaxllm.models.layers.layer import FeedForwardLayer, MatmulInput, unusual
from jaxllm.models.layers.mlp import ACTIVATIONS, Mlp, MlpConfig
from jaxllm.models.linear import Weight, linear, matmul_by_expert
from jaxllm.models.moe.expert_dispatch import dispatch_and_combine, dispatch_within_capacity
from jaxllm.models.moe.router import RouterConfig, Routing, route
from jaxllm.models.packed_weight import axes_of_arrays
from jaxllm.models.params import at_least_f32, constant, use
from pallas_kernels._compat import vary_over
from pallas_kernels._dispatch import may_be_default
from pallas_kernels.fused_moe import fused_moe
from pallas_kernels.fused_moe.config import refusal

TOKENS = ("batch", "router_seq", None)
"""Tokens in the router: where experts are folded, they are split over ``tensor`` too."""
OF_EXPERTS = ("expert_batch", "expert_seq", None)
"""Tokens that a device sends to experts: other ones where experts factor the devices in their own way."""

MATRICES = ("gate", "up", "down")


@dataclass(frozen=True)
class MoeConfig(FeedForwardLayer):
    """Mixture of experts; each expert is a gated feed-forward layer.

    Attributes:
        experts: number of experts.
        top_k: experts per token.
        hidden: hidden width of an expert.
        activation: activation function of the experts.
        router: configuration of the router.
        shared: hidden width of a shared expert that every token goes through (arXiv:2401.06066); 0 for none.
        bias: whether every projection of an expert has a bias (gpt-oss).
        clamp: upper bound of the gate projection, and bound of the up projection from both sides (gpt-oss).
        up_offset: added to the up projection before it multiplies the activated gate (gpt-oss: 1).
        capacity: capacity factor: an expert takes at most this many times its even share of a shard's rows; rows
            beyond are dropped and counted (arXiv:2006.16668, section 2.2), first choices before second ones. None:
            dropless, whatever the load.
    """

    experts: int = 8
    top_k: int = 2
    hidden: int = 768
    scope: ClassVar[str] = "moe"
    activation: Literal["silu", "relu", "gelu", "gelu_tanh", "quick_gelu"] = "silu"
    router: RouterConfig = field(default_factory=RouterConfig)
    shared: int = 0
    bias: bool = False
    clamp: float | None = None
    up_offset: float = 0.0
    capacity: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("experts", 1), ("top_k", 1), ("hidden", 1), ("shared", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"mixture of experts: {name} = {getattr(self, name)}; give {least} or more.")
        for name in ("clamp", "capacity"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"mixture of experts: {name} = {value}; give a positive number, or None.")
        if self.router.scoring == "step" and self.capacity is not None:
            raise ValueError(
                f"mixture of experts: capacity = {self.capacity} counts choices, of which scoring = 'step' leaves some "
                "out with weight 0; give no capacity."
            )
        self.router.check(self.experts, self.top_k)

    @property
    def mixture(self) -> MoeConfig:
        """This layer."""
        return self

    def build(self, embed_dim: int, *, out_scale: float, dtype: jnp.dtype) -> nnx.Module:
        """Module of the layer."""
        return Moe(self, embed_dim, out_scale=out_scale, dtype=dtype)

    def weight_macs(self, embed_dim: int) -> int:
        """Multiply-adds of one token with the weights of the router, its experts and the shared expert."""
        return embed_dim * (self.experts + 3 * (self.top_k * self.hidden + self.shared))

    def last_macs(self, embed_dim: int) -> int:
        """Multiply-adds of one token in the down projections."""
        return embed_dim * (self.top_k * self.hidden + self.shared)

    def unnamed_macs(self, embed_dim: int) -> int:
        """Multiply-adds of one token in the router, and in the gate and up projections of its experts."""
        return embed_dim * (self.experts + 2 * self.top_k * self.hidden)

    def matmul_inputs(self, embed_dim: int) -> tuple[MatmulInput, ...]:
        """Inputs of the router and the shared expert."""
        return ((embed_dim, 3), (self.shared, 1)) if self.shared else ((embed_dim, 1),)

    def inner_widths(self, embed_dim: int) -> dict[str, int]:
        """Widths of the experts' inner activations and rows, and of the shared expert's."""
        return {
            "expert": self.top_k * self.hidden,
            "sent": self.top_k * embed_dim,
            "up": self.shared,
            "gate": self.shared,
        }

    def without_traffic_formula(self, tensor: int) -> list[str]:
        """Features whose collectives have no formula."""
        return ["biases of split layers"] * (self.bias and tensor > 1)

    def describe(self) -> str:
        """One line for people."""
        rest = unusual(self, "hidden", "experts", "top_k")
        return f"{self.top_k} of {self.experts} experts of {self.hidden}" + (f"; {rest}" if rest else "")


class Experts(nnx.Module):
    """Weights and dispatch of all experts: ``down[e](activation(x @ gate[e]) * (x @ up[e]))`` for expert e."""

    def __init__(self, config: MoeConfig, embed_dim: int, *, out_scale: float, dtype: jnp.dtype):
        d, f, e = embed_dim, config.hidden, config.experts
        inwards, outwards = ("experts", "expert_embed", "expert_mlp"), ("experts", "expert_mlp", "expert_embed")
        self.config = config
        self.gate = linear("gate", (e, d, f), inwards, dtype, fan_in=d)
        self.up = linear("up", (e, d, f), inwards, dtype, fan_in=d)
        self.down = linear("down", (e, f, d), outwards, dtype, fan_in=f, scale=out_scale)
        if config.bias:
            self.gate_bias = constant(0.0, (e, f), ("experts", "expert_mlp"), dtype, role="bias")
            self.up_bias = constant(0.0, (e, f), ("experts", "expert_mlp"), dtype, role="bias")
            self.down_bias = constant(0.0, (e, d), ("experts", None), dtype, role="bias")

    def __call__(
        self,
        x: Float[Array, "B S D"],
        experts: Int[Array, "B S A"],
        weights: Float[Array, "B S A"],
        *,
        partial: bool = False,
    ) -> tuple[Float[Array, "B S D"], Float[Array, ""]]:
        """Weighted sum of each token's experts, and the number of dropped rows.

        Args:
            partial: only some experts are here: an index beyond them is none, and contributes nothing.
        """
        config = self.config
        expert_axes, width_axes = sharding.axis_names("experts"), sharding.axis_names("expert_mlp")
        token_axes = sharding.axis_names(*OF_EXPERTS[:2])
        arrays = {name: getattr(self, name).gathered(x.dtype) for name in MATRICES}
        if config.bias:
            arrays |= {f"{name}_bias": use(getattr(self, f"{name}_bias"), x.dtype) for name in MATRICES}
        specs = {
            "gate": ("experts", None, "expert_mlp"),
            "up": ("experts", None, "expert_mlp"),
            "down": ("experts", "expert_mlp", None),
            "gate_bias": ("experts", "expert_mlp"),
            "up_bias": ("experts", "expert_mlp"),
            "down_bias": ("experts", None),
        }

        flat, tree = jax.tree.flatten(arrays)  # a packed matrix is two arrays, one with an adapter three
        parts = [axes for name in sorted(arrays) for axes in axes_of_arrays(arrays[name], specs[name])]

        def local(x: Array, experts: Array, weights: Array, *flat: Array) -> tuple[Array, Array]:
            own = jax.tree.unflatten(tree, flat)
            if width_axes and config.bias:  # the output is summed over the shards of the width, and the bias with it
                own["down_bias"] = own["down_bias"] / jax.lax.axis_size(width_axes)
            rows, chosen, shares = (a.reshape(-1, a.shape[-1]) for a in (x, experts, weights))
            # From here on each shard of the width has gradients of its own: they are summed once for a token, and not
            # for each of its choices.
            rows, shares = (vary_over(a, frozenset(width_axes)) for a in (rows, shares))
            run = functools.partial(_feed_forward, config)
            axes, count = expert_axes or None, own["gate"].shape[0]
            dropped = jnp.zeros((), at_least_f32(x.dtype))
            if _is_fused(config, own, rows) and not expert_axes:
                gate, up, down = (own[name] for name in MATRICES)
                out = fused_moe(rows, gate, up, down, chosen, shares, ACTIVATIONS[config.activation])
            elif config.capacity is None:
                out = dispatch_and_combine(rows, chosen, shares, run, own, count, expert_axes=axes, partial=partial)
            else:
                out, lost = dispatch_within_capacity(
                    rows, chosen, shares, run, own, count, config.capacity, expert_axes=axes
                )
                dropped = (jax.lax.psum(lost, token_axes) if token_axes else lost).astype(dropped.dtype)
            out = out.reshape(x.shape)
            return (jax.lax.psum(out, width_axes) if width_axes else out), dropped

        tokens = [sharding.constrain(one, *OF_EXPERTS) for one in (x, experts, weights.astype(at_least_f32(x.dtype)))]
        run = sharding.shard_map(local, (OF_EXPERTS, OF_EXPERTS, OF_EXPERTS, *parts), (OF_EXPERTS, ()))
        return run(*tokens, *flat)


def _is_fused(config: MoeConfig, own: dict[str, Array | Weight], rows: Float[Array, "T D"]) -> bool:
    """Whether one kernel multiplies these tokens with all their experts, which needs no dispatch: a decode step's."""
    plain = config.capacity is None and config.clamp is None and not (config.bias or config.up_offset)
    if not plain or not all(isinstance(own[name], jax.Array) for name in MATRICES):
        return False
    (tokens, embed), width = rows.shape, own["gate"].shape[2]
    return not refusal(tokens, embed, width, rows.dtype.itemsize) and may_be_default("fused_moe", "pallas_tpu")


def _feed_forward(
    config: MoeConfig,
    own: dict[str, Array | Weight],
    rows: Float[Array, "M D"],
    scales: Float[Array, " M"] | None,
    sizes: Int[Array, " X"],
) -> Float[Array, "M D"]:
    """Expert outputs of rows that are sorted by expert, by grouped matmuls.

    Args:
        scales: factor of each row's output; None for 1. It scales the inner activations (``expert_dispatch``).
        sizes: rows of each expert.
    """
    if config.bias:
        expert = jnp.repeat(jnp.arange(sizes.shape[0]), sizes, total_repeat_length=rows.shape[0])
        is_row = jnp.arange(rows.shape[0]) < jnp.sum(sizes)  # the rows after are undefined
        scales = None if scales is None else jnp.where(is_row, scales, 0)

    def scaled(x: Array) -> Array:
        return x if scales is None else (x * scales[:, None]).astype(x.dtype)

    def project(rows: Array, name: str, scaled: Callable[[Array], Array] = lambda x: x) -> Array:
        with jax.named_scope(name):
            out = matmul_by_expert(rows, own[name], sizes)
            if not config.bias:
                return out
            return out + jnp.where(is_row[:, None], scaled(own[f"{name}_bias"][expert]), 0)  # type: ignore[index]

    gate, up = project(rows, "gate"), project(rows, "up")
    if config.clamp is not None:
        gate, up = jnp.minimum(gate, config.clamp), jnp.clip(up, -config.clamp, config.clamp)
    if config.up_offset:
        up = up + config.up_offset
    return project(scaled(ACTIVATIONS[config.activation](gate) * up), "down", scaled)


class Moe(nnx.Module):
    """Mixture-of-experts layer: ``sum over chosen e of weight[e] * experts[e](x)``, plus the shared expert's output."""

    def __init__(self, config: MoeConfig, embed_dim: int, *, out_scale: float, dtype: jnp.dtype):
        d, e = embed_dim, config.experts
        self.config = config
        self.router = linear("router", (d, e), ("embed", None), dtype, role="router")
        if config.router.bias:
            self.router_bias = constant(0.0, (e,), (None,), dtype, role="bias")
        if config.router.balance_bias:
            # At least float32: bfloat16 would round the small updates away.
            self.balance_bias = constant(0.0, (e,), (None,), at_least_f32(dtype), role="bias")
        self.experts = Experts(config, d, out_scale=out_scale, dtype=dtype)
        if config.shared:
            gated = MlpConfig(config.shared, config.activation)
            self.shared = Mlp(gated, d, out_scale=out_scale, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "B S D"],
        layer: LayerIndex,
        ctx: AttentionContext,
        gate: Float[Array, "B S D"] | None = None,
    ) -> tuple[Float[Array, "B S D"], AttentionContext]:
        """Output of the layer, and the context, which may record the routing of its tokens.

        Args:
            gate: what a router reads that reads the layer before; None: there is no such router.
        """
        out, routing = self.transform(x, gate)
        return out, ctx.record_routing(layer, routing) if isinstance(ctx, RoutingContext) else ctx

    def transform(
        self, x: Float[Array, "B S D"], gate: Float[Array, "B S D"] | None = None
    ) -> tuple[Float[Array, "B S D"], Routing]:
        """Output of the layer, and the routing of its tokens; ``gate``: see ``__call__``."""
        own = sharding.constrain(x, *TOKENS)
        routing = self.routing(own, None if gate is None else sharding.constrain(gate, *TOKENS))
        # Where tensor splits the sequence outside, experts read it from there: sums of its gradient stay split.
        is_gathered = len(sharding.axis_names("residual_seq")) > len(sharding.axis_names("router_seq"))
        out, dropped = self.experts(x if is_gathered else own, routing.experts, routing.weights)
        # Statistics of the routing are sums over the tokens of a batch, which the rest of the model splits.
        logits, shares, chosen, weights = (sharding.constrain(one, "batch", "seq", None) for one in routing[:-1])
        return self.with_shared(x, out), Routing(logits, shares, chosen, weights, dropped)

    def routing(self, x: Float[Array, "B S D"], gate: Float[Array, "B S D"] | None = None) -> Routing:
        """Routing of tokens, before any expert computes; ``gate``: see ``__call__``.

        Raises:
            ValueError: the router reads the layer before, and the caller has nothing of it.
        """
        config, dtype = self.config, at_least_f32(x.dtype)
        if config.router.input == "previous":
            if gate is None:
                raise ValueError(
                    "router: input = 'previous' reads the layer before, which this program does not have: choose 'own'."
                )
            x = gate
        logits = self.router(x.astype(dtype), TOKENS, self.router_bias if config.router.bias else None)
        with jax.named_scope("router"):
            bias = use(self.balance_bias, dtype) if config.router.balance_bias else None
            return route(config.router, config.top_k, logits, bias)

    def with_shared(self, x: Float[Array, "B S D"], out: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """Output of the layer: that of the experts, and the shared expert's."""
        for _ in range(2):  # the second says how the gradient is split: compilers would gather a folded one twice
            out = sharding.constrain(out, "batch", "residual_seq", "act_embed")
        if self.config.shared:
            with jax.named_scope("shared_expert"):
                out = out + self.shared.transform(x)
        return out
