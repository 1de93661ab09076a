"""Paged attention in plain JAX: each block of one request's tokens attends only to that request's pages.

A loop runs over the non-empty token blocks, and an inner loop over the slots that the block's request holds, or that
its sliding window reaches: work follows the tokens held, not the longest request or the page table's width. Pages are
read by their offsets in the whole pool, so no layer of it is ever copied. Decode tokens have blocks of their own, of
one token. Online softmax: arXiv:1805.02867.

Measured on two CPU cores, float32, 16 requests of 1,024 tokens in pages of 64, 4 kv heads: 4 ms a layer, 8 GB/s.
Gathering the pages of all requests at once, masked to the longest, takes 6 to 14.

Legend: L layers, P pages, K kv heads, C slots of a page, W elements of a slot, R requests, T tokens, N query heads, G
= N / K, H head dim of keys, V of values, I blocks of tokens, Q tokens of a block, M = G x Q rows, S slots read at
once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._pallas import MASK_VALUE
from pallas_kernels.paged_attention.pages import PageFormat, Slots
from pallas_kernels.paged_attention.ragged import RaggedBatch, TokenBlocks
from pallas_kernels.paged_attention.reference import write
from pallas_kernels.paged_attention.residual_window import Residual, ResidualStep
from pallas_kernels.paged_attention.retention import Retention, ScoreRule, by_scores, observes
from pallas_kernels.paged_attention.shadow.chosen_chunks import ShadowPages, over_chosen
from pallas_kernels.paged_attention.shared_pages import SoftmaxState
from pallas_kernels.paged_attention.tree_mask import TreeMask, hides

BLOCK_TOKENS = 64
"""Most tokens of a block."""
READ_SLOTS = 256, 64
"""Slots read at once: the first size while that many are left, then the second."""
MAX_READ_PAGES = 8
"""Most pages read at once: each is an instruction of its own."""
NOWHERE = 1 << 30
"""Position of a page that is none, see ``attend_to_some_pages``."""


def read_unit(page_size: int) -> int:
    """Slots that one instruction reads: a page, or a divisor of a large page."""
    return page_size if page_size <= READ_SLOTS[0] else math.gcd(page_size, READ_SLOTS[0])


_State = tuple[Array, Any]
"""Output of the rows so far, [T2, N, V]; scores of the entries where a rule chooses by them, or the logsumexp of the
rows so far, [T2, N], where a kernel reads the pages, else None."""


class _Problem(NamedTuple):
    pool: Slots
    layer: Int[Array, ""]
    sinks: Float[Array, " N"] | None
    ragged: RaggedBatch
    format: PageFormat
    scale: float
    window: int | None
    softcap: float | None
    retention: Retention | None
    residual: ResidualStep | None
    tree: TreeMask | None
    heads: int
    common: tuple[Int[Array, " R"], SoftmaxState] | None = None
    """Shared pages of each request, and the softmax over them of each row, [T K G *]."""
    without_pages: bool = False
    """A kernel reads the encoded pages: the tokens in full precision alone are read."""
    places: Int[Array, "R J"] | None = None
    """Position of the first slot of each page of the table, where it is not that of a request's whole context."""

    @property
    def wants_logsumexp(self) -> bool:
        """Whether the softmax is of a part of the keys."""
        return self.without_pages or self.places is not None


