"""Reference paged attention: one softmax over all slots of a request; defines the operation.

Legend: L layers, P pages, K kv heads, C slots of a page, W elements of a slot, R requests, J columns of the page
table, T tokens, S = J x C positions, N query heads, G = N / K, H head dim of keys, V of values.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.paged_attention.pages import PageFormat, Slots
from pallas_kernels.paged_attention.ragged import RaggedBatch, TokenRows
from pallas_kernels.paged_attention.residual_window import Residual, ResidualStep, in_full_precision
from pallas_kernels.paged_attention.retention import Retention, ScoreRule, by_scores, observes, write_retained
from pallas_kernels.paged_attention.shadow.chosen_chunks import chosen_tokens
from pallas_kernels.paged_attention.tree_mask import BITS, TreeMask


def write(
    held: Slots,
    new: Slots,
    layer: Int[Array, ""],
    ragged: RaggedBatch,
    tokens: TokenRows,
    retention: Retention | None = None,
) -> Slots:
    """KV cache update: writes each token of this step to its slot; padding is dropped.

    Every dimension in front of the written rows, and of the written scales, has an index. Of windows whose dimensions
    are apart, such as kv heads and elements, the TPU compiler would make a scatter into a copy of the whole pool in
    another memory layout.
    """
    with jax.named_scope("kv_write"):
        if retention is not None:
            return write_retained(held, new, layer, ragged, tokens, retention)
        page, slot = ragged.slots(held.data.shape[1], held.data.shape[3], tokens)
        heads = jnp.arange(held.data.shape[2])
        rows = held.data.at[layer, page[:, None], heads, slot[:, None]]
        data = rows.set(new.data, mode="drop", unique_indices=True)
        if held.scales is None:
            return Slots(data)
        words = jnp.arange(held.scales.shape[3])
        scales = held.scales.at[layer, page[:, None, None], heads[:, None], words, slot[:, None, None]]
        return Slots(data, scales.set(new.scales, mode="drop", unique_indices=True))


def paged_attention_reference(
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
    """Reference paged attention: (output, pages); materialises every token's scores, in at least float32.

    See ``paged_attention``.
    """
    del decode_only, shared  # promises that save nothing here
    (t, n, h), (pages, kv) = q.shape, pool.data.shape[1:3]
    tokens = ragged.tokens(t)
    step = None if residual is None else ResidualStep(residual, new.data, format, window, turn)
    pool = (
        write(pool, new, layer, ragged, tokens, retention) if step is None else step.encode_pages(pool, layer, ragged)
    )
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    position = tokens.position[:, None, None]  # T 1 1
    grouped, chosen = q.reshape(t, kv, n // kv, h).astype(dtype), None
    at = layer, jnp.clip(ragged.page_table, 0, pages - 1)
    if format.kv_format.chunk:
        assert step is not None
        behind = step.encoded(position[..., 0] + 1, step.residual.found[tokens.request][:, None], pool.data.shape[3])
        first = jnp.zeros_like(behind) if window is None else position[..., 0] - window + 1
        held, chosen = chosen_tokens(
            pool, layer, at[1], tokens.request, grouped * scale, behind, first, format, turn, softcap
        )
    else:
        held = format.unpack(Slots(*(None if x is None else x[at] for x in pool.in_pages())), dtype)  # R J K C W
        held = held.swapaxes(2, 3).reshape(ragged.requests, -1, kv, format.width)
    # Slots that hold no token may hold nan, and 0 * nan is nan.
    if retention is None:
        at = jnp.arange(held.shape[1])[None, :, None]
        used = at < ragged.kv_lens[:, None, None]
        if window is not None:
            first = ragged.kv_lens - ragged.lengths if tree is None else _first_position(ragged, tree)
            used &= at > first[:, None, None] - window
        visible = at <= position
        if tree is not None:
            visible &= ~_hidden(tree, tokens, held.shape[1])[..., None]
            position = position - tree.behind[:, None, None]
    else:
        at = pool.positions[layer, jnp.clip(ragged.page_table, 0, pages - 1), :, 0]  # R J K C
        at = at.swapaxes(2, 3).reshape(ragged.requests, -1, kv)
        used = retention.used(at, held.shape[1] // ragged.page_table.shape[1])
        at = at[tokens.request]
        visible = used[tokens.request] & (at <= position) & retention.rule.keep(at, position)
    held = jnp.where(used[..., None], held, 0)[tokens.request]  # T S K W
    if step is not None:  # which of the two a token is read from differs between queries
        found, size = step.residual.found[tokens.request][:, None, None], pool.data.shape[3]
        encoded = at < step.encoded(position + 1, found, size)
        whole, there = in_full_precision(pool, step, layer, ragged, ragged.page_table.shape[1])
        whole = jnp.where(there[..., None, None], whole.astype(dtype), 0)[tokens.request]
        held = jnp.where(encoded[..., None], held, whole)
        visible = visible if chosen is None else visible & (chosen | ~encoded)
        pool = step.write_ring(pool, layer, ragged, tokens)
    visible &= tokens.real[:, None, None]
    if window is not None:
        visible &= at > position - window

    scores = jnp.einsum("tkgh,tskh->tkgs", grouped, format.keys(held)) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(visible.swapaxes(1, 2)[:, :, None], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    sink = None if sinks is None else sinks.astype(dtype).reshape(kv, -1, 1)
    if sink is not None:
        top = jnp.maximum(top, sink)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink - top)
    weights = weights / jnp.where(total == 0.0, 1.0, total)
    if retention is not None and (rule := by_scores(retention.rule)) is not None and rule.observed:
        pool = _collect(pool, weights, layer, ragged, tokens, rule)
    out = jnp.einsum("tkgs,tskv->tkgv", weights, format.values(held))
    out = jnp.where(tokens.real[:, None, None], out.reshape(t, n, -1), 0.0)
    return out.astype(q.dtype), pool


def _first_position(ragged: RaggedBatch, tree: TreeMask) -> Int[Array, " R"]:
    """Least position of each request's tokens of this step; every token of a tree is behind those before it."""
    return jnp.minimum(ragged.kv_lens - ragged.lengths, tree.first)


