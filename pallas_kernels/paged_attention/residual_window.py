"""Residual window: the latest tokens of a sequence in full precision, in front of pages that are encoded as a whole.

A format such as KIVI's encodes a page at once, along its tokens. A page is encoded, and from then on read so, once
all of its tokens are behind the latest ``residual`` ones; whether a query reads it so depends on positions alone,
never on how a prompt was split into chunks. Until then its tokens are in a ring buffer of their sequence, float[L,
slots, K, B, W]: the token at position i is in place ``i % B``. Pages that were found in the prefix cache are read as
they are, whatever their positions: their tokens in full precision are not there.

Legend: L layers, P pages, K kv heads, C slots of a page, W values of a slot, T tokens, R requests, B places of a
ring buffer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.paged_attention.pages import PageFormat, Slots, stored
from pallas_kernels.paged_attention.ragged import RaggedBatch, TokenRows


class Residual(NamedTuple):
    """Residual windows of a step's requests.

    Attributes:
        slots: ring buffer of each request; out of range for a row without one.
        found: tokens of each request that were found in the prefix cache, a multiple of the page size.
    """

    slots: Int[Array, " R"]
    found: Int[Array, " R"]


def encoded_tokens(
    length: Int[Array, "..."], found: Int[Array, "..."], residual: int, page_size: int
) -> Int[Array, "..."]:
    """Tokens that are read from encoded pages, of a sequence of this length: whole pages behind the window."""
    return jnp.maximum(jnp.maximum(length - residual, 0) // page_size * page_size, found)


class ResidualStep(NamedTuple):
    """Residual windows as attention reads and writes them in one layer.

    Attributes:
        residual: ring buffers of the requests.
        rows: keys and values of the step's tokens, not encoded.
        form: format of the pages.
        window: sliding window of the layer, or None.
        turn: rotates keys, for formats that keep them unrotated; None: they have no rotation.
    """

    residual: Residual
    rows: Float[Array, "T K W"]
    form: PageFormat
    window: int | None
    turn: Any = None

    def encoded(self, length: Int[Array, "..."], found: Int[Array, "..."], page_size: int) -> Int[Array, "..."]:
        """See ``encoded_tokens``."""
        return encoded_tokens(length, found, self.form.kv_format.residual, page_size)

    def ring(
        self, held: Slots, layer: Int[Array, ""], ragged: RaggedBatch, request: Int[Array, ""]
    ) -> tuple[Float[Array, "K B W"], Int[Array, " B"]]:
        """(contents of a request's ring buffer as it was before the step, positions of its tokens; -1 for none)."""
        slot = jnp.clip(self.residual.slots[request], 0, held.recent.shape[1] - 1)
        _, slots, heads, places, width = held.recent.shape
        # As consecutive rows of two dimensions: of five, XLA lays all buffers out anew for a TPU7x, once for each loop.
        rows, first = held.recent.reshape(-1, width), (layer * slots + slot) * heads * places
        found = jax.lax.dynamic_slice(rows, (first, jnp.zeros_like(first)), (heads * places, width))
        found = found.reshape(heads, places, width)
        last = ragged.kv_lens[request] - ragged.lengths[request] - 1
        at = last - (last - jnp.arange(places, dtype=last.dtype)) % places
        return found, jnp.where((at >= self.residual.found[request]) & (last >= 0), at, -1)

    def encode_pages(self, held: Slots, layer: Int[Array, ""], ragged: RaggedBatch) -> Slots:
        """Pages with those that leave the windows in this step encoded; before the ring buffers are written to."""
        size, pages = held.data.shape[3], held.data.shape[1]
        before_step = ragged.kv_lens - ragged.lengths
        active = (ragged.lengths > 0) & (before_step >= 0)
        first = self.encoded(before_step, self.residual.found, size)
        if self.window is not None:  # pages behind a sliding window are free, and may be another request's
            first = jnp.maximum(first, jnp.maximum(before_step - self.window + 1, 0) // size * size)
        counts = (self.encoded(ragged.kv_lens, self.residual.found, size) - first) // size
        counts = jnp.where(active, jnp.maximum(counts, 0), 0)
        ends = jnp.cumsum(counts)

        def one(i: Array, encoded: Slots) -> Slots:
            request = jnp.clip(jnp.searchsorted(ends, i, side="right"), 0, ragged.requests - 1)
            column = first[request] // size + i - (ends[request] - counts[request])
            at = column * size + jnp.arange(size, dtype=column.dtype)
            old, _ = self.ring(held, layer, ragged, request)
            old = jnp.take(old, at % old.shape[1], axis=1)
            row = jnp.clip(at - ragged.offsets[request], 0, self.rows.shape[0] - 1)
            page = jnp.where((at < before_step[request])[:, None], old, self.rows[row].swapaxes(0, 1).astype(old.dtype))
            number = jnp.clip(ragged.page_table[request, column], 0, pages - 1)
            start = (layer, number, *(jnp.zeros_like(number),) * 3)
            parts = jax.tree.map(in_order, self.form.encode_page(page, at, self.turn))
            return jax.tree.map(lambda x, part: stored(x, part[None, None].astype(x.dtype), start), encoded, parts)

        return jax.lax.fori_loop(0, ends[-1], one, held.in_pages())._replace(recent=held.recent)

    def write_ring(self, held: Slots, layer: Int[Array, ""], ragged: RaggedBatch, tokens: TokenRows) -> Slots:
        """Ring buffers with the step's latest tokens; after everything that reads them."""
        buffers, places = held.recent.shape[1], held.recent.shape[3]
        latest = tokens.position >= ragged.kv_lens[tokens.request] - places
        active = (ragged.lengths > 0) & (ragged.kv_lens >= ragged.lengths)
        real = tokens.real & active[tokens.request] & latest
        slot = jnp.where(real, self.residual.slots[tokens.request], buffers)
        rows, heads = self.rows.astype(held.recent.dtype), jnp.arange(held.recent.shape[2], dtype=jnp.int32)
        # An index for each head, so that what is written is consecutive: otherwise XLA lays the buffers out anew.
        at = held.recent.at[layer, slot[:, None], heads, (tokens.position % places)[:, None]]
        return held._replace(recent=at.set(rows, mode="drop", unique_indices=True))

    def new_tokens(
        self, ragged: RaggedBatch, request: Int[Array, ""], first: Int[Array, ""], count: int
    ) -> tuple[Float[Array, "K S W"], Int[Array, " S"]]:
        """(keys and values, positions) of ``count`` of the step's tokens from a position on; -1 beyond the last."""
        at = first + jnp.arange(count, dtype=first.dtype)
        row = jnp.clip(at - ragged.offsets[request], 0, self.rows.shape[0] - 1)
        there = (at < ragged.kv_lens[request]) & (at >= ragged.kv_lens[request] - ragged.lengths[request])
        return self.rows[row].swapaxes(0, 1), jnp.where(there, at, -1)


def in_order(x: Array) -> Array:
    """An array that is laid out as pages are: otherwise XLA may lay all pages out as what is written to them is."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def in_full_precision(
    held: Slots, step: ResidualStep, layer: Int[Array, ""], ragged: RaggedBatch, columns: int
) -> tuple[Float[Array, "R S K W"], Bool[Array, "R S"]]:
    """Keys and values of each request by position, where they are in full precision, and where they are; naive."""
    places, size = held.recent.shape[3], held.data.shape[3]
    at = jnp.arange(columns * size, dtype=jnp.int32)

    def one(request: Array) -> tuple[Any, Any]:
        old, positions = step.ring(held, layer, ragged, request)
        old_there = positions[at % places] == at
        new, there = step.new_tokens(ragged, request, jnp.zeros_like(request), len(at))
        rows = jnp.where((there >= 0)[:, None], new, jnp.take(old, at % places, axis=1).astype(new.dtype))
        return rows.swapaxes(0, 1), (there >= 0) | old_there

    found, there = zip(*(one(jnp.int32(r)) for r in range(ragged.requests)), strict=True)
    return jnp.stack(found), jnp.stack(there)
