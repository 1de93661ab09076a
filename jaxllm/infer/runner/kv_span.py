"""KV span (DistAttention, Infinite-LLM, arXiv:2401.02669): pages of one request lie on several devices of a replica.

Page number p of a replica is on device p mod N of its N devices along ``context``, as page p div N of that device's
pool. The page allocator gives any page to any request, so a context may be longer than the pool of one device. In each
layer all devices get the queries of a step; a device writes the keys and values whose pages it has, attends to those
pages alone, and the parts are joined by their logsumexp (arXiv:2311.01282), as the paper's micro-attentions are.

The paper's devices are instances of a cluster, and a global manager moves blocks between them; here they are devices of
one program, and pages stay where they are.

Legend: R requests, J columns of a page table, T tokens, N query heads of a shard, K kv heads, H head dim of keys, V of
values, P pages of a device, C slots of a page.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import sharding
from pallas_kernels._pallas import MASK_VALUE
from pallas_kernels.paged_attention import PageFormat, Slots
from pallas_kernels.paged_attention.ragged import RaggedBatch
from pallas_kernels.paged_attention.reference import write
from pallas_kernels.paged_attention.xla import NOWHERE, attend_to_some_pages

Axes = tuple[str, ...]
"""Mesh axes that the pages of a replica are spread over."""


def span_axes() -> Axes:
    """Mesh axes that the pages of a replica are spread over, by the rules in force; empty: each device has all."""
    replicas = sharding.axis_names("batch")
    return tuple(axis for axis in sharding.axis_names("pages") if axis not in replicas)


def own_pages(pages: Int[Array, "*any"], count: int, axes: Axes) -> Int[Array, "*any"]:
    """Number of each page in this device's pool of ``count`` pages; ``count``, out of range, where it has none.

    Args:
        pages: page numbers of a replica; others out of range.
    """
    if not axes:
        return pages
    devices = jax.lax.axis_size(axes)
    here = (pages >= 0) & (pages < devices * count) & (pages % devices == jax.lax.axis_index(axes))
    return jnp.where(here, pages // devices, count)


def span_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K V"],
    pool: Slots,
    layer: Int[Array, ""],
    ragged: RaggedBatch,
    sinks: Float[Array, " N"] | None,
    *,
    format: PageFormat,
    scale: float,
    window: int | None,
    softcap: float | None,
    decode_only: bool,
    axes: Axes,
) -> tuple[Float[Array, "T N V"], Slots]:
    """Attention output over the pages of all devices, and this device's updated pages; see ``paged_attention``."""
    count, size = pool.data.shape[1], pool.data.shape[3]
    first = jnp.arange(ragged.page_table.shape[1], dtype=jnp.int32) * size
    numbers = jnp.where(first < ragged.kv_lens[:, None], own_pages(ragged.page_table, count, axes), count)
    own = ragged._replace(page_table=numbers)
    pool = write(pool, format.pack(k, v, pool.data.dtype), layer, own, own.tokens(len(q)))
    order = jnp.argsort(numbers == count, axis=1, stable=True)  # this device's pages before all others
    table = jnp.take_along_axis(numbers, order, axis=1)
    places = jnp.where(table == count, NOWHERE, first[order])
    out, lse = attend_to_some_pages(
        q, pool, layer, own._replace(page_table=table), places, format=format, scale=scale, window=window,
        softcap=softcap, decode_only=decode_only,
    )  # fmt: skip
    return joined(out, lse, sinks, axes).astype(q.dtype), pool


def joined(
    out: Float[Array, "T N V"], lse: Float[Array, "T N"], sinks: Float[Array, " N"] | None, axes: Axes
) -> Float[Array, "T N V"]:
    """Attention output over the keys of all devices, of the output and the logsumexp over those of each.

    Args:
        lse: ``-MASK_VALUE`` where a device has seen nothing.
        sinks: attention sinks, which count once.
    """
    lse = jnp.where(lse == -MASK_VALUE, -jnp.inf, lse)
    top = jax.lax.pmax(lse, axes)
    if sinks is not None:
        top = jnp.maximum(top, sinks.astype(lse.dtype))
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(lse - top)
    total = jax.lax.psum(weights, axes)
    if sinks is not None:
        total = total + jnp.exp(sinks.astype(lse.dtype) - top)
    out = jax.lax.psum(jnp.where(weights[..., None] > 0, out, 0) * weights[..., None], axes)
    return out / jnp.where(total > 0, total, 1.0)[..., None]
