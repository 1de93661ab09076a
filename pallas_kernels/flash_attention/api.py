"""Flash attention: public operation and its implementations.

Causal grouped-query attention (GQA) with optional sliding window, segment ids, soft cap and attention sinks.

Legend: B batch, S queries, T keys, N query heads, K kv heads, H head dim of keys, V of values.
"""

from __future__ import annotations

import math
from typing import Any, TypedDict, Unpack

from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_over, varying_axes
from pallas_kernels._dispatch import Implementation, dispatch
from pallas_kernels.flash_attention.reference import attention_reference
from pallas_kernels.flash_attention.xla import RESIDUALS as RESIDUALS
from pallas_kernels.flash_attention.xla import attention_xla


def _pallas_tpu(*args: Any, **kw: Any) -> tuple[Array, Array]:
    from pallas_kernels.flash_attention.pallas_tpu import attention_pallas_tpu

    return attention_pallas_tpu(*args, **kw)


def _pallas_gpu(*args: Any, **kw: Any) -> tuple[Array, Array]:
    from pallas_kernels.flash_attention.pallas_gpu import attention_pallas_gpu

    return attention_pallas_gpu(*args, **kw)


def _mosaic_gpu(*args: Any, **kw: Any) -> tuple[Array, Array]:
    from pallas_kernels.flash_attention.mosaic_gpu import attention_mosaic_gpu

    return attention_mosaic_gpu(*args, **kw)


def _cudnn(*args: Any, **kw: Any) -> tuple[Array, Array]:
    from pallas_kernels.flash_attention.cudnn import attention_cudnn

    return attention_cudnn(*args, **kw)


IMPLEMENTATIONS = {
    "pallas_tpu": _pallas_tpu,
    "pallas_gpu": _pallas_gpu,
    "mosaic_gpu": _mosaic_gpu,
    "cudnn": _cudnn,
    "xla": attention_xla,
    "reference": attention_reference,
}


class AttentionOptions(TypedDict, total=False):
    """Keyword arguments of ``flash_attention_and_lse``, documented there."""

    sinks: Array | None
    q_positions: Array | None
    kv_positions: Array | None
    q_segment_ids: Array | None
    kv_segment_ids: Array | None
    scale: float | None
    window: int | None
    softcap: float | None
    implementation: Implementation


def flash_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K V"],
    **options: Unpack[AttentionOptions],
) -> Float[Array, "B S N V"]:
    """Flash attention output ``softmax(scale * q k^T + mask) v``: ``flash_attention_and_lse`` without the logsumexp."""
    return flash_attention_and_lse(q, k, v, **options)[0]


def flash_attention_and_lse(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K V"],
    *,
    sinks: Float[Array, " N"] | None = None,
    q_positions: Int[Array, "B S"] | None = None,
    kv_positions: Int[Array, "B T"] | None = None,
    q_segment_ids: Int[Array, "B S"] | None = None,
    kv_segment_ids: Int[Array, "B T"] | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    implementation: Implementation = None,
) -> tuple[Float[Array, "B S N V"], Float[Array, "B S N"]]:
    """Flash attention ``softmax(scale * q k^T + mask) v`` for each head, and its logsumexp.

    Query head n reads kv head ``n // (N / K)`` (GQA). The mask is causal: a key is visible to a query when it comes no
    later and, if segment ids are given, when both have the same segment id. Segment 0 is padding: it sees nothing and
    is seen by nothing. A query that sees no key returns zeros.

    "No later" is by array index without positions (then S = T), and by position with them. Packed sequences in their
    natural order need segment ids but no positions: blocks above the diagonal are then skipped statically, which with
    positions is unknown until run time.

    Args:
        q: queries, after RoPE, not scaled.
        k, v: keys and values; K divides N. The head dim of values may differ (MLA, arXiv:2405.04434).
        sinks: attention sinks: one score per query head that is always visible and has no value, so it only takes a
            share of the softmax (arXiv:2309.17453; as in gpt-oss).
        q_positions, kv_positions: token positions; both or neither.
        q_segment_ids, kv_segment_ids: segment ids; both or neither.
        scale: factor of the scores; ``1 / sqrt(H)`` when None.
        window: sliding window: a query sees its own position and the ``window - 1`` before it (arXiv:2004.05150).
        softcap: soft cap: scores become ``softcap * tanh(scores / softcap)`` (arXiv:2408.00118, section 2).
        implementation: "pallas_tpu", "pallas_gpu", "mosaic_gpu", "cudnn", "xla" or "reference"; see
            ``pallas_kernels._dispatch``.

    Returns:
        The attention output in ``q.dtype``, and the logsumexp of each query's scores, sink included, in at least
        float32 (as is the softmax): minus infinity where a query sees nothing. Differentiable in q, k, v and sinks.
        The backward pass recomputes the probabilities from the logsumexp (arXiv:2205.14135).

    Raises:
        ValueError: the shapes do not match, one of a pair of arguments is missing, or a window or soft cap is not
            positive.
        NotImplementedError: the implementation does not support these arguments.
    """
    _check(q, k, v, q_positions, kv_positions, q_segment_ids, kv_segment_ids)
    if sinks is not None and sinks.shape != q.shape[2:3]:
        raise ValueError(f"flash_attention: {sinks.shape} sinks for {q.shape[2]} query heads; give one per head.")
    for name, value in (("window", window), ("softcap", softcap)):
        if value is not None and value <= 0:
            raise ValueError(f"flash_attention: {name} = {value}; give a positive number, or None for none.")
    axes = varying_axes(q, k, v, sinks, q_positions, kv_positions, q_segment_ids, kv_segment_ids)

    def widen(x: Array | None) -> Array | None:
        return None if x is None else vary_over(x, axes)

    out, lse = dispatch(
        "flash_attention",
        IMPLEMENTATIONS,
        implementation,
        vary_over(q, axes),
        vary_over(k, axes),
        vary_over(v, axes),
        widen(sinks),
        q_positions=widen(q_positions),
        kv_positions=widen(kv_positions),
        q_segment_ids=widen(q_segment_ids),
        kv_segment_ids=widen(kv_segment_ids),
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else scale,
        window=window,
        softcap=softcap,
    )
    return out, lse


def _check(
    q: Array,
    k: Array,
    v: Array,
    q_positions: Array | None,
    kv_positions: Array | None,
    q_segment_ids: Array | None,
    kv_segment_ids: Array | None,
) -> None:
    n, kv = q.shape[2], k.shape[2]
    if n % kv:
        legal = [i for i in range(1, n + 1) if n % i == 0]
        raise ValueError(f"flash_attention: {kv} kv heads do not divide {n} query heads; legal: {legal}.")
    for what, ours, theirs in (
        ("positions", q_positions, kv_positions),
        ("segment_ids", q_segment_ids, kv_segment_ids),
    ):
        if (ours is None) != (theirs is None):
            missing = "q" if ours is None else "kv"
            raise ValueError(f"flash_attention: {missing}_{what} is missing; give q_{what} and kv_{what}, or neither.")
    if q_positions is None and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"flash_attention: the causal mask of {q.shape[1]} queries and {k.shape[1]} keys is ambiguous; "
            "give q_positions and kv_positions."
        )
