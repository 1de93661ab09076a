"""Grouped-query attention (GQA, arXiv:2305.13245) with rotary position embedding, sliding window, soft cap and qk-norm.

Multi-head and multi-query attention are its special cases. The layer projects q, k, v and passes them to the attention
context (``jaxllm.models.attention_context``), which has the keys: packed documents in training, a KV cache in serving.

Legend: B batch, S sequence, D embed, N query heads, K kv heads, H head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

import sharding
from jaxllm.models.attention_context import AttentionContext, AttentionParams, LayerIndex
from jaxllm.models.layers.layer import AttentionLayer, MatmulInput, MatmulValue, unusual
from jaxllm.models.layers.norm import Norm, NormKind
from jaxllm.models.layers.rope import RopeConfig, rotate, rotation, turn
from jaxllm.models.linear import linear, project_many
from jaxllm.models.params import constant, declare, use
from jaxllm.models.tpu_layout import heads_first

PREFIX_VALUE_STD = 0.02
"""Standard deviation of a prefix's values before training: small beside those of a model, which it hardly disturbs."""


@dataclass(frozen=True)
class AttentionConfig(AttentionLayer):
    """Grouped-query attention.

    Attributes:
        heads: query heads.
        kv_heads: key-value heads; divides ``heads``.
        head_dim: elements of a head.
        rope: rotary position embedding; None for none (positions are learned, or there are none).
        qk_norm: norm of queries and keys before rotation (arXiv:2302.05442): of each head by itself (Qwen3, Gemma 3),
            or of all heads of a token together (OLMo 2).
        bias: biases on the q, k, v projections (Qwen2), or on these and the output projection (GPT-2).
        window: sliding window, the number of positions that a token sees, its own included (arXiv:2004.05150); None for
            full causal attention.
        softcap: soft cap of the scores, ``softcap * tanh(scores / softcap)`` (Gemma 2).
        scale: factor on the scores; None for ``1 / sqrt(head_dim)``.
        sinks: whether each head has an attention sink, a learned score in its softmax that has no value (gpt-oss;
            arXiv:2309.17453).
        clip: queries, keys and values are clipped to ``[-clip, clip]`` before rotation (OLMoE; arXiv:2409.02060).
        prefix_tokens: number of virtual tokens at the first positions of a sequence, whose keys and values are
            parameters (prefix tuning, arXiv:2101.00190).
        cluster_size: kv heads whose attention is alike, and that share queries and a key: a value has so many times
            ``head_dim`` elements, those of all heads of the cluster (CHAI, arXiv:2403.08058); ``heads`` and
            ``kv_heads`` count clusters.
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
    prefix_tokens: int = 0
    cluster_size: int = 1

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim", "cluster_size"):
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
    def attention_params(self) -> AttentionParams:
        """Static parameters that the attention context needs: scale, sliding window, soft cap."""
        scale = 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale
        return AttentionParams(scale, self.window, self.softcap)

    @property
    def key_dim(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Elements of a query and of a key per head."""
        return self.head_dim

    @property
    def value_dim(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Elements of a value per head."""
        return self.head_dim * self.cluster_size

    def with_prefix(self, tokens: int) -> AttentionConfig:
        """The layer with ``prefix_tokens``."""
        return replace(self, prefix_tokens=tokens)

    def clustered(self, size: int) -> AttentionConfig:
        """The layer with clusters of ``size`` kv heads, whose query heads go with them."""
        legal = [n for n in range(2, self.kv_heads + 1) if self.kv_heads % n == 0]
        if self.cluster_size > 1:
            raise ValueError(f"the heads are in clusters of {self.cluster_size} already")
        if size not in legal:
            raise ValueError(f"clusters of {size} of {self.kv_heads} kv heads; legal sizes: {legal or 'none'}")
        if self.qk_norm == "all":
            raise ValueError("qk_norm = 'all' is a norm over the heads that are left out")
        return replace(self, heads=self.heads // size, kv_heads=self.kv_heads // size, cluster_size=size)

    def turned(self, keys: Float[Array, "*any H"], by: Int[Array, "*by"]) -> Float[Array, "*any H"]:
        """Keys of a cache at positions that are ``by`` later; without rotation they are the same everywhere."""
        if self.prefix_tokens:
            raise ValueError("its first keys are a prefix's, which has one place")
        return keys if self.rope is None else turn(self.rope, keys, by)

    def build(
        self, embed_dim: int, *, norm: NormKind, norm_eps: float, out_scale: float, dtype: jnp.dtype
    ) -> nnx.Module:
        """Module of the layer."""
        return Attention(self, embed_dim, norm=norm, norm_eps=norm_eps, out_scale=out_scale, dtype=dtype)

    def weight_macs(self, embed_dim: int) -> int:
        """Multiply-adds of one token with the weights of the q, k, v and output projections."""
        return embed_dim * (self.key_dim + self.value_dim) * (self.heads + self.kv_heads)

    def matmul_inputs(self, embed_dim: int) -> tuple[MatmulInput, ...]:
        """Inputs of the q, k, v and output projections."""
        return (embed_dim, 3), (self.heads * self.value_dim, 1)

    @property
    def named_projections(self) -> tuple[str, ...]:
        """Projections whose results the gradient reads beside what attention takes: inputs of norms and of clipping."""
        if self.clip is not None:
            return ("q", "k", "v")
        return ("q", "k") if self.qk_norm != "none" else ()

    def matmul_values(self, embed_dim: int) -> tuple[MatmulValue, ...]:
        """Queries, keys and values, where something reads them also before norms and clipping, and attention."""
        widths = {
            "q": self.heads * self.key_dim,
            "k": self.kv_heads * self.key_dim,
            "v": self.kv_heads * self.value_dim,
        }
        before = [
            MatmulValue(f"{name}_proj", widths[name], embed_dim * widths[name], ()) for name in self.named_projections
        ]
        made = {one.name for one in before}
        # Of variants with further projections, such as gates: their results have no name.
        more = self.weight_macs(embed_dim) - embed_dim * (sum(widths.values()) + self.heads * self.value_dim)
        before += [MatmulValue("projections", 0, more, ())] if more else []
        into = [
            MatmulValue(name, width, 0, (f"{name}_proj",))
            if f"{name}_proj" in made
            else MatmulValue(name, width, embed_dim * width, ())
            for name, width in widths.items()
        ]
        result = self.heads * (self.value_dim + 1)
        return (*before, *into, MatmulValue("attention", result, 0, ("q", "k", "v"), pair_macs=self.attention_macs))

    def without_traffic_formula(self, tensor: int, kv_shards: int) -> list[str]:
        """Features whose collectives have no formula."""
        features = {
            "fewer kv heads than shards of heads": self.kv_heads % kv_shards > 0,
            "norms of all heads together, split": tensor > 1 and self.qk_norm == "all",
            "biases of split layers": tensor > 1 and self.bias != "none",
            "clusters of heads": self.cluster_size > 1,
        }
        return [name for name, is_so in features.items() if is_so]

    def describe(self) -> str:
        """One line for people."""
        rope = unusual(self.rope) if self.rope else ""
        parts = (
            f"{self.heads} heads, {self.kv_heads} of keys and values, of {self.head_dim}",
            unusual(self, "heads", "kv_heads", "head_dim", "rope"),
            "no rotation" if self.rope is None else f"rotary: {rope}" if rope else "",
        )
        return "; ".join(part for part in parts if part)


class Attention(nnx.Module):
    """Grouped-query attention layer."""

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
        d, n, k, h, v = embed_dim, config.heads, config.kv_heads, config.head_dim, config.value_dim
        self.config = config
        self.q = linear("q_proj", (d, n, h), ("embed", "heads", "head_dim"), dtype)
        self.k = linear("k_proj", (d, k, h), ("embed", "kv_heads", "head_dim"), dtype)
        self.v = linear("v_proj", (d, k, v), ("embed", "kv_heads", "head_dim"), dtype)
        self.o = linear("o_proj", (n, v, d), ("heads", "head_dim", "embed"), dtype, contract=2, scale=out_scale)
        if config.qk_norm == "head":
            self.q_norm = Norm(norm, (h,), norm_eps, dtype, ("head_dim",))
            self.k_norm = Norm(norm, (h,), norm_eps, dtype, ("head_dim",))
        elif config.qk_norm == "all":
            self.q_norm = Norm(norm, (n, h), norm_eps, dtype, ("heads", "head_dim"))
            self.k_norm = Norm(norm, (k, h), norm_eps, dtype, ("kv_heads", "head_dim"))
        if config.bias != "none":
            self.q_bias = constant(0.0, (n, h), ("heads", "head_dim"), dtype, role="bias")
            self.k_bias = constant(0.0, (k, h), ("kv_heads", "head_dim"), dtype, role="bias")
            self.v_bias = constant(0.0, (k, v), ("kv_heads", "head_dim"), dtype, role="bias")
        if config.bias == "all":
            self.o_bias = constant(0.0, (d,), ("embed",), dtype, role="bias")
        if config.sinks:
            self.sinks = constant(0.0, (n,), ("heads",), dtype, role="bias")
        if config.prefix_tokens:
            places, axes = (config.prefix_tokens, k), (None, "kv_heads", "head_dim")
            self.prefix_keys = declare(nnx.Param, (*places, h), axes, dtype, "bias", std=1.0)
            self.prefix_values = declare(nnx.Param, (*places, v), axes, dtype, "bias", std=PREFIX_VALUE_STD)

    def __call__(
        self, x: Float[Array, "B S D"], positions: Int[Array, "B S"], layer: LayerIndex, ctx: AttentionContext
    ) -> tuple[Float[Array, "B S D"], AttentionContext]:
        """Output of the layer and the updated attention context."""
        config = self.config
        q, k, v = (heads_first(y) for y in self._projections(x))
        trains = not getattr(ctx, "is_kv_cache", False)
        if config.bias != "none":
            q, k, v = q + use(self.q_bias, x.dtype), k + use(self.k_bias, x.dtype), v + use(self.v_bias, x.dtype)
        if (named := config.named_projections) and trains:
            q, k, v = (
                checkpoint_name(y, f"{name}_proj") if name in named else y
                for name, y in zip(("q", "k", "v"), (q, k, v), strict=True)
            )
        if config.qk_norm != "none":
            with jax.named_scope("qk_norm"):
                q, k = self.q_norm(q), self.k_norm(k)
        if config.clip is not None:
            q, k, v = (jnp.clip(y, -config.clip, config.clip) for y in (q, k, v))
        if config.rope is not None:
            with jax.named_scope("rope"):
                cos, sin = rotation(config.rope, positions, config.head_dim, x.dtype)
                q, k = (rotate(x, cos, sin, interleaved=config.rope.interleaved) for x in (q, k))
        if config.prefix_tokens:
            k = _with_prefix(k, use(self.prefix_keys, x.dtype), positions, trains)
            v = _with_prefix(v, use(self.prefix_values, x.dtype), positions, trains)
        sinks = use(self.sinks, x.dtype) if config.sinks else None
        with jax.named_scope("kernel"):
            out, ctx = ctx.attend(layer, q, k, v, positions, config.attention_params, sinks)
        out = sharding.constrain(out, "batch", "seq", "act_heads", None)
        return self.output(x, heads_first(out) if trains else out), ctx

    def output(self, x: Float[Array, "B S D"], attended: Float[Array, "B S N H"]) -> Float[Array, "B S D"]:
        """Output of the layer from its input and the result of attention; variants with a gate override it."""
        bias = self.o_bias if self.config.bias == "all" else None
        return self.o(attended, ("batch", "residual_seq", "act_embed"), bias)

    def _projections(self, x: Float[Array, "B S D"]) -> list[Float[Array, "B S _ H"]]:
        """Queries, keys and values, each with the whole sequence; heads are split over devices (tensor parallelism)."""
        config = self.config
        heads, kv_heads = ("batch", "seq", "act_heads", None), ("batch", "seq", "act_kv_heads", None)
        shape = (*x.shape[:2], config.kv_heads, config.head_dim)
        # kv heads that are fewer than the tensor shards are replicated, in the weight as in its result.
        if sharding.spec(*kv_heads, shape=shape, what="act_kv_heads")[2] is None:
            whole = sharding.constrain(x, "batch", "seq", "act_embed")
            few = [one(whole, ("batch", "seq", None, None)) for one in (self.k, self.v)]
            return [*project_many(x, [self.q], [heads], over="act_heads"), *few]
        return project_many(x, [self.q, self.k, self.v], [heads, kv_heads, kv_heads], over="act_heads")


def _with_prefix(
    x: Float[Array, "B S K H"], prefix: Float[Array, "P K H"], positions: Int[Array, "B S"], first: bool
) -> Float[Array, "B S K H"]:
    """Keys or values with those of a prefix at the positions of its tokens.

    Args:
        first: the prefix has the first places of each row, as in training.
    """
    tokens = prefix.shape[0]
    if not first:
        own = prefix.at[jnp.clip(positions, 0, tokens - 1)].get(out_sharding=jax.typeof(x).sharding)
        return jnp.where((positions < tokens)[..., None, None], own, x)
    axes = ("batch", "seq", "act_kv_heads", None)
    rows = sharding.constrain(jnp.broadcast_to(prefix, (x.shape[0], *prefix.shape)), *axes)
    return jnp.concatenate([rows, sharding.constrain(x, *axes)[:, tokens:]], axis=1)
