"""Retention: which tokens a KV cache keeps, and where their slots are once others have left.

Without a rule, the token at position i of a request is in slot i of its pages, in order. A retention rule lets entries
leave the cache; new tokens take the slots that have become free, so a slot's index says nothing about its token. The
pool then stores the position of the token in each slot, for each layer and kv head by itself, and attention masks by
stored positions. A slot without a token has position -1.

Legend: L layers, P pages, K kv heads, C slots of a page, R requests, J columns of the page table, S = J x C slots of a
request, T tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

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
        scales = scales.at[layer, page, heads, :, within].set(new.scales, mode="drop")
    columns = jnp.arange(table.shape[1], dtype=jnp.int32) < retention.columns[:, None]
    table = jnp.where(columns & active[:, None], table, pages)
    stored = at.reshape(ragged.requests, -1, size, kv).swapaxes(2, 3)
    return Slots(data, scales, held.positions.at[layer, table, :, 0].set(stored, mode="drop"))