def paged_attention_xla(
    q: Float[Array, "T N H"],
    new: Slots,
    pool: Slots,
    layer: Int[Array, ""],
    sinks: Float[Array, " N"] | None,
    ragged: RaggedBatch,
    *,
    format: PageFormat,
    scale: float,
    window: int | None,
    softcap: float | None,
    decode_only: bool,
    retention: Retention | None = None,
    residual: Residual | None = None,
    tree: TreeMask | None = None,
    shared: Int[Array, " R"] | None = None,
    turn: Any = None,
) -> tuple[Float[Array, "T N V"], Slots]:
    """Paged attention in plain JAX: (output, pages); see ``paged_attention``."""
    t, n, _ = q.shape
    step = None if residual is None else ResidualStep(residual, new.data, format, window, turn)
    if step is None:
        pool = write(pool, new, layer, ragged, ragged.tokens(t), retention)
    else:
        with jax.named_scope("kv_write"):
            pool = step.encode_pages(pool, layer, ragged)
    size = min(BLOCK_TOKENS, t)
    if tree is not None:
        tree = tree._replace(hidden=jnp.pad(tree.hidden, ((0, size), (0, 0))))
    problem = _Problem(pool, layer, sinks, ragged, format, scale, window, softcap, retention, step, tree, n)
    if shared is not None:
        problem = problem._replace(common=(shared, _over_shared_pages(problem, q, shared)))
    # A block at the end of the batch may reach beyond it. The output is made from q to vary over the same mesh axes.
    q = jnp.pad(q, ((0, size), (0, 0), (0, 0)))
    out = jnp.broadcast_to(jnp.zeros_like(q[:, :, :1]), (t + size, n, format.value_dim))
    state = out, pool.scores
    alone = jnp.where(ragged.lengths == 1, 1, 0)
    state = _attend(problem, q, state, ragged.blocks(t, 1, alone), 1)
    if not decode_only and t > 1:
        state = _attend(problem, q, state, ragged.blocks(t, size, jnp.where(alone == 1, 0, ragged.lengths)), size)
    out, scores = state
    pool = pool._replace(scores=scores)
    if step is not None:
        # After the ring buffers have been read: otherwise XLA copies them.
        out, recent = jax.lax.optimization_barrier((out, pool.recent))
        with jax.named_scope("kv_write"):
            pool = step.write_ring(pool._replace(recent=recent), layer, ragged, ragged.tokens(t))
    return out[:t], pool


def attend_in_full_precision(
    q: Float[Array, "T N H"],
    step: ResidualStep,
    pool: Slots,
    layer: Int[Array, ""],
    sinks: Float[Array, " N"] | None,
    ragged: RaggedBatch,
    *,
    format: PageFormat,
    scale: float,
    window: int | None,
    softcap: float | None,
    decode_only: bool,
) -> tuple[Float[Array, "T N V"], Float[Array, "T N"]]:
    """(output, logsumexp) over the tokens in full precision alone, float32; see ``two_phases.with_residual_window``.

    The logsumexp is ``-MASK_VALUE`` where there is none, and for padding.
    """
    problem = _Problem(
        pool, layer, sinks, ragged, format, scale, window, softcap, None, step, None, q.shape[1], without_pages=True
    )
    return _over_a_part(problem, q.astype(jnp.float32), decode_only)


def attend_to_some_pages(
    q: Float[Array, "T N H"],
    pool: Slots,
    layer: Int[Array, ""],
    ragged: RaggedBatch,
    places: Int[Array, "R J"],
    *,
    format: PageFormat,
    scale: float,
    window: int | None,
    softcap: float | None,
    decode_only: bool,
) -> tuple[Float[Array, "T N V"], Float[Array, "T N"]]:
    """(output, logsumexp) over some of the pages of each request, in at least float32; writes nothing.

    The logsumexp is ``-MASK_VALUE`` where a row sees nothing, and for padding.

    Args:
        ragged: with a page table of these pages, in the order of their positions.
        places: position of the first slot of each; ``NOWHERE`` behind the last one.
    """
    problem = _Problem(
        pool, layer, None, ragged, format, scale, window, softcap, None, None, None, q.shape[1], places=places
    )
    return _over_a_part(problem, q.astype(jnp.promote_types(q.dtype, jnp.float32)), decode_only)


def _over_a_part(
    problem: _Problem, q: Float[Array, "T N H"], decode_only: bool
) -> tuple[Float[Array, "T N V"], Float[Array, "T N"]]:
    """(output, logsumexp) of all rows of a problem that is a part of another."""
    (t, n, _), ragged = q.shape, problem.ragged
    size = min(BLOCK_TOKENS, t)
    q = jnp.pad(q, ((0, size), (0, 0), (0, 0)))
    out = jnp.broadcast_to(jnp.zeros_like(q[:, :, :1]), (t + size, n, problem.format.value_dim))
    state = out, jnp.full_like(q[:, :, 0], -MASK_VALUE)
    alone = jnp.where(ragged.lengths == 1, 1, 0)
    state = _attend(problem, q, state, ragged.blocks(t, 1, alone), 1)
    if not decode_only and t > 1:
        state = _attend(problem, q, state, ragged.blocks(t, size, jnp.where(alone == 1, 0, ragged.lengths)), size)
    return state[0][:t], state[1][:t]


