"""Tiny models and batches for tests, and how far two results are apart."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st

from jaxllm.data import Batch
from jaxllm.models import (
    AttentionConfig,
    BlockConfig,
    DecoderConfig,
    MLAConfig,
    MlpConfig,
    MoeConfig,
    RopeConfig,
    RouterConfig,
)


def decoder(
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    embed_dim: int = 16,
    mlp: int = 32,
    vocab_size: int = 64,
    layers: int = 2,
    dtype: str = "float64",
    qk_norm: str = "none",
    bias: str = "none",
    rope: RopeConfig | None = None,
    window: int | None = None,
    softcap: float | None = None,
    norms: str = "pre",
    gated: bool = True,
    moe: tuple[int, int, int, bool] | tuple[int, int, int, bool, int] | None = None,
    latent: int = 0,
    **fields: Any,
) -> DecoderConfig:
    """A small decoder; sizes fit an axis of eight unless said otherwise.

    Args:
        moe: experts, top_k, hidden, normalize, and the hidden width of a shared expert.
        latent: width of the latents of multi-head latent attention; 0 for none.
    """
    attention: Any = AttentionConfig(
        heads,
        kv_heads,
        head_dim,
        rope or RopeConfig(),
        qk_norm,  # type: ignore[arg-type]
        bias,  # type: ignore[arg-type]
        window,
        softcap,
    )
    feed_forward = MlpConfig(mlp, gated=gated, bias=bias == "all")
    if latent:
        attention = MLAConfig(heads, latent, nope_dim=head_dim, rope_dim=head_dim, value_dim=head_dim)
    if moe is not None:
        experts, top_k, hidden, normalize, *shared = moe
        router = RouterConfig(normalize=normalize)
        feed_forward = MoeConfig(experts, top_k, hidden, router=router, shared=shared[0] if shared else 0)
    block = BlockConfig(attention, feed_forward, norms)  # type: ignore[arg-type]
    return DecoderConfig(
        vocab_size=vocab_size,
        embed_dim=embed_dim,
        layers=layers,
        pattern=(block,),
        dtype=dtype,  # type: ignore[arg-type]
        param_dtype=dtype,  # type: ignore[arg-type]
        **fields,
    )


def batch(seed: int, rows: int, seq_len: int, vocab_size: int, *, packed: bool, padding: bool = False) -> Batch:
    """Random tokens; packed rows hold documents of random lengths, and end in padding if asked.

    The first row begins with two tokens of one document, both with a target: were all documents one token long,
    queries and keys would have gradients of exactly zero and a relative error would compare rounding noise.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab_size, (rows, seq_len), dtype=np.int32)
    targets = rng.integers(0, vocab_size, (rows, seq_len), dtype=np.int32)
    targets[rng.random(targets.shape) < 0.1] = -1
    targets[0, :2] = tokens[0, :2]
    if not packed:
        positions = np.broadcast_to(np.arange(seq_len, dtype=np.int32), tokens.shape).copy()
        return Batch(tokens, targets, np.ones_like(tokens), positions)
    starts = rng.random(tokens.shape) < 0.25
    starts[:, 0] = True
    starts[0, 1:2] = False
    segments = np.cumsum(starts, axis=1, dtype=np.int32)
    first = np.maximum.accumulate(np.where(starts, np.arange(seq_len), 0), axis=1)
    positions = (np.arange(seq_len) - first).astype(np.int32)
    if padding:
        ends = rng.integers(min(2, seq_len), seq_len + 1, rows)
        pad = np.arange(seq_len) >= ends[:, None]
        segments[pad], positions[pad], targets[pad] = 0, 0, -1
    return Batch(tokens, targets, segments, positions)


def leaf_error(got: Any, want: Any) -> float:
    """The largest ``||got - want|| / ||want||`` over the leaves of two trees (absolute where ``want`` is zero)."""

    def one(a: Any, b: Any) -> float:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        norm = float(np.linalg.norm(b))
        return float(np.linalg.norm(a - b)) / (norm if norm > 0 else 1.0)

    return max(jax.tree.leaves(jax.tree.map(one, got, want)))


@st.composite
def architectures(draw: st.DrawFn, tensor: int = 1, fsdp: int = 1, float32: bool = False) -> dict[str, Any]:
    """Keyword arguments of ``decoder`` whose sizes fit a mesh of ``tensor`` x ``fsdp``.

    For float32, none that normalise what a block adds: the output of a layer of one unit may be as small as its
    rounding, and would be made large again.
    """
    heads = tensor * draw(st.sampled_from([1, 2, 3]))
    kv_choices = [k for k in range(1, heads + 1) if heads % k == 0 and (k % tensor == 0 or tensor % k == 0)]
    layers = draw(st.integers(1, 3))
    return {
        "heads": heads,
        "kv_heads": draw(st.sampled_from(kv_choices)),
        # Four and more: a LayerNorm of two numbers gives 1 and -1, and has no gradient but rounding.
        "head_dim": draw(st.sampled_from([4, 6])),
        "embed_dim": fsdp * draw(st.integers(2, 3)) * (1 if fsdp > 1 else 3),
        "mlp": tensor * draw(st.integers(1, 5)),
        "vocab_size": tensor * fsdp * draw(st.integers(2, 5)),
        "layers": layers,
        "qk_norm": draw(st.sampled_from(["none", "head", "all"])),
        "bias": draw(st.sampled_from(["none", "qkv", "all"])),
        "norm": draw(st.sampled_from(["rms", "rms_plus_one", "layer"])),
        "norms": "pre" if float32 else draw(st.sampled_from(["pre", "post", "sandwich"])),
        "window": draw(st.sampled_from([None, 2, 3])),  # of one, queries and keys have no gradient
        "softcap": draw(st.sampled_from([None, 1.5])),
        "gated": draw(st.booleans()),
        "tied": draw(st.booleans()),
        "logit_softcap": draw(st.sampled_from([None, 2.0])),
        "learned_positions": draw(st.sampled_from([None, 64])),
        "remat": draw(st.sampled_from(["none", "elementwise", "full"])),
        "unroll": draw(st.sampled_from([0, 1])),
    }
