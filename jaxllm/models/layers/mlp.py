"""Feed-forward layer (MLP): gated (SwiGLU, GeGLU, arXiv:2002.05202) or plain.

Legend: B batch, S sequence, D embed, F mlp.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.models.attention_context import AttentionContext, LayerIndex
from jaxllm.models.layers.layer import FeedForwardLayer, MatmulInput
from jaxllm.models.linear import linear, project_many
from jaxllm.models.params import constant, use
from jaxllm.models.remat_names import name_for_remat
from jaxllm.models.tpu_layout import materialized

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}

INNER = ("batch", "seq", "act_mlp")


@dataclass(frozen=True)
class MlpConfig(FeedForwardLayer):
    """Feed-forward layer (MLP).

    Attributes:
        hidden: width of the hidden layer.
        activation: activation function; "gelu_tanh" and "quick_gelu" are the approximations of GELU by tanh and by a
            sigmoid (arXiv:1606.08415).
        gated: whether the activated gate projection multiplies an up projection.
        bias: whether every projection has a bias.
    """

    hidden: int = 768
    activation: Literal["silu", "relu", "gelu", "gelu_tanh", "quick_gelu"] = "silu"
    gated: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        if self.hidden < 1:
            raise ValueError(f"mlp: hidden = {self.hidden}; give a positive number.")

    @property
    def shared_fields(self) -> dict[str, Any]:
        """Its own fields."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def build(self, embed_dim: int, *, out_scale: float, dtype: jnp.dtype) -> nnx.Module:
        """Module of the layer."""
        return Mlp(self, embed_dim, out_scale=out_scale, dtype=dtype)

    def weight_macs(self, embed_dim: int) -> int:
        """Multiply-adds of one token with the layer's weights."""
        return (3 if self.gated else 2) * embed_dim * self.hidden

    def last_macs(self, embed_dim: int) -> int:
        """Multiply-adds of one token in the down projection."""
        return embed_dim * self.hidden

    def matmul_inputs(self, embed_dim: int) -> tuple[MatmulInput, ...]:
        """Inputs of the gate and up, and of the down projection."""
        return (embed_dim, 2 if self.gated else 1), (self.hidden, 1)

    def inner_widths(self, embed_dim: int) -> dict[str, int]:
        """Widths of the results of the gate and up projections."""
        return {"up": self.hidden, "gate": self.hidden if self.gated else 0}

    def without_traffic_formula(self, tensor: int) -> list[str]:
        """Features whose collectives have no formula."""
        return ["biases of split layers"] if tensor > 1 and self.bias else []


class Mlp(nnx.Module):
    """Feed-forward layer: ``down(activation(x @ gate) * (x @ up))``, or ``down(activation(x @ up))`` without a gate."""

    def __init__(self, config: MlpConfig, embed_dim: int, *, out_scale: float, dtype: jnp.dtype):
        d, f = embed_dim, config.hidden
        self.config = config
        if config.gated:
            self.gate = linear("gate", (d, f), ("embed", "mlp"), dtype)
        self.up = linear("up", (d, f), ("embed", "mlp"), dtype)
        self.down = linear("down", (f, d), ("mlp", "embed"), dtype, scale=out_scale)
        if config.bias:
            self.up_bias = constant(0.0, (f,), ("mlp",), dtype, role="bias")
            self.down_bias = constant(0.0, (d,), ("embed",), dtype, role="bias")
            if config.gated:
                self.gate_bias = constant(0.0, (f,), ("mlp",), dtype, role="bias")

    def __call__(
        self, x: Float[Array, "B S D"], layer: LayerIndex, ctx: AttentionContext
    ) -> tuple[Float[Array, "B S D"], AttentionContext]:
        """Output of the layer, and the context unchanged."""
        return self.transform(x), ctx

    def transform(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """Output of the layer."""
        names = ("gate", "up") if self.config.gated else ("up",)
        inner = project_many(x, [getattr(self, name) for name in names], [INNER] * len(names), over="act_mlp")
        first, *second = materialized(*(self._named(h, name) for h, name in zip(inner, names, strict=True)))
        h = ACTIVATIONS[self.config.activation](first)
        h = h * second[0] if second else h
        (h,) = materialized(h)
        return self.down(h, ("batch", "residual_seq", "act_embed"), self.down_bias if self.config.bias else None)

    def _named(self, inner: Float[Array, "B S F"], name: str) -> Float[Array, "B S F"]:
        if self.config.bias:
            inner = inner + use(getattr(self, f"{name}_bias"), inner.dtype)
        return name_for_remat(inner, name)