def _attend(problem: _Problem, q: Float[Array, "T2 N H"], state: _State, blocks: TokenBlocks, size: int) -> _State:
    """The state with the output of these blocks' rows, and what they add to scores; blocks have ``size`` tokens."""
    kv = problem.pool.data.shape[2]
    rule = None if problem.retention is None else by_scores(problem.retention.rule)

    def put(rows: Array, values: Array, block: TokenBlocks) -> Array:
        """Rows with those of a block replaced."""
        before = jax.lax.dynamic_slice_in_dim(rows, block.first, size)
        there = (jnp.arange(size) < block.tokens).reshape(-1, *(1,) * (rows.ndim - 1))
        values = jnp.where(there, values.astype(rows.dtype), before)
        return jax.lax.dynamic_update_slice_in_dim(rows, values, block.first, 0)

    def one(i: Array, state: _State) -> _State:
        out, scores = state
        block = jax.tree.map(lambda x: x[i] if x.ndim else x, blocks)
        part = _group(jax.lax.dynamic_slice_in_dim(q, block.first, size), kv)
        values, top, total = _block(problem, part, block, size)
        if rule is not None and rule.observed and scores is not None:
            scores = _collect(problem, rule, scores, part, block, top, total)
        if problem.wants_logsumexp and scores is not None:
            lse = jnp.where(total > 0.0, top + jnp.log(jnp.where(total > 0.0, total, 1.0)), -MASK_VALUE)
            scores = put(scores, _ungroup(lse, size)[..., 0], block)
        return put(out, _ungroup(values, size), block), scores

    return jax.lax.fori_loop(0, blocks.live, one, state)


