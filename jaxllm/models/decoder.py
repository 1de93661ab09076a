"""The decoder: one architecture, configured; every dense family is a value of ``DecoderConfig``.

Legend: B batch, S sequence, D embed, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

import sharding
from jaxllm.config import renamed_fields
from jaxllm.models.attention_context import AttentionContext, LayerIndex, RoutingContext
from jaxllm.models.layers.attention import Attention, AttentionConfig
from jaxllm.models.layers.mla import MLAConfig, MultiHeadLatentAttention
from jaxllm.models.layers.mlp import Mlp, MlpConfig
from jaxllm.models.layers.norm import Norm, NormKind
from jaxllm.models.low_precision_matmul import MatmulPrecision
from jaxllm.models.moe.moe import Moe, MoeConfig
from jaxllm.models.params import normal, use
from jaxllm.models.remat import policies_by_segment

DTypeName = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True)
class BlockConfig:
    """One transformer block: attention and feed-forward, each with a residual.

    Attributes:
        attention: heads with keys and values of their own or shared by some, or all made of one latent.
        mlp: one feed-forward layer for all tokens, or a mixture of experts.
        norms: of each of the two, what is normalised: its input (arXiv:2002.04745), its output (OLMo 2), or both
            ("sandwich", arXiv:2105.13290; Gemma 2).
    """

    attention: AttentionConfig | MLAConfig = field(default_factory=AttentionConfig)
    mlp: MlpConfig | MoeConfig = field(default_factory=MlpConfig)
    norms: Literal["pre", "post", "sandwich"] = "pre"

    @property
    def weight_matmuls(self) -> int:
        """How many products with weights training has."""
        latent = isinstance(self.attention, MLAConfig) and self.attention.q_latent is not None
        gated = not isinstance(self.mlp, MlpConfig) or self.mlp.gated
        return 4 + latent + 2 + gated


@renamed_fields(products="matmul_precision")
@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer.

    Attributes:
        vocab_size: rows of the embedding.
        embed_dim: width of the residual stream.
        layers: number of blocks.
        prefix: blocks that come once, before the pattern (DeepSeek's first dense layers).
        pattern: the group of blocks that repeats through the remaining layers (Gemma's 5 local + 1 global);
            a remainder takes the group's first blocks.
        tied: the output head is the embedding.
        learned_positions: rows of a learned position embedding, added to the tokens' (GPT-2): the longest sequence.
            None for none.
        embed_scale: what embeddings are multiplied by (Gemma: the square root of their width).
        embed_grad: what the gradient that reaches the token embedding through its lookup is multiplied by, against
            spikes of the loss: 0.1 in GLM-130B (arXiv:2210.02414, section 2.2). A tied output matrix's is not.
        logit_softcap: bound of the logits, by tanh (Gemma 2).
        norm: kind of every normalisation.
        norm_eps: added to the mean square (or the variance) in every normalisation.
        param_dtype: what parameters are stored in.
        dtype: what matrix multiplications run in; norms, softmax and loss run in at least float32.
        products: what factors of products with a block's weights are rounded to in training: "plain", not at all;
            "int8"; float8 with one scale an array, of its own largest number ("fp8_current") or of that of the last
            steps ("fp8_delayed"), or one for 32 numbers ("fp8_block"). See ``jaxllm.models.low_precision_matmul``.
        remat: what the backward pass computes again: "none", "elementwise" (norms, rotations, activations), "attention"
            (that besides), "full" (each block from its input), "sqrt" (runs of blocks from the input of the first);
            "offload" (kept values wait on the host), "compact:0.25" (projections of products' inputs are kept); or
            several by layers, "none=8,full=24". See ``jaxllm.models.remat``.
        unroll: how many groups of a scanned segment to unroll per step of the loop; 0 unrolls them all.
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
    logit_softcap: float | None = None
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
                f"model: embed_grad = {self.embed_grad}; give a share of the gradient, above 0 and at most 1 (all)."
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
        if self.matmul_precision != "plain" and any(isinstance(block.mlp, MoeConfig) for block in self.blocks):
            raise ValueError(
                f'model: matmul_precision = "{self.matmul_precision}" needs dense layers, but this model has experts; choose "plain".'
            )
        policies_by_segment(self.remat, self.segments)  # refuses what does not fit
        if "compact" in self.remat:
            dense = all(isinstance(b.mlp, MlpConfig) and isinstance(b.attention, AttentionConfig) for b in self.blocks)
            if self.matmul_precision != "plain" or not dense:
                raise ValueError(
                    f'model: remat = "{self.remat}"; "compact" is of plain products of dense layers whose attention '
                    'is not latent; choose "none" or "elementwise".'
                )
        if self.unroll < 0:
            raise ValueError(f"model: unroll = {self.unroll}; it is 0 (all) or a positive number of groups.")

    @property
    def segments(self) -> tuple[tuple[tuple[BlockConfig, ...], int], ...]:
        """The layers in order as ``((group of blocks, repeats), ...)``; each entry is stacked and scanned."""
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

    @property
    def blocks(self) -> tuple[BlockConfig, ...]:
        """Every layer's block, in order."""
        return tuple(block for group, repeats in self.segments for _ in range(repeats) for block in group)


