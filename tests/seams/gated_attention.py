"""Gated attention: the result of each head is multiplied by a sigmoid gate of the layer's input (arXiv:2505.06708, G1).

Legend: B batch, S sequence, D embed, N heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.models import AttentionConfig
from jaxllm.models.layers.attention import Attention
from jaxllm.models.layers.layer import MatmulInput
from jaxllm.models.linear import linear


@dataclass(frozen=True)
class GatedAttentionConfig(AttentionConfig):
    """Grouped-query attention with an output gate.

    Attributes:
        gate: one gate per "element" of a head, or one per "head".
    """

    gate: Literal["element", "head"] = "element"

    @property
    def _gates(self) -> int:
        return self.heads * (self.head_dim if self.gate == "element" else 1)

    def build(self, embed_dim: int, **fields: Any) -> nnx.Module:
        """Module of the layer."""
        return GatedAttention(self, embed_dim, **fields)

    def weight_macs(self, embed_dim: int) -> int:
        """Multiply-adds of one token with the weights, the gate's included."""
        return super().weight_macs(embed_dim) + embed_dim * self._gates

    def matmul_inputs(self, embed_dim: int) -> tuple[MatmulInput, ...]:
        """Inputs of the q, k, v and gate projections, and of the output projection."""
        return (embed_dim, 4), *super().matmul_inputs(embed_dim)[1:]


class GatedAttention(Attention):
    """Grouped-query attention layer whose result is gated before the output projection."""

    def __init__(self, config: GatedAttentionConfig, embed_dim: int, *, dtype: jnp.dtype, **fields: Any):
        super().__init__(config, embed_dim, dtype=dtype, **fields)
        each = config.head_dim if config.gate == "element" else 1
        axes = ("embed", "heads", "head_dim" if each > 1 else None)
        self.gate = linear("gate_proj", (embed_dim, config.heads, each), axes, dtype)

    def output(self, x: Float[Array, "B S D"], attended: Float[Array, "B S N H"]) -> Float[Array, "B S D"]:
        """Output of the layer."""
        gates = self.gate(x, ("batch", "seq", "act_heads", None))
        return super().output(x, attended * jax.nn.sigmoid(gates))
