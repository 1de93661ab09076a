"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv:2405.04434): low-rank joint compression of keys and values.

The KV cache holds only a token's latent and one rotated key that all heads share. The result can be computed in two
ways. Expanded, in training and at the first chunk of prefill: the latent is projected up to the keys and values of each
head. Absorbed, where tokens also attend to cached ones: the up-projection is applied to the queries and the output of
attention instead, which is multi-query attention over the latents.

Legend: B batch, S sequence, D embed, N heads, C latent dim of keys and values, Q latent dim of queries, H head dims
without rotary embedding, R head dims with it, V head dim of values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

import sharding
from jaxllm.models.attention_context import (
    AttentionContext,
    AttentionParams,
    KVCacheContext,
    KVSpec,
    LatentSlicesContext,
    LayerIndex,
)
from jaxllm.models.layers.layer import AttentionLayer, MatmulInput, MatmulValue
from jaxllm.models.layers.norm import Norm, NormKind
from jaxllm.models.layers.rope import RopeConfig, rotate, rotation, turn
from jaxllm.models.linear import Weight, linear, multiply_heads, project
from jaxllm.models.params import constant, use

HEADS = ("batch", "seq", "act_heads", None)
LATENT = ("batch", "seq", None)


@dataclass(frozen=True)
class MLAConfig(AttentionLayer):
    """Multi-head latent attention.

    Attributes:
        heads: query heads.
        latent: C, dim of the latent of keys and values (``kv_lora_rank``).
        q_latent: Q, dim of the latent of queries (``q_lora_rank``); None: queries are projected from the residual
            stream.
        nope_dim: H, dims of a head without rotary embedding.
        rope_dim: R, dims of a head with rotary embedding.
        value_dim: V, dim of a head's values.
        rope: rotary position embedding of the R dims.
        bias: whether the projections from and to the residual stream have biases.
        scale: factor on the scores; None for ``1 / sqrt(H + R)``.
        norm_eps: epsilon of the norms of the latents.
        slices: equal slices of a latent that a KV cache has apart, one on each tensor shard; generated tokens attend to
            each by itself (TPLA, ``jaxllm.infer.runner.latent_slices``). 1: latents are whole.
    """

    heads: int = 4
    latent: int = 64
    q_latent: int | None = None
    nope_dim: int = 32
    rope_dim: int = 16
    value_dim: int = 32
    rope: RopeConfig = field(default_factory=lambda: RopeConfig(interleaved=True))
    bias: bool = False
    scale: float | None = None
    norm_eps: float = 1e-6
    slices: int = 1

    def __post_init__(self) -> None:
        for name in ("heads", "latent", "q_latent", "nope_dim", "rope_dim", "value_dim", "scale", "slices"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"latent attention: {name} = {value}; give a positive number.")
        if self.norm_eps < 0:
            raise ValueError(f"latent attention: norm_eps = {self.norm_eps}; give 0 or a small positive number.")
        if self.latent % self.slices:
            raise ValueError(f"latent attention: slices = {self.slices} do not divide latent = {self.latent}.")
        self.rope.dims(self.rope_dim)

    @property
    def window(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Sliding window: none, every token sees all before it."""
        return None

    @property
    def kv_heads(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Heads of keys and values in the expanded form."""
        return self.heads

    @property
    def key_dim(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Elements of a query and of a key per head in the expanded form."""
        return self.nope_dim + self.rope_dim

    def build(
        self, embed_dim: int, *, norm: NormKind, norm_eps: float, out_scale: float, dtype: jnp.dtype
    ) -> nnx.Module:
        """Module of the layer."""
        return MultiHeadLatentAttention(self, embed_dim, norm=norm, norm_eps=norm_eps, out_scale=out_scale, dtype=dtype)

    @property
    def attention_params(self) -> AttentionParams:
        """Static parameters that the attention context needs (expanded form)."""
        return AttentionParams(1 / math.sqrt(self.nope_dim + self.rope_dim) if self.scale is None else self.scale)

    @property
    def kv_spec(self) -> KVSpec:
        """Shape of a token's KV cache entry: the latent and the shared rotated key."""
        return KVSpec(1, self.latent + self.rope_dim, self.latent, latent=True, slices=self.slices)

    def turned(self, keys: Float[Array, "*any H"], by: Int[Array, ""]) -> Float[Array, "*any H"]:
        """Latents with shared keys of a cache at positions that are ``by`` later: the shared key is turned."""
        shared = turn(self.rope, keys[..., self.latent :], by)
        return jnp.concatenate([keys[..., : self.latent], shared], axis=-1)

    def weight_macs(self, embed_dim: int) -> int:
        """Multiply-adds of one token with the weights of all projections, in the expanded form."""
        q, kv = self.heads * (self.nope_dim + self.rope_dim), self.heads * (self.nope_dim + self.value_dim)
        queries = embed_dim * q if self.q_latent is None else self.q_latent * (embed_dim + q)
        return (
            queries
            + embed_dim * (self.latent + self.rope_dim)
            + self.latent * kv
            + self.heads * self.value_dim * embed_dim
        )

    def matmul_inputs(self, embed_dim: int) -> tuple[MatmulInput, ...]:
        """Inputs of the projections, in the expanded form."""
        queries = () if self.q_latent is None else ((self.q_latent, 1),)
        return (embed_dim, 2), *queries, (self.latent, 1), (self.heads * self.value_dim, 1)

    def matmul_values(self, embed_dim: int) -> tuple[MatmulValue, ...]:
        """Latents before their norms, what they are projected to, in the expanded form, and attention."""
        keys, both = self.heads * self.key_dim, self.heads * (self.nope_dim + self.value_dim)
        latent = self.latent + self.rope_dim
        queries = (
            [MatmulValue("q", keys, embed_dim * keys, ())]
            if self.q_latent is None
            else [
                MatmulValue("q_latent", self.q_latent, embed_dim * self.q_latent, ()),
                MatmulValue("q", keys, self.q_latent * keys, ("q_latent",)),
            ]
        )
        return (
            *queries,
            MatmulValue("kv_latent", latent, embed_dim * latent, ()),
            MatmulValue("kv_up", both, self.latent * both, ("kv_latent",), read=False),
            MatmulValue("k", keys, 0, ("kv_up", "kv_latent")),
            MatmulValue("v", self.heads * self.value_dim, 0, ("kv_up",)),
            MatmulValue(
                "attention", self.heads * (self.value_dim + 1), 0, ("q", "k", "v"), pair_macs=self.attention_macs
            ),
        )

    def without_traffic_formula(self, tensor: int, kv_shards: int) -> list[str]:
        """Features whose collectives have no formula."""
        return ["latent attention"]

    def describe(self) -> str:
        """One line for people."""
        queries = "" if self.q_latent is None else f", queries of {self.q_latent}"
        heads = f"{self.heads} heads of {self.nope_dim} + {self.rope_dim} rotated, values of {self.value_dim}"
        slices = "" if self.slices == 1 else f" in {self.slices} slices"
        return f"{heads}; keys and values of a latent of {self.latent}{slices}{queries}"

    def prefers_expanded(self, tokens: int) -> bool:
        """Whether T tokens that attend to each other take fewer multiply-adds expanded than absorbed.

        Both forms have one projection between latents and heads of T x C x N x (H + V) multiply-adds: of the latents
        (expanded), or of queries and attention outputs (absorbed). For a pair of tokens, the score and value of a head
        take H + R + V multiply-adds expanded and (C + R) + C absorbed. A single token is always absorbed: it is a
        decode step.
        """
        projected = tokens * self.latent * self.heads * (self.nope_dim + self.value_dim)
        expanded = projected + tokens**2 * self.attention_macs
        absorbed = projected + tokens**2 * self.heads * (2 * self.latent + self.rope_dim)
        return tokens > 1 and expanded < absorbed


class MultiHeadLatentAttention(nnx.Module):
    """Multi-head latent attention layer."""

    def __init__(
        self,
        config: MLAConfig,
        embed_dim: int,
        *,
        norm: NormKind,
        norm_eps: float,
        out_scale: float,
        dtype: jnp.dtype,
    ):
        d, n, c, q = embed_dim, config.heads, config.latent, config.q_latent
        keys = config.nope_dim + config.rope_dim
        self.config = config
        if q is None:
            self.q = linear("q_proj", (d, n, keys), ("embed", "heads", "head_dim"), dtype)
        else:
            self.q_down = linear("q_down_proj", (d, q), ("embed", None), dtype)
            self.q_norm = Norm(norm, (q,), config.norm_eps, dtype, ("latent",))
            self.q_up = linear("q_up_proj", (q, n, keys), ("latent", "heads", "head_dim"), dtype)
        self.kv_down = linear("kv_down_proj", (d, c + config.rope_dim), ("embed", None), dtype)
        self.kv_norm = Norm(norm, (c,), config.norm_eps, dtype, ("latent",))
        both = config.nope_dim + config.value_dim
        self.kv_up = linear("kv_up_proj", (c, n, both), ("latent", "heads", "head_dim"), dtype)
        out = ("heads", "head_dim", "embed")
        self.o = linear("o_proj", (n, config.value_dim, d), out, dtype, contract=2, scale=out_scale)
        if config.slices > 1:
            self.slice_factors = constant(1.0, (config.slices,), (None,), dtype, role="gain")
        if config.bias:
            if q is not None:
                self.q_bias = constant(0.0, (q,), (None,), dtype, role="bias")
            self.kv_bias = constant(0.0, (c + config.rope_dim,), (None,), dtype, role="bias")
            self.o_bias = constant(0.0, (d,), ("embed",), dtype, role="bias")

    def __call__(
        self, x: Float[Array, "B S D"], positions: Int[Array, "B S"], layer: LayerIndex, ctx: AttentionContext
    ) -> tuple[Float[Array, "B S D"], AttentionContext]:
        """Output of the layer and the updated attention context."""
        config = self.config
        x = sharding.constrain(x, "batch", "seq", "act_embed")
        queries = self._queries(x)
        latent, key = self._latent(x)
        with jax.named_scope("rope"):
            cos, sin = rotation(config.rope, positions, config.rope_dim, x.dtype)
            plain, turned = queries[..., : config.nope_dim], queries[..., config.nope_dim :]
            turned, key = (rotate(y, cos, sin, interleaved=config.rope.interleaved) for y in (turned, key))
        up = self.kv_up.gathered(x.dtype)
        out, ctx = self._attend(plain, turned, latent, key, up, positions, layer, ctx)
        return self.o(out, ("batch", "residual_seq", "act_embed"), self.o_bias if config.bias else None), ctx

    def _queries(self, x: Float[Array, "B S D"]) -> Float[Array, "B S N HR"]:
        """Queries of all heads, not rotated yet."""
        if self.config.q_latent is None:
            return self.q(x, HEADS)
        down = checkpoint_name(self.q_down(x, LATENT, self.q_bias if self.config.bias else None), "q_latent")
        return self.q_up(self.q_norm(down), HEADS)

    def _latent(self, x: Float[Array, "B S D"]) -> tuple[Float[Array, "B S C"], Float[Array, "B S 1 R"]]:
        """Latent of keys and values, and the key that all heads share, not rotated yet."""
        down = checkpoint_name(self.kv_down(x, LATENT, self.kv_bias if self.config.bias else None), "kv_latent")
        return self.kv_norm(down[..., : self.config.latent]), down[..., None, self.config.latent :]

    def _attend(
        self,
        plain: Float[Array, "B S N H"],
        turned: Float[Array, "B S N R"],
        latent: Float[Array, "B S C"],
        key: Float[Array, "B S 1 R"],
        up: Array | Weight,
        positions: Int[Array, "B S"],
        layer: LayerIndex,
        ctx: AttentionContext,
    ) -> tuple[Float[Array, "B S N V"], AttentionContext]:
        """Attention output, in the expanded or the absorbed form."""

        def expanded(ctx: AttentionContext) -> tuple[Array, AttentionContext]:
            return self._expanded(plain, turned, latent, key, up, positions, layer, ctx)

        def absorbed(ctx: AttentionContext) -> tuple[Array, AttentionContext]:
            return self._absorbed(plain, turned, latent, key, up, positions, layer, ctx)

        def first(ctx: Any) -> tuple[Array, AttentionContext]:
            out, _ = expanded(ctx.self_segments(positions.shape[1]))
            return out, ctx.write_latents(layer, jnp.concatenate([latent[:, :, None], key], axis=-1), positions)

        if not getattr(ctx, "is_kv_cache", False):
            return expanded(ctx)
        if not (isinstance(ctx, KVCacheContext) and self.config.prefers_expanded(positions.shape[1])):
            return absorbed(ctx)
        begins = ctx.is_fresh_prefill(positions)
        return absorbed(ctx) if begins is None else jax.lax.cond(begins, first, absorbed, ctx)

    def _expanded(
        self,
        plain: Float[Array, "B S N H"],
        turned: Float[Array, "B S N R"],
        latent: Float[Array, "B S C"],
        key: Float[Array, "B S 1 R"],
        up: Array | Weight,
        positions: Int[Array, "B S"],
        layer: LayerIndex,
        ctx: AttentionContext,
    ) -> tuple[Float[Array, "B S N V"], AttentionContext]:
        """Multi-head attention over keys and values that are projected up from the latent."""
        with jax.named_scope("kv_up_proj"):
            both = checkpoint_name(project(latent, up, HEADS), "kv_up")
        keys, values = both[..., : self.config.nope_dim], both[..., self.config.nope_dim :]
        shared = sharding.constrain(jnp.broadcast_to(key, (*keys.shape[:3], key.shape[-1])), *HEADS)
        q, k = jnp.concatenate([plain, turned], axis=-1), jnp.concatenate([keys, shared], axis=-1)
        with jax.named_scope("kernel"):
            out, ctx = ctx.attend(layer, q, k, values, positions, self.config.attention_params)
        return sharding.constrain(out, *HEADS), ctx

    def _absorbed(
        self,
        plain: Float[Array, "B S N H"],
        turned: Float[Array, "B S N R"],
        latent: Float[Array, "B S C"],
        key: Float[Array, "B S 1 R"],
        up: Array | Weight,
        positions: Int[Array, "B S"],
        layer: LayerIndex,
        ctx: AttentionContext,
    ) -> tuple[Float[Array, "B S N V"], AttentionContext]:
        """Multi-query attention over the latents; the up-projection is absorbed into the queries and the output."""
        config = self.config
        to_keys, to_values = slice(None, config.nope_dim), slice(config.nope_dim, None)
        with jax.named_scope("absorb_k_up_proj"):
            q = jnp.concatenate([multiply_heads(plain, up, to_keys, HEADS, transposed=True), turned], axis=-1)
        k = jnp.concatenate([latent[:, :, None], key], axis=-1)
        params = AttentionParams(config.attention_params.scale, latent=config.latent)
        with jax.named_scope("kernel"):
            if config.slices > 1 and isinstance(ctx, LatentSlicesContext):
                out, ctx = ctx.attend_slices(layer, q, k, use(self.slice_factors, q.dtype), params)
            else:
                out, ctx = ctx.attend(layer, q, k, None, positions, params)
        out = sharding.constrain(out, *HEADS)
        with jax.named_scope("absorb_v_up_proj"):
            return multiply_heads(out, up, to_values, HEADS), ctx
