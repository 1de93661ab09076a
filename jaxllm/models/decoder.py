"""Decoder-only transformer: embedding, transformer blocks and output head. Every model family is a ``DecoderConfig``.

Legend: B batch, S sequence, D embed, V vocab.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

import sharding
from jaxllm.config import OneOf, renamed_fields
from jaxllm.models.attention_context import AttentionContext, LayerIndex
from jaxllm.models.layers.attention import AttentionConfig
from jaxllm.models.layers.layer import MatmulValue
from jaxllm.models.layers.layer_table import ATTENTION_LAYERS, FEED_FORWARD_LAYERS
from jaxllm.models.layers.mlp import MlpConfig
from jaxllm.models.layers.norm import Norm, NormKind
from jaxllm.models.layers.residual_stream import GatedStream, LadderStream, residual_by_segment
from jaxllm.models.linear import linear, lookup
from jaxllm.models.low_precision_matmul import MatmulPrecision
from jaxllm.models.moe.moe import Moe, MoeConfig
from jaxllm.models.params import normal, use
from jaxllm.models.remat import check_values, policies_by_segment
from jaxllm.models.remat_names import name_for_remat
from jaxllm.models.tpu_layout import materialized, row_major

DTypeName = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True)
class BlockConfig:
    """One transformer block: attention and a feed-forward layer, each with a residual connection.

    Attributes:
        attention: a row of ``ATTENTION_LAYERS``: grouped-query attention (``AttentionConfig``; multi-head and
            multi-query attention are special cases), or multi-head latent attention (``MLAConfig``).
        mlp: a row of ``FEED_FORWARD_LAYERS``: dense (``MlpConfig``), or mixture of experts (``MoeConfig``).
        norms: placement of the norms. "pre": on the input of each sublayer (arXiv:2002.04745); "post": on its output
            (OLMo 2); "sandwich": on both (arXiv:2105.13290; Gemma 2).
    """

    attention: Annotated[Any, OneOf(ATTENTION_LAYERS)] = field(default_factory=AttentionConfig)
    mlp: Annotated[Any, OneOf(FEED_FORWARD_LAYERS)] = field(default_factory=MlpConfig)
    norms: Literal["pre", "post", "sandwich"] = "pre"

    def matmul_values(self, embed_dim: int) -> tuple[MatmulValue, ...]:
        """Values that matmuls compute in training, in order; norms of a sublayer's output read the output itself."""
        attention, mlp = self.attention, self.mlp
        heads, normed = attention.heads * attention.value_dim, self.norms != "pre"
        inner = mlp.matmul_values(embed_dim)
        out = MatmulValue("o_proj", embed_dim, embed_dim * heads, ("attention",))
        stream = MatmulValue("residual", embed_dim, 0, ("o_proj",))._replace(
            **({} if normed else {"macs": out.macs, "inputs": out.inputs})
        )
        down = MatmulValue("down", embed_dim, mlp.last_macs(embed_dim), tuple(one.name for one in inner))
        return (
            *attention.matmul_values(embed_dim),
            *([out] if normed else []),
            stream,
            *inner,
            *([down] if normed else []),
        )