def _collect(
    problem: _Problem,
    rule: ScoreRule,
    scores: Float[Array, "L P K 1 C"],
    q: Float[Array, "K M H"],
    block: TokenBlocks,
    top: Float[Array, "K M 1"],
    total: Float[Array, "K M 1"],
) -> Float[Array, "L P K 1 C"]:
    """Adds the softmax weights of a block's rows to the scores of the entries, in place.

    A second pass over the keys, after the softmax is known; none for a block without queries that the rule observes.
    """
    (_, m, _), (pages, kv, _, page_size), columns = q.shape, scores.shape[1:], problem.ragged.page_table.shape[1]
    assert problem.retention is not None
    size, unit = m * kv // problem.heads, read_unit(page_size)
    row = jnp.tile(jnp.arange(size), m // size)[:, None]
    position = block.position + row  # M 1
    counts = (row < block.tokens) & observes(rule, position)
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    q = q.astype(dtype) * problem.scale
    reach = problem.retention.columns[block.request] * page_size

    def more(many: int, first: Array, scores: Array) -> Array:
        held, at = _read(problem, block.request, first, many, jnp.zeros_like(reach), reach, dtype)
        assert at is not None
        at = at[:, None]
        weights = jnp.einsum("kmh,ksh->kms", q, problem.format.keys(held))
        if problem.softcap is not None:
            weights = problem.softcap * jnp.tanh(weights / problem.softcap)
        seen = counts & (at >= 0) & (at <= position)
        weights = jnp.where(seen, jnp.exp(weights - top) / jnp.where(total > 0.0, total, 1.0), 0.0)
        values = jnp.where(seen, rule.observe(weights, position), 0.0)
        values = jnp.max(values, axis=1) if rule.reduce == "max" else jnp.sum(values, axis=1)  # K S
        for j in range(many):
            column, within = (first + j) * unit // page_size, (first + j) * unit % page_size
            number = problem.ragged.page_table[block.request, jnp.minimum(column, columns - 1)]
            zero = jnp.zeros_like(number)
            place = problem.layer, jnp.clip(number, 0, pages - 1), zero, zero, within.astype(number.dtype)
            before = jax.lax.dynamic_slice(scores, place, (1, 1, kv, 1, unit))
            new = values[:, j * unit : (j + 1) * unit].reshape(before.shape).astype(scores.dtype)
            new = jnp.maximum(before, new) if rule.reduce == "max" else before + new
            scores = jax.lax.dynamic_update_slice(scores, new, place)
        return scores

    stop = jnp.where(jnp.any(counts), (reach + unit - 1) // unit, 0)
    return _over_pages(more, scores, jnp.zeros_like(stop), stop, unit)


def _block(
    problem: _Problem, q: Float[Array, "K M H"], block: TokenBlocks, size: int
) -> tuple[Float[Array, "K M V"], Float[Array, "K M 1"], Float[Array, "K M 1"]]:
    """Attention output of one block's rows; the maximum and the sum of their softmax."""
    kv, m, _ = q.shape
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    lowest = -0.5 * float(jnp.finfo(dtype).max)
    page_size = read_unit(problem.pool.data.shape[3])
    q = q.astype(dtype) * problem.scale
    form = problem.format
    if whole := size == 1:  # few rows: zero-padded queries cost less than slicing keys and values out of slots
        q = jnp.pad(q, ((0, 0), (0, 0), (0, form.width - form.key_dim)))
    position = jnp.tile(block.position + jnp.arange(size), m // size)[:, None]  # M 1
    reach = block.position + block.tokens
    first, hidden = block.position, None
    if (tree := problem.tree) is not None:
        first = jnp.minimum(first, tree.first[block.request])
        own = jax.lax.dynamic_slice_in_dim(tree.hidden, block.first, size)
        words = [jnp.tile(own[:, i], m // size)[:, None] for i in range(tree.words)]
        hidden = functools.partial(hides, words)
        behind = jnp.tile(tree._replace(hidden=own).behind, m // size)[:, None]
    begin = jnp.zeros_like(reach) if problem.window is None else jnp.maximum(first - problem.window + 1, 0)
    if (retention := problem.retention) is not None:  # slots are not in the order of positions: all are looked at
        begin, reach = jnp.zeros_like(reach), retention.columns[block.request] * problem.pool.data.shape[3]
    if problem.common is not None:
        begin = problem.common[0][block.request] * problem.pool.data.shape[3]
    encoded: Any = None
    if (step := problem.residual) is not None:
        found, whole_page = step.residual.found[block.request], problem.pool.data.shape[3]
        encoded = step.encoded(position + 1, found, whole_page)
        reach = step.encoded(reach, found, whole_page)
        begin = jnp.minimum(begin, reach)

    def more(pages: int, first: Array, state: Any) -> Any:
        """Online-softmax update by ``pages`` pages (or parts of one, see ``read_unit``) from number ``first`` on."""
        held, stored = _read(problem, block.request, first, pages, begin, reach, dtype)
        at = first * page_size + jnp.arange(pages * page_size) if stored is None else stored[:, None]
        seen = at <= position if encoded is None else (at <= position) & (at < encoded)
        if hidden is not None and tree is not None:
            seen &= ~hidden((at - tree.first[block.request]).astype(jnp.int32)[None])
        return update(state, held, at, seen)

    def in_full_precision(held: Array, at: Array, state: Any) -> Any:
        """Online-softmax update by tokens that are not in encoded pages; their positions are -1 where there is none."""
        there = (at >= 0) & (at >= begin)
        seen = there & (at <= position) & (at >= encoded)
        return update(state, jnp.where(there[:, None], held, 0).astype(dtype), at, seen)

    def update(state: Any, held: Array, at: Array, seen: Array) -> Any:
        top, total, out = state
        scores = jnp.einsum("kmh,ksh->kms", q, held if whole else form.keys(held))
        if problem.softcap is not None:
            scores = problem.softcap * jnp.tanh(scores / problem.softcap)
        if problem.window is not None:
            seen &= at > (position if hidden is None else position - behind) - problem.window
        if retention is not None:
            seen &= (at >= 0) & retention.rule.keep(at, position)
        scores = jnp.where(seen, scores, lowest)
        highest = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.exp(scores - highest)
        keep = jnp.exp(top - highest)
        total = total * keep + jnp.sum(weights, axis=-1, keepdims=True)
        values = held if whole else form.values(held)
        return highest, total, out * keep + jnp.einsum("kms,ksv->kmv", weights, values)

    zero = jnp.zeros_like(q[:, :, :1])
    # The running maximum starts at half the mask value, so masked scores get weight exp(mask / 2) = 0.
    top, total = zero + lowest / 2, zero
    if problem.sinks is not None:
        top, total = zero + jnp.repeat(problem.sinks.astype(dtype).reshape(kv, -1, 1), size, axis=1), zero + 1.0
    state = top, total, jnp.broadcast_to(zero, (kv, m, form.width if whole else form.value_dim))
    if problem.common is not None:
        state = tuple(SoftmaxState(*state).merged(jax.tree.map(lambda x: x[block.first], problem.common[1])))
    if form.kv_format.chunk:
        assert step is not None
        row = problem.ragged.page_table[block.request]
        pages = ShadowPages(problem.pool, problem.layer, row, form, step.turn, dtype)
        state = over_chosen(
            pages, q, position, encoded, begin, reach, size=size, softcap=problem.softcap, window=problem.window,
            update=update, state=state,
        )  # fmt: skip
    elif not problem.without_pages:
        start, stop = begin // page_size, (reach + page_size - 1) // page_size
        if problem.places is not None:
            places, whole_page = problem.places[block.request], problem.pool.data.shape[3]
            start = jnp.sum(places <= begin - whole_page, dtype=reach.dtype) * (whole_page // page_size)
            stop = jnp.sum(places < reach, dtype=reach.dtype) * (whole_page // page_size)
        state = _over_pages(more, state, start, stop, page_size)
    if step is not None:
        state = _over_residual(problem, step, block, size, in_full_precision, state)
    top, total, out = state
    return (form.values(out) if whole else out) / jnp.where(total > 0.0, total, 1.0), top, total


def _over_shared_pages(problem: _Problem, q: Float[Array, "T N H"], shared: Int[Array, " R"]) -> SoftmaxState:
    """Softmax of each row over the shared pages, which are read once; [T K G *], out with whole slots as values."""
    (t, n, _), kv, form = q.shape, problem.pool.data.shape[2], problem.format
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    lowest = -0.5 * float(jnp.finfo(dtype).max)
    q = jnp.pad(q.astype(dtype) * problem.scale, ((0, 0), (0, 0), (0, form.width - form.key_dim)))
    q = q.reshape(t, kv, n // kv, -1).swapaxes(0, 1).reshape(kv, t * (n // kv), -1)
    tokens = problem.ragged.tokens(t)
    member = jnp.repeat(tokens.real & (shared[tokens.request] > 0), n // kv)[:, None]
    leader = jnp.argmax(shared)
    unit, reach = read_unit(problem.pool.data.shape[3]), shared[leader] * problem.pool.data.shape[3]

    def more(pages: int, first: Array, state: SoftmaxState) -> SoftmaxState:
        held, _ = _read(problem, leader, first, pages, jnp.zeros_like(reach), reach, dtype)
        scores = jnp.einsum("kmh,ksh->kms", q, held)
        if problem.softcap is not None:
            scores = problem.softcap * jnp.tanh(scores / problem.softcap)
        seen = member & (first * unit + jnp.arange(pages * unit) < reach)
        scores = jnp.where(seen, scores, lowest)
        top = jnp.maximum(state.top, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.exp(scores - top)
        own = SoftmaxState(top, jnp.sum(weights, -1, keepdims=True), jnp.einsum("kms,ksv->kmv", weights, held))
        return state.merged(own)

    zero = jnp.zeros_like(q[:, :, :1])
    state = SoftmaxState(zero + lowest / 2, zero, jnp.zeros_like(q))
    state = _over_pages(more, state, jnp.zeros_like(reach), (reach + unit - 1) // unit, unit)
    return jax.tree.map(lambda x: x.reshape(kv, t, n // kv, -1).swapaxes(0, 1), state)


def _over_residual(
    problem: _Problem, step: ResidualStep, block: TokenBlocks, size: int, more: Callable[..., Any], state: Any
) -> Any:
    """Folds ``more(contents, positions, state)`` over the tokens in full precision: older ones, then the step's own."""
    state = more(*step.ring(problem.pool, problem.layer, problem.ragged, block.request), state)
    found, page_size = step.residual.found[block.request], problem.pool.data.shape[3]
    begin = problem.ragged.kv_lens[block.request] - problem.ragged.lengths[block.request]
    begin = jnp.maximum(begin, step.encoded(block.position + 1, found, page_size))
    steps = (block.position + block.tokens - begin + size - 1) // size

    def one(i: Array, state: Any) -> Any:
        held, at = step.new_tokens(problem.ragged, block.request, begin + i * size, size)
        return more(held, at, state)

    return jax.lax.fori_loop(0, steps, one, state)


def _over_pages(more: Callable[[int, Array, Any], Any], state: Any, first: Array, stop: Array, page_size: int) -> Any:
    """Folds ``more(pages, first, state)`` over a request's pages (or parts of pages): many at a time, then few."""
    for slots in READ_SLOTS:
        pages = min(max(1, slots // page_size), MAX_READ_PAGES)
        whole = slots != READ_SLOTS[-1]
        steps = (stop - first) // pages if whole else (stop - first + pages - 1) // pages
        step = functools.partial(
            lambda i, state, begin, pages: more(pages, begin + i * pages, state), begin=first, pages=pages
        )
        state = jax.lax.fori_loop(0, steps, step, state)
        first = first + steps * pages
    return state


def _read(
    problem: _Problem, request: Array, first: Array, count: int, begin: Array, reach: Array, dtype: Any
) -> tuple[Float[Array, "K S W"], Int[Array, "K S"] | None]:
    """Contents of some consecutive pages in ``dtype``, and the positions of their slots if those do not follow from
    their place: the stored ones, -1 where unused, or those of some of a request's pages, ``NOWHERE`` outside.

    The contents are zeros before slot ``begin`` and from ``reach`` on, and where no token is: slots outside may hold
    nan, and 0 * nan is nan.
    """
    (pages, kv, page_size, width), columns = problem.pool.data.shape[1:], problem.ragged.page_table.shape[1]
    form = problem.format
    size, cut = read_unit(page_size), jax.lax.dynamic_slice

    def page(j: int) -> tuple[Float[Array, "K C W"], Int[Array, "K C"] | None]:
        column, within = (first + j) * size // page_size, (first + j) * size % page_size
        number = problem.ragged.page_table[request, jnp.minimum(column, columns - 1)]
        number = jnp.clip(number, 0, pages - 1)  # unused entries may be anything
        zero = jnp.zeros_like(number)
        within = within.astype(number.dtype)
        starts = problem.layer, number, zero
        held = cut(problem.pool.data, (*starts, within, zero), (1, 1, kv, size, width))[0, 0]
        scales = None
        if form.scales:
            scales = cut(problem.pool.scales, (*starts, zero, within), (1, 1, kv, form.scales, size))[0, 0]
        channels = None
        if form.channels:
            channels = cut(problem.pool.channels, (*starts, zero, zero), (1, 1, kv, 1, form.channels))[0, 0]
        held = form.unpack(Slots(held, scales, channels=channels), dtype)
        at = (first + j) * size + jnp.arange(size)
        if problem.places is not None:
            place = jnp.where(column < columns, problem.places[request, jnp.minimum(column, columns - 1)], NOWHERE)
            at = place + within + jnp.arange(size)
        there = (at >= begin) & (at < reach)
        if problem.places is not None:
            return jnp.where(there[:, None], held, 0), jnp.broadcast_to(jnp.where(there, at, NOWHERE), (kv, size))
        if problem.retention is None:
            return jnp.where(there[:, None], held, 0), None
        stored = cut(problem.pool.positions, (*starts, zero, within), (1, 1, kv, 1, size))[0, 0, :, 0]
        stored = jnp.where(there, stored, -1)
        return jnp.where((stored >= 0)[..., None], held, 0), stored

    held, stored = zip(*(page(j) for j in range(count)), strict=True)
    return jnp.concatenate(held, axis=1), None if stored[0] is None else jnp.concatenate(stored, axis=1)


def _group(x: Float[Array, "Q N H"], kv_heads: int) -> Float[Array, "K M H"]:
    size, _, h = x.shape
    return x.reshape(size, kv_heads, -1, h).transpose(1, 2, 0, 3).reshape(kv_heads, -1, h)


def _ungroup(x: Float[Array, "K M V"], size: int) -> Float[Array, "Q N V"]:
    kv, _, v = x.shape
    return x.reshape(kv, -1, size, v).transpose(2, 0, 1, 3).reshape(size, -1, v)
