"""Layers of a block: what the configuration of an attention or a feed-forward layer says about itself.

A layer is one file, with a frozen dataclass that builds an ``nnx.Module`` and says what the layer costs, and one row in
``jaxllm.models.layers.layer_table``. The planner, the formulas of FLOPs and collectives, the engine and inspection ask
the configuration; none of them asks which layer it is.

Legend: B batch, S sequence, D embed.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.models.attention_context import AttentionParams, KVSpec
from jaxllm.models.layers.norm import NormKind

MatmulInput = tuple[int, int]
"""(width of an input, number of matmuls with weights that share it)."""


class MatmulValue(NamedTuple):
    """Value of a block that matmuls compute, for one token: what it costs to keep and to recompute.

    Attributes:
        name: one of ``jaxllm.models.remat.VALUES`` if it can be kept; another name if all recomputation repeats it.
        width: numbers that it takes.
        macs: multiply-adds with weights that compute it from ``inputs``; 0 where elementwise operations do.
        inputs: names of the values that it is computed from; the block's input and parameters are always there.
        read: whether the backward pass reads the value, and not only what is computed from it.
        pair_macs: multiply-adds for each attended token.
    """

    name: str
    width: int
    macs: int
    inputs: tuple[str, ...]
    read: bool = True
    pair_macs: int = 0


class AttentionLayer:
    """Configuration of an attention layer.

    Its module is called with ``(x[B S D], positions[B S], layer, ctx)`` and returns ``(out[B S D], ctx)``, see
    ``jaxllm.models.attention_context.AttentionContext``.

    Attributes:
        heads: query heads.
        kv_heads: heads of keys and values in training.
        key_dim: elements of a query and of a key per head in training.
        value_dim: elements of a value per head.
        window: sliding window; None for full causal attention.
        has_keys: whether it has keys and values, which a KV cache keeps; if not, ``kv_spec`` raises a ``ConfigError``.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    has_keys: ClassVar[bool] = True

    @property
    def attention_params(self) -> AttentionParams:
        """Static parameters that the attention context needs: scale, sliding window, soft cap."""
        raise NotImplementedError

    @property
    def kv_spec(self) -> KVSpec:
        """Shape of a token's KV cache entry."""
        return KVSpec(self.kv_heads, self.key_dim, self.value_dim)

    @property
    def attention_macs(self) -> int:
        """Multiply-adds per pair of query and attended token, of all heads, for scores and values, in training."""
        return self.heads * (self.key_dim + self.value_dim)

    def with_prefix(self, tokens: int) -> AttentionLayer:
        """The layer with learned keys and values at the first positions of a sequence.

        Raises:
            ValueError: it has no keys and values of its own.
        """
        raise ValueError(f"{type(self).__name__} has no keys and values of its own, which a prefix would be")

    def clustered(self, size: int) -> AttentionLayer:
        """The layer whose kv heads share queries and keys in clusters of so many (CHAI).

        Raises:
            ValueError: its heads cannot share them.
        """
        raise ValueError(f"{type(self).__name__} has no keys of its own heads")

    def turned(self, keys: Float[Array, "*any H"], by: Int[Array, "*by"]) -> Float[Array, "*any H"]:
        """Keys of a KV cache of the layer as they are at positions that are ``by`` later, all or each of them.

        Raises:
            ValueError: that does not follow from the keys.
        """
        raise ValueError(f"{type(self).__name__} has keys that are not turned by a number of positions")

    def build(
        self, embed_dim: int, *, norm: NormKind, norm_eps: float, out_scale: float, dtype: jnp.dtype
    ) -> nnx.Module:
        """Module of the layer; ``out_scale`` is a factor on the initial output projection."""
        raise NotImplementedError

    def weight_macs(self, embed_dim: int) -> int:
        """Multiply-adds of one token with the layer's weights in training."""
        raise NotImplementedError

    def matmul_inputs(self, embed_dim: int) -> tuple[MatmulInput, ...]:
        """Inputs of the matmuls with weights."""
        raise NotImplementedError

    def matmul_values(self, embed_dim: int) -> tuple[MatmulValue, ...]:
        """Values that matmuls compute in training, in order; the last is "attention", its result."""
        raise NotImplementedError

    def without_traffic_formula(self, tensor: int, kv_shards: int) -> list[str]:
        """Features whose collectives have no formula, over so many shards of tensors and of kv heads."""
        return [type(self).__name__]

    def describe(self) -> str:
        """One line for people: sizes, and the settings that are not defaults."""
        sizes = f"{self.heads} heads, {self.kv_heads} of keys and values, of {self.key_dim}"
        return "; ".join(part for part in (sizes, unusual(self)) if part)


