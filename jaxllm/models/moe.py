"""Mixture of experts (arXiv:1701.06538): a router chooses a few feed-forward layers for each token, none is dropped.

Legend: B batch, S sequence, D embed, F width of an expert, E experts, A experts a token is sent to.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

import sharding
from jaxllm.models.dispatch import sum_of_experts
from jaxllm.models.mlp import ACTIVATIONS
from jaxllm.models.params import at_least_f32, normal, use

TOKENS = ("batch", "seq", None)


@dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts, each gated as ``Mlp`` is.

    Attributes:
        experts: how many there are.
        top_k: how many each token is sent to.
        hidden: width of an expert.
        activation: its nonlinearity.
        normalize: the chosen experts' weights are made to sum to one (Mixtral, arXiv:2401.04088), instead of being
            their share of the softmax over all (Switch, arXiv:2101.03961).
    """

    experts: int = 8
    top_k: int = 2
    hidden: int = 768
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    normalize: bool = True

    def __post_init__(self) -> None:
        for name in ("experts", "top_k", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"mixture of experts: {name} = {getattr(self, name)}; give a positive number.")
        if self.top_k > self.experts:
            raise ValueError(
                f"mixture of experts: top_k = {self.top_k} of experts = {self.experts}; choose {self.experts} or fewer."
            )


class Moe(nnx.Module):
    """``sum over chosen e of weight[e] * down[e](activation(x @ gate[e]) * (x @ up[e]))``."""

    def __init__(self, config: MoeConfig, embed_dim: int, *, out_scale: float, dtype: jnp.dtype):
        d, f, e = embed_dim, config.hidden, config.experts
        inwards, outwards = ("experts", "expert_embed", "expert_mlp"), ("experts", "expert_mlp", "expert_embed")
        self.config = config
        self.router = normal((d, e), ("embed", None), dtype, fan_in=d)
        self.gate = normal((e, d, f), inwards, dtype, fan_in=d)
        self.up = normal((e, d, f), inwards, dtype, fan_in=d)
        self.down = normal((e, f, d), outwards, dtype, fan_in=f, scale=out_scale)

    def __call__(
        self, x: Float[Array, "B S D"]
    ) -> tuple[Float[Array, "B S D"], Float[Array, "B S E"], Int[Array, "B S A"]]:
        """The mixture's output, the router's softmax, and the experts that each token was sent to, likeliest first."""
        x = sharding.constrain(x, "batch", "seq", "act_embed")
        shares = self._shares(x)
        weights, experts = jax.lax.top_k(shares, self.config.top_k)
        if self.config.normalize:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        expert_axes, width_axes = sharding.axis_names("experts"), sharding.axis_names("expert_mlp")
        local = functools.partial(
            _flat,
            activation=self.config.activation,
            expert_axis=expert_axes[0] if expert_axes else None,
            sum_over=width_axes,
        )
        inwards, outwards = ("experts", None, "expert_mlp"), ("experts", "expert_mlp", None)
        run = sharding.shard_map(local, (TOKENS, TOKENS, TOKENS, inwards, inwards, outwards), TOKENS)
        gate, up, down = (use(w, x.dtype) for w in (self.gate, self.up, self.down))
        out = run(x, experts, weights.astype(x.dtype), gate, up, down)
        return sharding.constrain(out, "batch", "residual_seq", "act_embed"), shares, experts

    def _shares(self, x: Float[Array, "B S D"]) -> Float[Array, "B S E"]:
        """The router's softmax over all experts, in at least float32."""
        dtype = at_least_f32(x.dtype)
        return jax.nn.softmax(sharding.project(x.astype(dtype), use(self.router, dtype), TOKENS), axis=-1)


def _flat(
    x: Array,
    experts: Array,
    weights: Array,
    gate: Array,
    up: Array,
    down: Array,
    *,
    activation: str,
    expert_axis: str | None,
    sum_over: tuple[str, ...],
) -> Array:
    """``sum_of_experts`` of a shard's tokens as rows."""
    rows, chosen, shares = (a.reshape(-1, a.shape[-1]) for a in (x, experts, weights))
    call = functools.partial(sum_of_experts, activation=ACTIVATIONS[activation], expert_axis=expert_axis)
    out = call(rows, chosen, shares, gate, up, down).reshape(x.shape)
    return jax.lax.psum(out, sum_over) if sum_over else out
