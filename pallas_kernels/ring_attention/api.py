"""Ring attention: the operation, whoever computes it.

Legend: B batch, S tokens of a shard, N query heads, K kv heads, H head dim of keys, V of values.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_over, varying_axes
from pallas_kernels._dispatch import Implementation, dispatch
from pallas_kernels.ring_attention.layout import LAYOUTS, Layout
from pallas_kernels.ring_attention.reference import ring_attention_reference
from pallas_kernels.ring_attention.xla import ring_attention_xla


def _pallas_tpu(*args: Any, **kw: Any) -> Array:
    from pallas_kernels.ring_attention.pallas_tpu import ring_attention_pallas_tpu

    return ring_attention_pallas_tpu(*args, **kw)


IMPLEMENTATIONS = {"pallas_tpu": _pallas_tpu, "xla": ring_attention_xla, "reference": ring_attention_reference}


def ring_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    *,
    axis: str,
    layout: Layout = "zigzag",
    segment_ids: Int[Array, "B S"] | None = None,
    sinks: Float[Array, " N"] | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    implementation: Implementation = None,
) -> Float[Array, "B S N V"]:
    """``flash_attention`` of a sequence split over a mesh axis (arXiv:2310.01889), inside ``jax.shard_map``.

    A key is visible to a query when its place in the whole sequence is no later, not further back than the window, and
    both are in the same segment; segment 0 is padding. Which places a shard holds is the layout's to say.

    Args:
        q, k, v: this shard's tokens; K divides N. They vary over ``axis``.
        axis: mesh axis over which the sequence is split.
        layout: see ``pallas_kernels.ring_attention.layout``.
        segment_ids: this shard's.
        sinks, scale, window, softcap: as in ``flash_attention``.
        implementation: "pallas_tpu", "xla", or "reference", which gathers all keys; see ``pallas_kernels._dispatch``.

    Returns:
        The attended values in ``q.dtype``; sums in at least float32. Differentiable in q, k, v and sinks; for the
        gradient a shard keeps what it holds, its output and one number a query and head, O(S).

    Raises:
        ValueError: ``axis`` is not one that q, k and v vary over, an unknown layout, shapes that do not go together.
        NotImplementedError: the implementation does not support these arguments.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"ring_attention: layout = {layout!r}; choose from {', '.join(LAYOUTS)}.")
    if layout == "zigzag" and q.shape[1] % 2:
        raise ValueError(f"ring_attention: zigzag cannot halve a shard of {q.shape[1]} tokens; give an even number.")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if axis not in varying_axes(x):
            raise ValueError(
                f"ring_attention: {name} does not vary over the axis {axis!r} (it does over "
                f"{sorted(varying_axes(x))}); call inside jax.shard_map with the sequence split over that axis."
            )
    for name, value in (("window", window), ("softcap", softcap)):
        if value is not None and value <= 0:
            raise ValueError(f"ring_attention: {name} = {value}; give a positive number, or None for none.")
    axes = varying_axes(q, k, v, segment_ids, sinks)
    return dispatch(
        "ring_attention",
        IMPLEMENTATIONS,
        implementation,
        vary_over(q, axes),
        vary_over(k, axes),
        vary_over(v, axes),
        None if segment_ids is None else vary_over(segment_ids, axes),
        None if sinks is None else vary_over(sinks, axes),
        axis=axis,
        shards=jax.lax.axis_size(axis),
        layout=layout,
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else scale,
        window=window,
        softcap=softcap,
    )
