"""Retention: which tokens a KV cache keeps, and where their slots are once others have left.

Without a rule, the token at position i of a request is in slot i of its pages, in order. A retention rule lets entries
leave the cache; new tokens take the slots that have become free, so a slot's index says nothing about its token. The
pool then stores the position of the token in each slot, for each layer and kv head by itself, and attention masks by
stored positions. A slot without a token has position -1.

A rule may choose by scores, which attention collects: the softmax weights of some queries, reduced to one number per
entry and kv head. Entries then leave, and the others are moved together, between two steps (``evict``), at positions
that the rule names; what a query attends to does not depend on how a prompt was split into chunks, as long as chunks
end there.

Legend: L layers, P pages, K kv heads, C slots of a page, R requests, J columns of the page table, S = J x C slots of a
request, T tokens, M query rows of a kv head.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.paged_attention.pages import Slots
from pallas_kernels.paged_attention.ragged import RaggedBatch, TokenRows


@runtime_checkable
class RetentionRule(Protocol):
    """Policy that decides which tokens leave the KV cache; a hashable value.

    What a query attends to depends on positions alone, never on how a prompt was split into chunks, so recomputing
    after a preemption changes nothing.
    """

    def keep(self, entries: Int[Array, "..."], query: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Whether the query at position ``query`` still finds the entries at these positions, all at most its own.

        An entry that one query does not find, no later query finds: it has left.
        """
        ...

    def capacity(self, length: int) -> int:
        """Most entries before position ``length`` that the query at ``length`` finds; called on the host."""
        ...


@runtime_checkable
class ScoreRule(RetentionRule, Protocol):
    """Retention rule that chooses entries by scores; a query finds all entries that have not been evicted.

    Scores begin at 0, or at what ``Slots.scores`` of the new tokens say, and collect the values of ``observe``.
    """

    @property
    def interval(self) -> int:
        """Entries leave at positions that are multiples of it."""
        ...

    @property
    def observed(self) -> int:
        """Number of queries before such a position whose attention weights are collected; 0: none are."""
        ...

    @property
    def reduce(self) -> Literal["max", "sum"]:
        """Reduction of the values of several queries and query heads."""
        ...

    @property
    def forgets(self) -> bool:
        """Whether scores begin anew after each eviction."""
        ...

    def observe(self, weights: Float[Array, "*any S"], queries: Int[Array, "..."]) -> Float[Array, "*any S"]:
        """Values that a query's softmax weights of S entries add to the scores of those; ``queries`` are positions."""
        ...

    def choose(
        self, scores: Float[Array, "K S"], entries: Int[Array, "K S"], used: Bool[Array, "K S"], length: Int[Array, ""]
    ) -> Bool[Array, "K S"]:
        """Chooses the entries that stay when ``length`` tokens have been computed.

        Args:
            scores, entries: score and position of each slot's entry.
            used: whether a slot holds an entry; the others are not kept whatever is returned.
            length: tokens so far, a multiple of ``interval``.
        """
        ...


def by_scores(rule: RetentionRule | None) -> ScoreRule | None:
    """The rule if it chooses by scores, else None."""
    return rule if isinstance(rule, ScoreRule) else None


def observes(rule: ScoreRule, positions: Int[Array, "*any"]) -> Bool[Array, "*any"]:
    """Whether the queries at these positions are among those whose weights are collected."""
    return positions % rule.interval >= rule.interval - rule.observed


class Retention(NamedTuple):
    """Retention of a step.

    Attributes:
        rule: retention rule; static.
        columns: pages of each request, in the first columns of its row of the page table; no other request has them.
    """

    rule: Any
    columns: Int[Array, " R"]

    def used(self, positions: Int[Array, "R S K"], page_size: int) -> Bool[Array, "R S K"]:
        """Whether each slot is on a page of its request and holds a token."""
        slots = jnp.arange(positions.shape[1], dtype=jnp.int32)
        return (slots < self.columns[:, None] * page_size)[..., None] & (positions >= 0)