def _hidden(tree: TreeMask, tokens: TokenRows, slots: int) -> Bool[Array, "T S"]:
    """Slots of its request that are hidden from each token."""
    at = jnp.arange(slots, dtype=jnp.int32) - tree.first[tokens.request][:, None]
    inside = (at >= 0) & (at < tree.words * BITS)
    at = jnp.clip(at, 0, tree.words * BITS - 1)
    words = jnp.take_along_axis(tree.hidden, at // BITS, axis=1)
    return inside & (jax.lax.shift_right_logical(words, at % BITS) & 1 != 0)


def _collect(
    pool: Slots,
    weights: Float[Array, "T K G S"],
    layer: Int[Array, ""],
    ragged: RaggedBatch,
    tokens: TokenRows,
    rule: ScoreRule,
) -> Slots:
    """Adds the softmax weights of a step's queries to the scores of the entries, see ``ScoreRule``."""
    pages, kv, size = pool.data.shape[1:4]
    counts = (tokens.real & observes(rule, tokens.position))[:, None, None, None]
    values = rule.observe(weights, tokens.position[:, None, None, None])
    values = jnp.where(counts, values, 0.0)
    reduce = jnp.max if rule.reduce == "max" else jnp.sum
    combine = jax.ops.segment_max if rule.reduce == "max" else jax.ops.segment_sum
    found = combine(reduce(values, axis=2), tokens.request, ragged.requests)  # R K S
    found = jnp.maximum(found, 0.0).reshape(ragged.requests, kv, -1, size).swapaxes(1, 2).astype(jnp.float32)
    table = jnp.clip(ragged.page_table, 0, pages - 1)
    scores = pool.scores.at[layer, table, :, 0]
    return pool._replace(scores=scores.max(found) if rule.reduce == "max" else scores.add(found))
