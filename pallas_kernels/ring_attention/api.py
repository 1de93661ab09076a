"""Ring attention: public operation and its implementations, for context parallelism.

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
from pallas_kernels.ring_attention.xla import RingConfig, ring_attention_xla


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
    layout: Layout | None = "zigzag",
    segment_ids: Int[Array, "B S"] | None = None,
    positions: Int[Array, "B S"] | None = None,
    ring_sizes: tuple[int, ...] = (),
    ring: Int[Array, ""] | None = None,
    sinks: Float[Array, " N"] | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    implementation: Implementation = None,
) -> Float[Array, "B S N V"]:
    """Ring attention: ``flash_attention`` of a sequence split over a mesh axis (arXiv:2310.01889), inside
    ``jax.shard_map``.

    A key is visible to a query when its position in the whole sequence is no later (causal), not further back than the
    sliding window, and both have the same segment id; segment 0 is padding. The layout determines which positions a
    shard holds.

    With ``ring_sizes``, the axis is divided into rings of one of these sizes, each of neighbouring devices, which do
    not communicate with other rings. Which size is an argument of the program: it contains them all, as branches of
    a conditional, and runs one. In rings of one device nothing is sent.

    Args:
        q, k, v: this shard's tokens; K divides N. They vary over ``axis``.
        axis: mesh axis over which the sequence is split.
        layout: sequence layout, see ``pallas_kernels.ring_attention.layout``; None: ``positions`` are given.
        segment_ids: segment ids of this shard's tokens.
        positions: of this shard's tokens within their segments, in place of a layout. A shard has the tokens of each
            segment in order.
        ring_sizes: numbers of devices of a ring, divisors of the axis; empty: one ring of all.
        ring: index of the ring size in use, the same on all devices.
        sinks, scale, window, softcap: as in ``flash_attention``.
        implementation: "pallas_tpu", "xla", or "reference", which all-gathers the keys; see
            ``pallas_kernels._dispatch``.

    Returns:
        The attention output in ``q.dtype``, accumulated in at least float32. Differentiable in q, k, v and sinks. The
        residuals of the backward pass are the shard's own inputs, its output and one logsumexp per query and head,
        O(S).

    Raises:
        ValueError: q, k or v does not vary over ``axis``, the layout is unknown, or the shapes do not match.
        NotImplementedError: the implementation does not support these arguments.
    """
    if layout is not None and layout not in LAYOUTS:
        raise ValueError(f"ring_attention: layout = {layout!r}; choose from {', '.join(LAYOUTS)}.")
    if layout == "zigzag" and q.shape[1] % 2:
        raise ValueError(f"ring_attention: zigzag cannot halve a shard of {q.shape[1]} tokens; give an even number.")
    if (layout is None) == (positions is None) or (positions is not None and segment_ids is None):
        raise ValueError(
            "ring_attention: give either a layout, or layout = None with the positions and segment ids of tokens."
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if axis not in varying_axes(x):
            raise ValueError(
                f"ring_attention: {name} does not vary over the axis {axis!r} (it does over "
                f"{sorted(varying_axes(x))}); call inside jax.shard_map with the sequence split over that axis."
            )
    devices = jax.lax.axis_size(axis)
    if bool(ring_sizes) != (ring is not None) or any(size < 1 or devices % size for size in ring_sizes):
        raise ValueError(
            f"ring_attention: ring_sizes = {ring_sizes} of an axis of {devices} devices; give divisors of it with the "
            "index of the one in use as ring, or neither."
        )
    for name, value in (("window", window), ("softcap", softcap)):
        if value is not None and value <= 0:
            raise ValueError(f"ring_attention: {name} = {value}; give a positive number, or None for none.")
    axes = varying_axes(q, k, v, segment_ids, positions, sinks)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    sizes = ring_sizes or (devices,)
    return dispatch(
        "ring_attention",
        IMPLEMENTATIONS,
        implementation,
        vary_over(q, axes),
        vary_over(k, axes),
        vary_over(v, axes),
        None if segment_ids is None else vary_over(segment_ids, axes),
        None if positions is None else vary_over(positions, axes),
        None if sinks is None else vary_over(sinks, axes),
        rings=tuple(RingConfig(axis, size, devices, layout, scale, window, softcap) for size in sizes),
        which=ring,
    )