def write_retained(
    held: Slots, new: Slots, layer: Int[Array, ""], ragged: RaggedBatch, tokens: TokenRows, retention: Retention
) -> Slots:
    """KV cache update under a retention rule: entries that have left make room, then each token takes a free slot.

    Entries at positions of this step or later leave too: they were written for tokens that have been refused.
    """
    pages, kv, size = held.data.shape[1:4]
    table = jnp.clip(ragged.page_table, 0, pages - 1)
    at = held.positions[layer, table, :, 0].swapaxes(2, 3).reshape(ragged.requests, -1, kv)  # R S K
    first = (ragged.kv_lens - ragged.lengths)[:, None, None]
    stays = retention.used(at, size) & (at < first) & retention.rule.keep(at, first)
    at = jnp.where(stays, at, -1)
    own = (jnp.arange(at.shape[1], dtype=jnp.int32) < retention.columns[:, None] * size)[..., None]
    # Free slots first, in order; the i-th token of a request takes the i-th.
    order = jnp.argsort(jnp.where(own & (at < 0), 0, 1), axis=1, stable=True).astype(jnp.int32)
    row = jnp.maximum(tokens.position - first[tokens.request, 0, 0], 0)
    slot = order[tokens.request, jnp.minimum(row, at.shape[1] - 1)]  # T K
    heads = jnp.arange(kv, dtype=jnp.int32)
    active = (ragged.lengths > 0) & (ragged.kv_lens >= ragged.lengths)
    real = tokens.real & active[tokens.request]
    request = jnp.where(real, tokens.request, ragged.requests)[:, None]
    at = at.at[request, slot, heads].set(tokens.position[:, None], mode="drop")
    page = jnp.where(real[:, None], table[tokens.request[:, None], slot // size], pages)
    within = slot % size
    data = held.data.at[layer, page, heads, within].set(new.data, mode="drop")
    scales = held.scales
    if scales is not None:
        words = layer, page[..., None], heads[:, None], jnp.arange(scales.shape[3])
        scales = scales.at[*words, within[..., None]].set(new.scales, mode="drop")
    columns = jnp.arange(table.shape[1], dtype=jnp.int32) < retention.columns[:, None]
    table = jnp.where(columns & active[:, None], table, pages)
    stored = at.reshape(ragged.requests, -1, size, kv).swapaxes(2, 3)
    positions, scores = held.positions.at[layer, table, :, 0].set(stored, mode="drop"), held.scores
    if scores is not None:
        begin = 0.0 if new.scores is None else new.scores.astype(scores.dtype)
        scores = scores.at[layer, page, heads, 0, within].set(begin, mode="drop")
    return Slots(data, scales, positions, scores=scores)


def evict(
    pool: Slots, table: Int[Array, "R J"], columns: Int[Array, " R"], starts: Int[Array, " R"], rule: ScoreRule
) -> tuple[Slots, Int[Array, "R 3"]]:
    """Eviction by scores: lets entries leave and moves the others to the first slots of their pages, in place.

    The entries of each layer and kv head keep their order. Requests are those whose tokens so far are a positive
    multiple of the rule's interval; the work is that of reading and writing their pages once, and nothing where there
    are none.

    Args:
        pool: pool of a group of layers.
        table: pages of each request.
        columns: number of pages of each request.
        starts: tokens of each request so far; 0 for requests that are to be left alone.
        rule: retention rule.

    Returns:
        The pool; and of each request the most entries of a layer and kv head that have stayed, -1 where nothing was to
        be evicted, the entries that have stayed in all layers and kv heads together, and those that have left.
    """
    layers, pages, kv, size = pool.data.shape[:4]
    due = (starts > 0) & (starts % rule.interval == 0)
    requests = jnp.nonzero(due, size=len(starts), fill_value=0)[0].astype(jnp.int32)
    here = jnp.arange(table.shape[1], dtype=jnp.int32)
    slots = jnp.arange(table.shape[1] * size, dtype=jnp.int32)

    def one(i: Array, state: tuple[Slots, Array]) -> tuple[Slots, Array]:
        pool, found = state
        request, layer = requests[i // layers], i % layers
        row = jnp.clip(table[request], 0, pages - 1)
        there = jnp.where(here < columns[request], row, pages)

        def by_slot(x: Array) -> Array:  # [K S *rest] of pages [J K C *rest]
            return x.swapaxes(0, 1).reshape(kv, len(slots), -1)

        def moved(x: Array) -> Array:  # pages of [K S *rest], in the new order
            found = jnp.take_along_axis(x, order[..., None], axis=1).reshape(kv, len(here), size, -1)
            return found.swapaxes(0, 1)

        def put(x: Array, pages: Array) -> Array:
            return x.at[layer, there].set(pages, mode="drop")

        at, score = (by_slot(x[layer, row].swapaxes(2, 3))[..., 0] for x in (pool.positions, pool.scores))
        used = (slots < columns[request] * size) & (at >= 0) & (at < starts[request])
        stays = used & rule.choose(score, at, used, starts[request])
        order = jnp.argsort(jnp.where(stays, 0, 1), axis=1, stable=True)
        count = jnp.sum(stays, axis=1, dtype=jnp.int32)
        at, score = jnp.where(stays, at, -1), jnp.zeros_like(score) if rule.forgets else score
        scales = pool.scales
        if scales is not None:
            scales = put(scales, moved(by_slot(scales[layer, row].swapaxes(2, 3))).swapaxes(2, 3))
        pool = pool._replace(
            data=put(pool.data, moved(by_slot(pool.data[layer, row]))),
            scales=scales,
            positions=put(pool.positions, moved(at[..., None]).swapaxes(2, 3)),
            scores=put(pool.scores, moved(score[..., None]).swapaxes(2, 3)),
        )
        most, all_kept = jnp.max(count), jnp.sum(count)
        before = found[request]
        now = jnp.stack([jnp.maximum(before[0], most), before[1] + all_kept, before[2] + jnp.sum(used) - all_kept])
        return pool, found.at[request].set(now.astype(jnp.int32))

    nothing = jnp.broadcast_to(jnp.asarray([-1, 0, 0], jnp.int32), (len(starts), 3))
    return jax.lax.fori_loop(0, jnp.sum(due, dtype=jnp.int32) * layers, one, (pool, nothing))
