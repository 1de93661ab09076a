"""Grouped-query self-attention (arXiv:2305.13245): rotary positions, windows, soft-caps, qk-norm and biases as values.

What is attended *to* is the context's business (``jaxllm.models.context``): packed documents in training, a cache
when generating. The layer hands it this step's q, k, v.

Legend: B batch, S sequence, D embed, N query heads, K kv heads, H head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

import sharding
from jaxllm.models.context import AttentionContext, Cached, LayerIndex, Scoring
from jaxllm.models.norm import Norm, NormKind
from jaxllm.models.params import constant, normal, use
from jaxllm.models.rope import RopeConfig, rotate, rotation


@dataclass(frozen=True)
class AttentionConfig:
    """Self-attention.

    Attributes:
        heads: query heads.
        kv_heads: key-value heads; divides ``heads``.
        head_dim: size of a head.
        rope: rotary embedding; None for none (positions are learned, or there are none).
        qk_norm: normalisation of queries and keys before rotation (arXiv:2302.05442): each head by itself (Qwen3,
            Gemma 3), or all heads of a token together (OLMo 2).
        bias: biases on the q, k, v projections (Qwen2), or on these and the output's (GPT-2).
        window: how many positions a token sees, its own included (arXiv:2004.05150); None for all before it.
        softcap: scores are bounded by it: ``softcap * tanh(scores / softcap)`` (Gemma 2).
        scale: of the scores; None for ``1 / sqrt(head_dim)``.
        sinks: each head has a score that it always sees and that has no value (gpt-oss; arXiv:2309.17453).
        clip: queries, keys and values are bounded by it from both sides, before rotation (OLMoE; arXiv:2409.02060).
    """

    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 64
    rope: RopeConfig | None = field(default_factory=RopeConfig)
    qk_norm: Literal["none", "head", "all"] = "none"
    bias: Literal["none", "qkv", "all"] = "none"
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False
    clip: float | None = None

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"attention: {name} = {getattr(self, name)}; give a positive number.")
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            legal = [k for k in range(1, min(self.heads, 256) + 1) if self.heads % k == 0]
            raise ValueError(
                f"attention: kv_heads = {self.kv_heads} does not divide heads = {self.heads}; legal kv_heads: {legal}."
            )
        for name in ("window", "softcap", "scale", "clip"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"attention: {name} = {value}; give a positive number, or None.")
        if self.rope is not None:
            self.rope.dims(self.head_dim)

    @property
    def scoring(self) -> Scoring:
        """How a context scores this layer's keys."""
        scale = 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale
        return Scoring(scale, self.window, self.softcap)

    @property
    def cached(self) -> Cached:
        """What a cache holds of a token."""
        return Cached(self.kv_heads, self.head_dim, self.head_dim)

    def projections(self, embed_dim: int) -> int:
        """Numbers of the projections' weights."""
        return 2 * embed_dim * self.head_dim * (self.heads + self.kv_heads)

    @property
    def attended_dim(self) -> int:
        """Products of a query with each token that it attends to: of all its heads, for score and value."""
        return 2 * self.heads * self.head_dim


class Attention(nnx.Module):
    """One self-attention layer; shapes in ``AttentionConfig``'s terms."""

    def __init__(
        self,
        config: AttentionConfig,
        embed_dim: int,
        *,
        norm: NormKind,
        norm_eps: float,
        out_scale: float,
        dtype: jnp.dtype,
    ):
        d, n, k, h = embed_dim, config.heads, config.kv_heads, config.head_dim
        self.config = config
        self.q = normal((d, n, h), ("embed", "heads", "head_dim"), dtype, fan_in=d)
        self.k = normal((d, k, h), ("embed", "kv_heads", "head_dim"), dtype, fan_in=d)
        self.v = normal((d, k, h), ("embed", "kv_heads", "head_dim"), dtype, fan_in=d)
        self.o = normal((n, h, d), ("heads", "head_dim", "embed"), dtype, fan_in=n * h, scale=out_scale)
        if config.qk_norm == "head":
            self.q_norm = Norm(norm, (h,), norm_eps, dtype, ("head_dim",))
            self.k_norm = Norm(norm, (h,), norm_eps, dtype, ("head_dim",))
        elif config.qk_norm == "all":
            self.q_norm = Norm(norm, (n, h), norm_eps, dtype, ("heads", "head_dim"))
            self.k_norm = Norm(norm, (k, h), norm_eps, dtype, ("kv_heads", "head_dim"))
        if config.bias != "none":
            self.q_bias = constant(0.0, (n, h), ("heads", "head_dim"), dtype)
            self.k_bias = constant(0.0, (k, h), ("kv_heads", "head_dim"), dtype)
            self.v_bias = constant(0.0, (k, h), ("kv_heads", "head_dim"), dtype)
        if config.bias == "all":
            self.o_bias = constant(0.0, (d,), ("embed",), dtype)
        if config.sinks:
            self.sinks = constant(0.0, (n,), ("heads",), dtype)

    def __call__(
        self, x: Float[Array, "B S D"], positions: Int[Array, "B S"], layer: LayerIndex, ctx: AttentionContext
    ) -> tuple[Float[Array, "B S D"], AttentionContext]:
        config = self.config
        q, k, v = self._projections(x)
        if config.bias != "none":
            q, k, v = q + use(self.q_bias, x.dtype), k + use(self.k_bias, x.dtype), v + use(self.v_bias, x.dtype)
        if config.qk_norm != "none":
            q, k = self.q_norm(q), self.k_norm(k)
        if config.clip is not None:
            q, k, v = (jnp.clip(y, -config.clip, config.clip) for y in (q, k, v))
        if config.rope is not None:
            cos, sin = rotation(config.rope, positions, config.head_dim, x.dtype)
            q, k = (rotate(x, cos, sin, interleaved=config.rope.interleaved) for x in (q, k))
        sinks = use(self.sinks, x.dtype) if config.sinks else None
        out, ctx = ctx.attend(layer, q, k, v, positions, config.scoring, sinks)
        out = sharding.constrain(out, "batch", "seq", "act_heads", None)
        out = sharding.project(out, use(self.o, x.dtype), ("batch", "residual_seq", "act_embed"), contract=2)
        return (out + use(self.o_bias, x.dtype) if config.bias == "all" else out), ctx

    def _projections(self, x: Float[Array, "B S D"]) -> list[Float[Array, "B S _ H"]]:
        """Queries, keys and values, all of the sequence of each; heads split over devices."""
        q, k, v = (use(weight, x.dtype) for weight in (self.q, self.k, self.v))
        heads, kv_heads = ("batch", "seq", "act_heads", None), ("batch", "seq", "act_kv_heads", None)
        # Few kv heads stay whole on every tensor shard, in the weight as in what it makes.
        if sharding.spec(*kv_heads, shape=(*x.shape[:2], *k.shape[1:]), what="act_kv_heads")[2] is None:
            kv_heads = ("batch", "seq", None, None)
            whole = sharding.constrain(x, "batch", "seq", "act_embed")
            few = [sharding.project(whole, w, kv_heads) for w in (k, v)]
            return [*sharding.products(x, [q], [heads], over="act_heads"), *few]
        return sharding.products(x, [q, k, v], [heads, kv_heads, kv_heads], over="act_heads")