class Block(nnx.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``; or with the norms after, or on both sides."""

    def __init__(self, config: BlockConfig, model: DecoderConfig):
        dtype = jnp.dtype(model.param_dtype)
        # Residual branches start smaller the more of them there are (GPT-2), so depth does not inflate the stream.
        out_scale = (2 * model.layers) ** -0.5

        def norm() -> Norm:
            return Norm(model.norm, (model.embed_dim,), model.norm_eps, dtype)

        self.norms = config.norms
        if config.norms != "post":
            self.attention_norm, self.mlp_norm = norm(), norm()
        if config.norms != "pre":
            self.attention_out_norm, self.mlp_out_norm = norm(), norm()
        attention = MultiHeadLatentAttention if isinstance(config.attention, MLAConfig) else Attention
        self.attention = attention(
            config.attention,  # type: ignore[arg-type]
            model.embed_dim,
            norm=model.norm,
            norm_eps=model.norm_eps,
            out_scale=out_scale,
            dtype=dtype,
        )
        layer = Moe if isinstance(config.mlp, MoeConfig) else Mlp
        self.mlp = layer(config.mlp, model.embed_dim, out_scale=out_scale, dtype=dtype)  # type: ignore[arg-type]

    def __call__(
        self, x: Float[Array, "B S D"], positions: Int[Array, "B S"], layer: LayerIndex, ctx: AttentionContext
    ) -> tuple[Float[Array, "B S D"], AttentionContext]:
        pre, post = self.norms != "post", self.norms != "pre"
        attended, ctx = self.attention(self.attention_norm(x) if pre else x, positions, layer, ctx)
        x = checkpoint_name(x + (self.attention_out_norm(attended) if post else attended), "residual")
        out, ctx = self._feed_forward(self.mlp_norm(x) if pre else x, layer, ctx)
        return x + (self.mlp_out_norm(out) if post else out), ctx

    def _feed_forward(
        self, x: Float[Array, "B S D"], layer: LayerIndex, ctx: AttentionContext
    ) -> tuple[Float[Array, "B S D"], AttentionContext]:
        if isinstance(self.mlp, Mlp):
            return self.mlp(x), ctx
        out, routing = self.mlp(x)
        return out, ctx.record_routing(layer, routing) if isinstance(ctx, RoutingContext) else ctx


class Embedding(nnx.Module):
    """Token embedding, and that of positions where they are learned."""

    def __init__(self, model: DecoderConfig):
        d, dtype = model.embed_dim, jnp.dtype(model.param_dtype)
        self.table = normal((model.vocab_size, d), ("vocab", "vocab_embed"), dtype, fan_in=d)
        self.learned = model.learned_positions is not None
        if model.learned_positions is not None:
            self.positions = normal((model.learned_positions, d), (None, "vocab_embed"), dtype, fan_in=d)
        self.dtype, self.scale, self.grad = model.dtype, model.embed_scale, model.embed_grad

    def __call__(self, tokens: Int[Array, "B S"], positions: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        out, dtype = ("batch", "residual_seq", "act_embed"), jnp.dtype(self.dtype)
        x = sharding.take(use(self.table, dtype), tokens, out=out)
        if self.grad != 1.0:
            # The paper's a x + (1 - a) stop(x), whose value would be x but for rounding; this one's is x.
            still = jax.lax.stop_gradient(x)
            x = still + jnp.asarray(self.grad, dtype) * (x - still)
        if self.scale != 1.0:
            x = x * jnp.asarray(self.scale, dtype)
        if self.learned:
            x = x + sharding.take(use(self.positions, dtype), positions, out=out)
        return x


class Head(nnx.Module):
    """Final norm and, unless tied to the embedding, the output projection."""

    def __init__(self, model: DecoderConfig):
        dtype = jnp.dtype(model.param_dtype)
        self.norm = Norm(model.norm, (model.embed_dim,), model.norm_eps, dtype)
        if not model.tied:
            shape = (model.vocab_size, model.embed_dim)
            self.weight = normal(shape, ("vocab", "vocab_embed"), dtype, fan_in=model.embed_dim)
