"""Paged attention: public operation and its implementations. A ragged batch attends to KV cache pages and updates them.

Legend: L layers, P pages, K kv heads, C slots of a page, W elements of a slot, R requests, J columns of the page
table, T tokens, N query heads, H head dim of keys, V of values.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_over, varying_axes
from pallas_kernels._dispatch import Implementation, dispatch
from pallas_kernels.paged_attention.kernel_support import check_positional
from pallas_kernels.paged_attention.pages import PagePool, Slots
from pallas_kernels.paged_attention.ragged import RaggedBatch
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.residual_window import Residual
from pallas_kernels.paged_attention.retention import Retention
from pallas_kernels.paged_attention.shadow.shadow_format import Turn
from pallas_kernels.paged_attention.shared_pages import check_shared
from pallas_kernels.paged_attention.tree_mask import TreeMask
from pallas_kernels.paged_attention.xla import paged_attention_xla


def _pallas_tpu(q: Array, new: Slots, pool: Slots, *args: Any, **kw: Any) -> tuple[Array, Slots]:
    from pallas_kernels.paged_attention.pallas_tpu import paged_attention_pallas_tpu

    check_positional("pallas_tpu", kw.pop("retention"))
    kw.pop("turn")  # of pages that are refused
    return paged_attention_pallas_tpu(q, new, pool, *args, **kw)


def _pallas_gpu(q: Array, new: Slots, pool: Slots, *args: Any, **kw: Any) -> tuple[Array, Slots]:
    from pallas_kernels.paged_attention.pallas_gpu import paged_attention_pallas_gpu

    check_positional("pallas_gpu", kw.pop("retention"))
    kw.pop("turn")  # of pages that are refused
    return paged_attention_pallas_gpu(q, new, pool, *args, **kw)


IMPLEMENTATIONS = {
    "pallas_tpu": _pallas_tpu,
    "pallas_gpu": _pallas_gpu,
    "xla": paged_attention_xla,
    "reference": paged_attention_reference,
}


def paged_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K V"] | None,
    pool: PagePool,
    layer: int | Int[Array, ""],
    page_table: Int[Array, "R J"],
    cu_q_lens: Int[Array, " R1"],
    kv_lens: Int[Array, " R"],
    *,
    sinks: Float[Array, " N"] | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    decode_only: bool = False,
    retention: Retention | None = None,
    residual: Residual | None = None,
    scores: Float[Array, "T K"] | None = None,
    tree: TreeMask | None = None,
    shared: Int[Array, " R"] | None = None,
    turn: Turn | None = None,
    implementation: Implementation = None,
) -> tuple[Float[Array, "T N V"], PagePool]:
    """Paged attention: writes a step's keys and values into their pages and attends to each request's context so far.

    The step is one flat ragged batch: the tokens of request 0, then those of request 1, and so on; each request has a
    prefill chunk, one decode token, or none. Rows behind the last token are padding. A request's tokens of this step
    are its last ones: token i of n is at position ``kv_len - n + i``. It sees the tokens of its request up to its own
    position.

    The pool is updated in place where it is donated, or carried by a loop. Slots that hold no token of a request may
    hold anything, nan included, and so may page table entries beyond a request's last page, or before its sliding
    window. Requests may share pages (prefix cache) that no request writes in this step.

    Args:
        q: queries, after RoPE, not scaled.
        k, v: keys and values of the same tokens, keys after RoPE; v is None where the pool's values are part of its
            keys (MLA latent).
        pool: page pool of all layers.
        layer: index of the layer.
        page_table: pages of each request, see ``RaggedBatch``; covers every request's kv_len.
        cu_q_lens: R + 1 cumulative lengths: where each request's tokens begin in the batch, and the number of all
            tokens.
        kv_lens: tokens of each request, those of this step included.
        sinks: attention sinks: a score per query head that is always visible and has no value, as in
            ``flash_attention``.
        scale: factor of the scores; ``1 / sqrt(H)`` when None. Required for an MLA latent.
        window: sliding window: a query sees its own position and the ``window - 1`` before it.
        softcap: soft cap: scores become ``softcap * tanh(scores / softcap)``.
        decode_only: a promise that no request has more than one token in this step; compiles a program without prefill.
        retention: retention rule, with which the pool has ``positions``, and slots are not in the order of positions;
            None: every token is kept.
        residual: ring buffers of the requests' latest tokens, where the pool's format encodes whole pages; else None.
        scores: with a retention rule that chooses by scores: those that the tokens' entries begin with; None: zeros.
        tree: tree mask: which slots of the step's draft trees a token does not see; None: causal attention alone. A
            sliding window is by positions, and at least as long as the deepest branch.
        shared: in a decode step: how many of each request's first pages are those of all requests with such pages, and
            read once for all of them, see ``shared_pages``: one number, or 0; no request writes to them. None: each
            request's pages are read for itself.
        turn: where the pool's format keeps keys as they are before RoPE: rotates keys [*any, H] as if they were
            Int[Array, "*any"] positions later; None: the model has no rotation.
        implementation: "pallas_tpu", "pallas_gpu", "xla" or "reference"; see ``pallas_kernels._dispatch``.

    Returns:
        The attention output in ``q.dtype``, zeros for padding, and the updated pool. The softmax is in at least
        float32.

    Raises:
        ValueError: the shapes do not match, or a window or soft cap is not positive, or a tree mask comes with a
            retention rule or ring buffers, or shared pages with more than decoding over plain pages.
        NotImplementedError: the implementation does not support these arguments.
    """
    _check(q, k, v, pool, page_table, cu_q_lens, kv_lens, sinks)
    if (retention is None) != (pool.positions is None):
        raise ValueError(
            "paged_attention: a retention rule and a pool with positions belong together; see PagePool.zeros."
        )
    if (residual is None) != (pool.recent is None) or (residual is not None and retention is not None):
        raise ValueError(
            "paged_attention: ring buffers belong to a pool whose pages are encoded as a whole, without a retention "
            "rule; see PagePool.zeros."
        )
    if turn is not None and not pool.format.kv_format.chunk:
        raise ValueError(f"paged_attention: turn is for keys without rotation, and {pool.format} holds rotated ones.")
    if tree is not None:
        _check_tree(tree, q, kv_lens, decode_only=decode_only, alone=retention is None and residual is None)
    if shared is not None:
        others = {"residual": residual, "tree": tree}
        check_shared(
            shared, kv_lens.shape[0], decode_only=decode_only, window=window, retention=retention, others=others
        )
    for name, value in (("window", window), ("softcap", softcap)):
        if value is not None and value <= 0:
            raise ValueError(f"paged_attention: {name} = {value}; give a positive number, or None for none.")
    if scale is None and pool.format.latent:
        raise ValueError(
            "paged_attention: give the scale: an MLA latent does not determine the head dim of its uncompressed keys."
        )
    ints = (jnp.asarray(layer, jnp.int32), *(x.astype(jnp.int32) for x in (page_table, cu_q_lens, kv_lens)))
    columns = None if retention is None else retention.columns.astype(jnp.int32)
    rings = None if residual is None else Residual(*(x.astype(jnp.int32) for x in residual))
    if scores is not None and pool.scores is None:
        raise ValueError("paged_attention: scores belong to a pool with scores; see PagePool.zeros.")
    arrays = (
        q,
        pool.format.pack(k, v, pool.rows.dtype)._replace(scores=scores),
        pool.slots,
        sinks,
        columns,
        rings,
        None if tree is None else TreeMask(*(x.astype(jnp.int32) for x in tree)),
        None if shared is None else shared.astype(jnp.int32),
        *ints,
    )
    axes = varying_axes(*jax.tree.leaves(arrays))
    widened: Any = jax.tree.map(lambda x: vary_over(x, axes), arrays)
    q, new, slots, sinks, columns, rings, tree, shared, layer, *ragged = widened
    out, slots = dispatch(
        "paged_attention",
        IMPLEMENTATIONS,
        implementation,
        q,
        new,
        slots,
        layer,
        sinks,
        RaggedBatch(*ragged),
        format=pool.format,
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else scale,
        window=window,
        softcap=softcap,
        decode_only=decode_only,
        retention=None if retention is None else Retention(retention.rule, columns),
        residual=rings,
        tree=tree,
        shared=shared,
        turn=turn,
    )
    return out, PagePool(slots.data, pool.format, *slots[1:])


def _check_tree(tree: TreeMask, q: Array, kv_lens: Array, *, decode_only: bool, alone: bool) -> None:
    if not alone:
        raise ValueError("paged_attention: a tree mask does not go with a retention rule, nor with ring buffers.")
    if decode_only:
        raise ValueError("paged_attention: a tree mask is for steps with prefill; decode_only promises single tokens.")
    if tree.hidden.shape[0] != q.shape[0] or not tree.words or tree.first.shape != kv_lens.shape:
        raise ValueError(
            f"paged_attention: a tree mask of {list(tree.hidden.shape)} words and {list(tree.first.shape)} slots for "
            f"{q.shape[0]} tokens of {kv_lens.shape[0]} requests; give words of each token and a slot of each request."
        )


def _check(
    q: Array,
    k: Array,
    v: Array | None,
    pool: PagePool,
    page_table: Array,
    cu_q_lens: Array,
    kv_lens: Array,
    sinks: Array | None,
) -> None:
    form = pool.format
    slots = (*pool.rows.shape[2:3], *pool.rows.shape[4:])
    if pool.rows.ndim != 5 or slots != (form.kv_heads, form.stored_width):
        raise ValueError(f"paged_attention: a pool {list(pool.rows.shape)} does not hold pages of {form}.")
    wanted = (*pool.rows.shape[:3], form.scales, pool.rows.shape[3]) if form.scales else None
    if pool.rows.dtype != form.stored(pool.rows.dtype) or wanted != getattr(pool.scales, "shape", None):
        found = "none" if pool.scales is None else list(pool.scales.shape)
        raise ValueError(
            f"paged_attention: a pool of {pool.rows.dtype} with scales {found} does not match {form}: "
            "see PagePool.zeros."
        )
    if (v is None) != form.latent:
        raise ValueError(f"paged_attention: v is {'missing' if v is None else 'given'}, and the pool holds {form}.")
    given = (q.shape[2], *k.shape[1:], *(() if v is None else v.shape[2:]))
    legal = (form.key_dim, form.kv_heads, form.key_dim, *(() if v is None else (form.value_dim,)))
    if given != legal:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)) if x is not None)
        raise ValueError(f"paged_attention: {shapes} do not fit pages of {form}.")
    if q.shape[1] % form.kv_heads:
        raise ValueError(f"paged_attention: {form.kv_heads} kv heads do not divide {q.shape[1]} query heads.")
    requests = kv_lens.shape[0]
    if page_table.shape[0] != requests or cu_q_lens.shape[0] != requests + 1:
        raise ValueError(
            f"paged_attention: for {requests} kv_lens there are {requests + 1} cu_q_lens and {requests} rows of the "
            f"page table, not {cu_q_lens.shape[0]} and {page_table.shape[0]}."
        )
    if 0 in (*q.shape, *pool.rows.shape, *page_table.shape):
        raise ValueError(
            f"paged_attention: q {list(q.shape)}, pool {list(pool.rows.shape)} and page table "
            f"{list(page_table.shape)} must not be empty."
        )
    if sinks is not None and sinks.shape[0] != q.shape[1]:
        raise ValueError(f"paged_attention: {sinks.shape[0]} sinks for {q.shape[1]} query heads; give one per head.")
