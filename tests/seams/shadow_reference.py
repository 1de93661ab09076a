"""Plain reference of ShadowKV: a whole sequence at once, dense attention that masks the tokens of chunks not chosen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxllm.models.attention_context import AttentionParams
from jaxllm.models.layers.rope import RopeConfig, rotate, rotation
from jaxllm.models.layers.rope_scaling import magnitude
from pallas_kernels.paged_attention.shadow.shadow_format import ShadowFormat


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShadowReference:
    """Attention context of one sequence.

    Attributes:
        form: KV cache format.
        page_size: positions of a page.
        rope: rotation of keys; None: there is none.
    """

    form: ShadowFormat = field(metadata={"static": True})
    page_size: int = field(metadata={"static": True})
    rope: RopeConfig | None = field(default=None, metadata={"static": True})
    is_kv_cache: ClassVar[bool] = True

    def attend(
        self, layer: Any, q: Any, k: Any, v: Any, positions: Any, params: Any, sinks: Any = None
    ) -> tuple[Any, ShadowReference]:
        return attend(self.form, self.page_size, self.rope, q[0], k[0], v[0], params, sinks)[None], self

    def is_fresh_prefill(self, positions: Any) -> None:
        return None


def turned(rope: RopeConfig | None, x: Any, back: bool) -> Any:
    """Keys [S K H] rotated by their positions, or back."""
    if rope is None:
        return x
    cos, sin = rotation(rope, jnp.arange(len(x))[None], x.shape[-1], x.dtype)
    cos, sin = cos / magnitude(rope.scaling), sin / magnitude(rope.scaling)
    return rotate(x[None], cos, -sin if back else sin)[0]


def rebuilt(form: ShadowFormat, page_size: int, rope: RopeConfig | None, k: Any) -> Any:
    """Keys [S K H] of whole pages as their truncated singular value decomposition has them."""
    pages = turned(rope, k, True).reshape(-1, page_size, k.shape[1] * k.shape[2])
    u, s, w = jnp.linalg.svd(pages, full_matrices=False)
    low = (u * s[:, None])[..., : form.rank] @ w[:, : form.rank]
    return turned(rope, low.reshape(k.shape), False)


def chosen(
    form: ShadowFormat, page_size: int, q: Any, k: Any, params: AttentionParams, found: int = 0
) -> tuple[Any, Any, Any]:
    """(tokens in pages [S 1], which chunks are outliers [A K], which are chosen [S K A]) of each query."""
    (s, n, _), (length, kv, h), chunk = q.shape, k.shape, form.chunk
    query = jnp.arange(s)[:, None]
    encoded = jnp.maximum((query + 1 - form.residual) // page_size * page_size, found)
    chunks = k.reshape(length // chunk, chunk, kv, h)
    landmarks = chunks.mean(axis=1)
    likeness = jnp.einsum("ackh,akh->ack", chunks, landmarks) / (
        jnp.linalg.norm(chunks, axis=-1) * jnp.linalg.norm(landmarks, axis=-1)[:, None] + 1e-300
    )
    least = jnp.round(likeness.min(axis=1), 4).reshape(-1, page_size // chunk, kv)
    outlier = (jnp.argsort(jnp.argsort(least, axis=1), axis=1) < form.outliers).reshape(-1, kv)
    scores = jnp.einsum("tkgh,akh->tkga", q.reshape(s, kv, n // kv, h), landmarks) * params.scale
    if params.softcap is not None:
        scores = params.softcap * jnp.tanh(scores / params.softcap)
    start = jnp.arange(len(landmarks)) * chunk
    there = start < encoded
    if params.window is not None:
        there &= start + chunk > query - params.window + 1
    there = there[:, None] & ~outlier.T[None]
    share = jax.nn.softmax(jnp.where(there[:, :, None], scores, -1e30), axis=-1).max(axis=2)
    order = jnp.argsort(jnp.argsort(jnp.where(there, -share, jnp.inf), axis=2), axis=2)
    return encoded, outlier, there & (order < form.tokens // chunk)


def attend(
    form: ShadowFormat, page_size: int, rope: RopeConfig | None, q: Any, k: Any, v: Any, params: AttentionParams,
    sinks: Any = None, found: int = 0,
) -> Any:  # fmt: skip
    """Attention output [S N V] of a sequence; ``found`` first tokens are in pages for every query."""
    (s, n, h), kv = q.shape, k.shape[1]
    more = ((0, -s % page_size), (0, 0), (0, 0))
    k, v = jnp.pad(k, more), jnp.pad(v, more)
    encoded, outlier, few = chosen(form, page_size, q, k, params, found)
    entries, query = jnp.arange(len(k)), jnp.arange(s)[:, None]
    outlier, few = jnp.repeat(outlier, form.chunk, axis=0), jnp.repeat(few, form.chunk, axis=2)
    paged = (entries < encoded)[:, None]  # S 1 E
    seen = jnp.where(paged, few | outlier.T[None], True) & (entries <= query)[:, None]
    if params.window is not None:
        seen &= (entries > query - params.window)[:, None]
    grouped = q.reshape(s, kv, n // kv, h)
    low, exact = (
        jnp.einsum("tkgh,ekh->tkge", grouped, x) * params.scale for x in (rebuilt(form, page_size, rope, k), k)
    )
    scores = jnp.where((paged & ~outlier.T[None])[:, :, None], low, exact)
    if params.softcap is not None:
        scores = params.softcap * jnp.tanh(scores / params.softcap)
    scores = jnp.where(seen[:, :, None], scores, -jnp.inf).reshape(s, n, -1)
    if sinks is not None:
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks[None, :, None], (s, n, 1))], axis=2)
    weights = jax.nn.softmax(scores, axis=-1)[..., : len(k)].reshape(s, kv, n // kv, -1)
    return jnp.einsum("tkge,ekv->tkgv", weights, v).reshape(s, n, -1)