class FeedForwardLayer:
    """Configuration of a feed-forward layer.

    Its module is called with ``(x[B S D], layer, ctx)`` and returns ``(out[B S D], ctx)``.

    Attributes:
        hidden: inner width, that of one expert in a mixture.
        bias: whether projections have biases.
        scope: name in profiles.
    """

    hidden: int
    bias: bool
    scope: ClassVar[str] = "mlp"

    @property
    def shared_fields(self) -> dict[str, Any]:
        """Fields of a layer like this one in a layer whose experts share it.

        Raises:
            ValueError: experts cannot share it.
        """
        raise ValueError(f"experts share a dense feed-forward layer, not {type(self).__name__}")

    @property
    def routed_experts(self) -> int:
        """Number of experts that a router of the layer chooses from; 0 without one."""
        return 0 if self.mixture is None else self.mixture.experts

    @property
    def mixture(self) -> Any:
        """This layer as a ``jaxllm.models.MoeConfig``; None for a dense layer."""
        return None

    def build(self, embed_dim: int, *, out_scale: float, dtype: jnp.dtype) -> nnx.Module:
        """Module of the layer; ``out_scale`` is a factor on the initial output projection."""
        raise NotImplementedError

    def weight_macs(self, embed_dim: int) -> int:
        """Multiply-adds of one token with the layer's weights."""
        raise NotImplementedError

    def last_macs(self, embed_dim: int) -> int:
        """Multiply-adds of one token in the last matmuls, which full recomputation leaves out; 0 if it repeats all."""
        return 0

    def unnamed_macs(self, embed_dim: int) -> int:
        """Multiply-adds of one token whose results have no ``checkpoint_name``: all recomputation repeats them."""
        return 0

    def matmul_inputs(self, embed_dim: int) -> tuple[MatmulInput, ...]:
        """Inputs of the matmuls with weights, except for those of routed experts."""
        raise NotImplementedError

    def matmul_values(self, embed_dim: int) -> tuple[MatmulValue, ...]:
        """Values that matmuls compute in training, in order: results of gate and up, and what has no name."""
        widths = {name: width for name in ("gate", "up") if (width := self.inner_widths(embed_dim).get(name, 0))}
        unnamed = self.unnamed_macs(embed_dim)
        macs = self.weight_macs(embed_dim) - self.last_macs(embed_dim) - unnamed
        values = [
            MatmulValue(name, width, macs * width // sum(widths.values()), ("residual",))
            for name, width in widths.items()
        ]
        return (*values, *([MatmulValue("experts", 0, unnamed, ("residual",))] if unnamed else []))

    def inner_widths(self, embed_dim: int) -> dict[str, int]:
        """Widths of the inner activations of a token: "gate" and "up" of a dense layer, "expert" rows of a mixture."""
        raise NotImplementedError

    def without_traffic_formula(self, tensor: int) -> list[str]:
        """Features whose collectives have no formula, over so many shards of tensors."""
        return [type(self).__name__]

    def describe(self) -> str:
        """One line for people: sizes, and the settings that are not defaults."""
        return "; ".join(part for part in (str(self.hidden), unusual(self, "hidden")) if part)


def unusual(config: Any, *without: str) -> str:
    """Fields of a configuration that differ from their defaults, as text; those in ``without`` are left out."""
    fields = {f.name: f for f in dataclasses.fields(config) if f.name not in without}
    usual = type(config)()
    return ", ".join(
        f"{name} = {getattr(config, name)}" for name in fields if getattr(config, name) != getattr(usual, name)
    )