@renamed_fields(products="matmul_precision")
@dataclass(frozen=True)
class DecoderConfig:
    """Architecture and numerics of a decoder-only transformer.

    Attributes:
        vocab_size: rows of the token embedding.
        embed_dim: width of the residual stream.
        layers: number of transformer blocks.
        prefix: blocks that come once, before the pattern (DeepSeek's first dense layers).
        pattern: group of blocks that repeats through the remaining layers (Gemma's 5 local + 1 global);
            a remainder takes the group's first blocks.
        tied: whether the output head uses the token embedding (tied embeddings).
        learned_positions: rows of a learned position embedding (GPT-2), the longest legal sequence; None for none.
        embed_scale: factor that embeddings are multiplied by (Gemma: the square root of their width).
        embed_grad: factor on the gradient that reaches the token embedding through its lookup, against loss spikes:
            0.1 in GLM-130B (arXiv:2210.02414, section 2.2). The gradient of a tied output head is not scaled.
        prompt_tokens: number of virtual tokens at the first positions of a sequence, whose embeddings are parameters
            (prompt tuning, arXiv:2104.08691).
        logit_softcap: soft cap of the logits, ``softcap * tanh(logits / softcap)`` (Gemma 2); None for none.
        residual: residual stream: "plain"; "ladder", in which a sublayer does not read the output of the one before it
            (Ladder Residual); or both by layers, "plain=8,ladder=8". See ``jaxllm.models.layers.residual_stream``.
        norm: kind of every norm.
        norm_eps: epsilon added to the mean square (or the variance) in every norm.
        param_dtype: dtype in which parameters are stored.
        dtype: compute dtype of matmuls; norms, softmax and loss run in at least float32.
        matmul_precision: low-precision matmul (INT8, FP8, FP4) with the weights of blocks in training: "plain" for
            none; "int8"; FP8 with one scale per tensor, from its own amax ("fp8_current") or from the amax history of
            the last steps ("fp8_delayed"), or one scale per 32 values ("fp8_block"); FP4 with rotations and
            stochastic rounding ("mxfp4", Quartet). See ``jaxllm.models.low_precision_matmul``.
        remat: gradient checkpointing (remat), the values that the backward pass recomputes: "none", "elementwise"
            (norms, rotary embeddings, activation functions), "attention" (attention as well), "full" (each block from
            its input), "sqrt" (runs of blocks from the input of the first); "save:qkv+attention" (all but the named
            values), "offload" (activation offload to the host), "compact:0.25" (random projections of matmul inputs
            are kept); or several by layers, "none=8,full=24". See ``jaxllm.models.remat``.
        unroll: groups of a scanned segment to unroll per step of the loop; 0 unrolls all of them.
    """

    vocab_size: int = 256
    embed_dim: int = 256
    layers: int = 4
    prefix: tuple[BlockConfig, ...] = ()
    pattern: tuple[BlockConfig, ...] = (BlockConfig(),)
    tied: bool = True
    learned_positions: int | None = None
    embed_scale: float = 1.0
    embed_grad: float = 1.0
    prompt_tokens: int = 0
    logit_softcap: float | None = None
    residual: str = "plain"
    norm: NormKind = "rms"
    norm_eps: float = 1e-5
    param_dtype: DTypeName = "float32"
    dtype: DTypeName = "float32"
    matmul_precision: MatmulPrecision = "plain"
    remat: str = "elementwise"
    unroll: int = 1

    def __post_init__(self) -> None:
        for name in ("vocab_size", "embed_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"model: {name} = {getattr(self, name)}; give a positive number.")
        for name in ("learned_positions", "logit_softcap"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"model: {name} = {value}; give a positive number, or None.")
        if not 0 < self.embed_grad <= 1:
            raise ValueError(
                f"model: embed_grad = {self.embed_grad}; give a fraction of the gradient, above 0 and at most 1 (all)."
            )
        if self.norm_eps < 0:
            raise ValueError(f"model: norm_eps = {self.norm_eps}; give 0 or a small positive number.")
        if not self.pattern:
            raise ValueError("model: pattern is empty; it needs at least one block.")
        if self.layers < len(self.prefix) + 1:
            raise ValueError(
                f"model: layers = {self.layers} is too few for a prefix of {len(self.prefix)} and a pattern; "
                f"choose at least {len(self.prefix) + 1}."
            )
        # Both raise if what they name does not fit the layers.
        policies_by_segment(self.remat, self.segments)
        if "save:" in self.remat:
            kinds = {*self.prefix, *self.pattern}
            check_values(self.remat, {one.name for block in kinds for one in block.matmul_values(self.embed_dim)})
        residual_by_segment(self.residual, self.segments)
        if self.pre_gated and self.residual != "plain":
            raise ValueError(
                f"model: residual = {self.residual!r} does not go with router.input = 'previous': choose 'plain', or "
                "router.input = 'own'."
            )
        if self.unroll < 0:
            raise ValueError(f"model: unroll = {self.unroll}; it is 0 (all) or a positive number of groups.")

    @property
    def segments(self) -> tuple[tuple[tuple[BlockConfig, ...], int], ...]:
        """Layers in order as ``((group of blocks, repeats), ...)``; each entry is stacked and scanned."""
        out: list[tuple[tuple[BlockConfig, ...], int]] = []
        for block in self.prefix:
            if out and out[-1][0] == (block,):
                out[-1] = ((block,), out[-1][1] + 1)
            else:
                out.append(((block,), 1))
        repeats, rest = divmod(self.layers - len(self.prefix), len(self.pattern))
        if repeats:
            out.append((self.pattern, repeats))
        if rest:
            out.append((self.pattern[:rest], 1))
        return tuple(out)

    @functools.cached_property
    def blocks(self) -> tuple[BlockConfig, ...]:
        """Block of every layer, in order."""
        return tuple(block for group, repeats in self.segments for _ in range(repeats) for block in group)

    @functools.cached_property
    def routed_layers(self) -> dict[int, int]:
        """Number of experts of each layer with a router, by the index of the layer."""
        experts = {i: block.mlp.routed_experts for i, block in enumerate(self.blocks)}
        return {i: count for i, count in experts.items() if count}

    @property
    def virtual_tokens(self) -> int:
        """Number of positions at the start of every sequence that virtual tokens take."""
        return max(self.prompt_tokens, *(getattr(block.attention, "prefix_tokens", 0) for block in self.blocks))

    @functools.cached_property
    def pre_gated(self) -> bool:
        """Whether a router reads the input of the mixture before its own, see ``RouterConfig.input``."""
        return any(moe.router.input == "previous" for moe in self.mixtures.values())

    @functools.cached_property
    def mixtures(self) -> dict[int, MoeConfig]:
        """Mixture of experts of each layer that has one, by the index of the layer."""
        return {i: block.mlp.mixture for i, block in enumerate(self.blocks) if block.mlp.mixture is not None}


class Block(nnx.Module):
    """Transformer block: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``; or with post or sandwich norms."""

    def __init__(self, config: BlockConfig, model: DecoderConfig):
        dtype = jnp.dtype(model.param_dtype)
        # Residual branches are initialised smaller in deeper models (GPT-2), so that depth does not inflate the stream.
        out_scale = (2 * model.layers) ** -0.5

        def norm() -> Norm:
            return Norm(model.norm, (model.embed_dim,), model.norm_eps, dtype)

        self.norms = config.norms
        if config.norms != "post":
            self.attention_norm, self.mlp_norm = norm(), norm()
        if config.norms != "pre":
            self.attention_out_norm, self.mlp_out_norm = norm(), norm()
        self.scope = config.mlp.scope
        self.attention = config.attention.build(
            model.embed_dim, norm=model.norm, norm_eps=model.norm_eps, out_scale=out_scale, dtype=dtype
        )
        self.mlp = config.mlp.build(model.embed_dim, out_scale=out_scale, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "B S D"] | LadderStream | GatedStream,
        positions: Int[Array, "B S"],
        layer: LayerIndex,
        ctx: AttentionContext,
    ) -> tuple[Any, AttentionContext]:
        """Output of the block, a residual stream of the kind of ``x``, and the updated attention context."""
        if isinstance(x, LadderStream):
            return self._climb(x, positions, layer, ctx)
        if isinstance(x, GatedStream):
            return self._pass_gate(x, positions, layer, ctx)
        x, h, ctx = self.attend(x, positions, layer, ctx)
        with jax.named_scope(self.scope):
            out, ctx = self.mlp(h, layer, ctx)
        return self.add(x, out), ctx

    def _pass_gate(
        self, x: GatedStream, positions: Int[Array, "B S"], layer: LayerIndex, ctx: AttentionContext
    ) -> tuple[GatedStream, AttentionContext]:
        """The block where routers read the input of the mixture before: this one's goes on to the next."""
        stream, h, ctx = self.attend(x.plain, positions, layer, ctx)
        with jax.named_scope(self.scope):
            if isinstance(self.mlp, Moe):
                out, ctx = self.mlp(h, layer, ctx, x.gate_input(h))
                x = GatedStream(x.plain, h, jnp.asarray(True))
            else:
                out, ctx = self.mlp(h, layer, ctx)
        return x._replace(plain=self.add(stream, out)), ctx

    def _climb(
        self, x: LadderStream, positions: Int[Array, "B S"], layer: LayerIndex, ctx: AttentionContext
    ) -> tuple[LadderStream, AttentionContext]:
        """The block with a ladder residual: neither sublayer reads the output of the one just before it."""
        attended, ctx = self.attention_branch(x.reduced, positions, layer, ctx)
        stream = name_for_remat(x.reduced + x.pending, "residual")
        out, ctx = self.mlp_branch(stream, layer, ctx)
        return LadderStream(row_major(stream + attended), row_major(out)), ctx

    def attend(
        self, x: Float[Array, "B S D"], positions: Int[Array, "B S"], layer: LayerIndex, ctx: AttentionContext
    ) -> tuple[Float[Array, "B S D"], Float[Array, "B S D"], AttentionContext]:
        """The residual stream after attention, the input of the feed-forward layer, and the attention context."""
        attended, ctx = self.attention_branch(x, positions, layer, ctx)
        x = name_for_remat(x + attended, "residual")
        (h,) = materialized(_normed(self.mlp_norm, x)) if self.norms != "post" else (x,)
        return x, h, ctx

    def add(self, x: Float[Array, "B S D"], out: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """The residual stream after the feed-forward layer, whose output is ``out``."""
        return row_major(x + self._out_normed("mlp_out_norm", out, "down"))

    def attention_branch(
        self, x: Float[Array, "B S D"], positions: Int[Array, "B S"], layer: LayerIndex, ctx: AttentionContext
    ) -> tuple[Float[Array, "B S D"], AttentionContext]:
        """The attention layer's addition to the residual stream ``x``, and the attention context."""
        (h,) = materialized(_normed(self.attention_norm, x)) if self.norms != "post" else (x,)
        with jax.named_scope("attention"):
            attended, ctx = self.attention(h, positions, layer, ctx)
        return self._out_normed("attention_out_norm", attended, "o_proj"), ctx

    def mlp_branch(
        self, x: Float[Array, "B S D"], layer: LayerIndex, ctx: AttentionContext
    ) -> tuple[Float[Array, "B S D"], AttentionContext]:
        """The feed-forward layer's addition to the residual stream ``x``, and the attention context."""
        with jax.named_scope(self.scope):
            out, ctx = self.mlp(_normed(self.mlp_norm, x) if self.norms != "post" else x, layer, ctx)
        return self._out_normed("mlp_out_norm", out, "down"), ctx

    def _out_normed(self, norm: str, out: Float[Array, "B S D"], name: str) -> Float[Array, "B S D"]:
        """Output of a sublayer after its norm, if it has one, which gradient checkpointing can keep by a name."""
        return out if self.norms == "pre" else _normed(getattr(self, norm), checkpoint_name(out, name))


def _normed(norm: Norm, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
    with jax.named_scope("norm"):
        return norm(x)


class Embedding(nnx.Module):
    """Token embedding, plus a position embedding where the model learns one."""

    def __init__(self, model: DecoderConfig):
        d, dtype = model.embed_dim, jnp.dtype(model.param_dtype)
        self.table = normal((model.vocab_size, d), ("vocab", "vocab_embed"), dtype, role="embedding", fan_in=d)
        self.learned = model.learned_positions is not None
        if model.learned_positions is not None:
            rows = (model.learned_positions, d)
            self.positions = normal(rows, (None, "vocab_embed"), dtype, role="embedding", fan_in=d)
        self.prompt_tokens = model.prompt_tokens
        if model.prompt_tokens:
            rows = (model.prompt_tokens, d)
            self.prompt = normal(rows, (None, "vocab_embed"), dtype, role="embedding", fan_in=d)
        self.dtype, self.scale, self.grad = model.dtype, model.embed_scale, model.embed_grad

    def __call__(self, tokens: Int[Array, "B S"], positions: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """Embeddings in compute dtype."""
        out, dtype = ("batch", "residual_seq", "act_embed"), jnp.dtype(self.dtype)
        x = lookup(self.table, tokens, dtype, out)
        if self.grad != 1.0:
            # The paper's a x + (1 - a) stop(x) equals x only up to rounding; the value of this form is exactly x.
            still = jax.lax.stop_gradient(x)
            x = still + jnp.asarray(self.grad, dtype) * (x - still)
        if self.scale != 1.0:
            x = x * jnp.asarray(self.scale, dtype)
        if self.prompt_tokens:
            virtual = jnp.clip(positions, 0, self.prompt_tokens - 1)
            prompt = sharding.take(use(self.prompt, dtype), virtual, out=out)
            x = jnp.where((positions < self.prompt_tokens)[..., None], prompt, x)
        if self.learned:
            x = x + sharding.take(use(self.positions, dtype), positions, out=out)
        return x


class Head(nnx.Module):
    """Output head: final norm and, unless tied to the embedding, the output projection."""

    def __init__(self, model: DecoderConfig):
        dtype = jnp.dtype(model.param_dtype)
        self.norm = Norm(model.norm, (model.embed_dim,), model.norm_eps, dtype)
        if not model.tied:
            shape, axes = (model.vocab_size, model.embed_dim), ("vocab", "vocab_embed")
            self.weight = linear("lm_head", shape, axes, dtype, role="embedding", fan_in=model.embed_dim)
