"""Chosen chunks: a query reads the chunks of its context whose landmarks it scores highest (arXiv:2410.21465).

A page of the format has its tokens in two parts: rows on the device, among them the landmark of each chunk, and values
in host memory (``shadow_format``). For each token and kv head, the softmax of the landmarks' scores over the chunks is
reduced to its largest over the query heads, and the chunks that have most are chosen. What is chosen depends on the
query and on what is before it alone, so a prompt's chunks of prefill change nothing. Tokens of outlier chunks are read
by every query, and are not chosen; those in full precision are not in pages (``residual_window``).

A decode token fetches only its chosen chunks. A block of prefill tokens, each with chunks of its own, reads all pages
before it, and masks.

Legend: L layers, P pages, K kv heads, C slots of a page, W values of a slot, H head dim of keys, V of values, J columns
of the page table, X chunks of a page, A = J x X chunks of a request, O tokens of a page's outliers, B chosen chunks, M
= G x Q rows of a block: G query heads of a kv head, Q tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.paged_attention.pages import PageFormat, Slots, fetched
from pallas_kernels.paged_attention.shadow.shadow_format import ShadowFormat, Turn

Update = Callable[[Any, Array, Array, Array], Any]
"""Online-softmax update: (state, contents [K, S, W], positions, which rows see them) -> state."""


def choose(
    scores: Float[Array, "*any G A"], there: Bool[Array, "*any G A"], count: int
) -> tuple[Int[Array, "*any B"], Bool[Array, "*any B"]]:
    """Chosen chunks: (their numbers, whether they are chunks); fewer than ``count`` where fewer are there.

    Args:
        scores: score of each chunk's landmark for each query head of a kv head.
        there: which chunks may be chosen.
        count: number of chunks to choose.
    """
    lowest = float(jnp.finfo(scores.dtype).min) / 2
    share = jax.nn.softmax(jnp.where(there, scores, lowest), axis=-1)
    share = jnp.max(jnp.where(there, share, -1.0), axis=-2)
    found, chosen = jax.lax.top_k(share, min(count, share.shape[-1]))
    return chosen, found >= 0.0


class ShadowPages(NamedTuple):
    """Pages of one request in one layer.

    Attributes:
        pool: pool of all layers.
        layer: index of the layer.
        row: page numbers of the request.
        form: format of the pages.
        turn: rotates keys; None: they have no rotation.
        dtype: dtype of what is read.
    """

    pool: Slots
    layer: Int[Array, ""]
    row: Int[Array, " J"]
    form: PageFormat
    turn: Turn | None
    dtype: Any

    @property
    def kind(self) -> ShadowFormat:
        """Format of the elements."""
        return shadow_format_of(self.form)

    @property
    def size(self) -> int:
        """Slots of a page (C)."""
        return self.pool.data.shape[3]

    @property
    def chunks(self) -> int:
        """Chunks of a page (X)."""
        return self.size // self.form.kv_format.chunk

    def _number(self, column: Int[Array, "*any"]) -> Int[Array, "*any"]:
        # Unused entries may be anything.
        return jnp.clip(self.row[jnp.clip(column, 0, len(self.row) - 1)], 0, self.pool.data.shape[1] - 1)

    def on_device(
        self, column: Int[Array, ""]
    ) -> tuple[Float[Array, "K X H"], Float[Array, "K O W"], Int[Array, "K O"]]:
        """(landmarks, keys and values of the outliers, their positions) of a page."""
        found, kv = self.kind, self.pool.data.shape[2]
        whole, number = found.outliers * found.chunk, self._number(column)
        count, zero = self.chunks + 2 * whole, jnp.zeros_like(number)
        start = self.layer, number, zero, zero, zero
        rows = jax.lax.dynamic_slice(self.pool.keys, start, (1, 1, kv, count, self.pool.keys.shape[4]))[0, 0]
        landmarks, keys, values = jnp.split(rows.astype(self.dtype), [self.chunks, self.chunks + whole], axis=1)
        words = self.pool.channels[self.layer, number, :, 0]
        at = column * self.size + words[:, :, None] * found.chunk + jnp.arange(found.chunk, dtype=jnp.int32)
        return landmarks, jnp.concatenate([keys, values], axis=-1), at.reshape(kv, whole)

    def outliers(self, column: Int[Array, ""]) -> Bool[Array, "K X"]:
        """Outliers among the chunks of a page."""
        words = self.pool.channels[self.layer, self._number(column), :, 0]
        return jnp.any(words[:, :, None] == jnp.arange(self.chunks, dtype=jnp.int32), axis=1)

    def whole(self, column: Int[Array, ""]) -> Float[Array, "K C W"]:
        """Contents of a page: keys computed from their coefficients, and values fetched from host memory.

        Those of outlier chunks too, though what is read of them is on the device.
        """
        number = self._number(column)
        zero, (kv, size, value_dim) = jnp.zeros_like(number), self.pool.data.shape[2:]
        factors = self.pool.factors[self.layer, number, 0].astype(self.dtype)
        basis = self.pool.keys[self.layer, number, :, -self.kind.rank :].astype(self.dtype)
        at = column * self.size + jnp.arange(self.size, dtype=jnp.int32)
        keys = self.kind.decode_keys(factors, basis, at, self.turn)
        values = fetched(self.pool.data, (self.layer, number, zero, zero, zero), (1, 1, kv, size, value_dim))[0, 0]
        return jnp.concatenate([keys, values.astype(self.dtype)], axis=-1)

    def fetch(
        self, chosen: Int[Array, "K B"], legal: Bool[Array, "K B"]
    ) -> tuple[Float[Array, "K S W"], Int[Array, "K S"]]:
        """Contents of chosen chunks of each kv head, and their positions, -1 and zeros where there is none."""
        kv, count = chosen.shape
        chunk, rank = self.kind.chunk, self.kind.rank
        number, within = self._number(chosen // self.chunks), chosen % self.chunks * chunk
        places = jnp.arange(chunk, dtype=jnp.int32)
        at = chosen[:, :, None] * chunk + places
        factors = self.pool.factors[self.layer, number[:, :, None], 0, within[:, :, None] + places]
        basis = self.pool.keys[self.layer, number, jnp.arange(kv)[:, None], -rank:]
        keys = self.kind.decode_keys(factors.astype(self.dtype), basis.astype(self.dtype), at, self.turn)

        def one(i: Array, values: Array) -> Array:
            head, place = i % kv, i // kv
            zero = jnp.zeros_like(i)
            start = self.layer, number[head, place], head, within[head, place], zero
            found = fetched(self.pool.data, start, (1, 1, 1, chunk, values.shape[3]))[0]
            return jax.lax.dynamic_update_slice(values, found.astype(values.dtype), (head, place, zero, zero))

        most = jnp.max(jnp.sum(legal, axis=1, dtype=jnp.int32))
        values = jnp.zeros((kv, count, chunk, self.form.value_dim), self.dtype)
        values = jax.lax.fori_loop(0, most * kv, one, values)
        held = jnp.where(legal[:, :, None, None], jnp.concatenate([keys, values], axis=-1), 0)
        at = jnp.where(legal[:, :, None], at, -1)
        return held.reshape(kv, count * chunk, -1), at.reshape(kv, -1)


def over_chosen(
    pages: ShadowPages,
    q: Float[Array, "K M H"],
    position: Int[Array, "M 1"],
    encoded: Int[Array, "M 1"],
    begin: Int[Array, ""],
    reach: Int[Array, ""],
    *,
    size: int,
    softcap: float | None,
    window: int | None,
    update: Update,
    state: Any,
) -> Any:
    """Folds ``update`` over what the rows of a block read in pages: outliers, then the chunks that each has chosen.

    Args:
        q: queries, scaled.
        position, encoded: position of each row, and the tokens that it reads from pages.
        begin, reach: first position of the block's sliding window, and tokens in pages of its last token.
        size: tokens of the block (Q).
        softcap, window: see ``paged_attention``.
        update, state: online softmax.
    """
    form, (kv, m, _) = pages.form, q.shape
    chunk, many = form.kv_format.chunk, pages.chunks * len(pages.row)
    queries = q[..., : form.key_dim]
    nowhere = -jnp.inf

    def look(column: Array, carry: tuple[Array, Any]) -> tuple[Array, Any]:
        scores, state = carry
        landmarks, whole, at = pages.on_device(column)
        found = jnp.einsum("kmh,kxh->kmx", queries, landmarks)
        if softcap is not None:
            found = softcap * jnp.tanh(found / softcap)
        found = jnp.where(pages.outliers(column)[:, None], nowhere, found)
        scores = jax.lax.dynamic_update_slice_in_dim(scores, found, column * pages.chunks, axis=2)
        if not pages.kind.outliers:
            return scores, state
        whole = jnp.where((at >= begin)[..., None], whole, 0)
        at = at[:, None]
        return scores, update(state, whole, at, (at >= begin) & (at < encoded))

    scores = jnp.full((kv, m, many), nowhere, q.dtype)
    first, stop = begin // pages.size, (reach + pages.size - 1) // pages.size
    scores, state = jax.lax.fori_loop(first, stop, look, (scores, state))
    start = jnp.arange(many, dtype=jnp.int32) * chunk
    there = (scores > nowhere) & (start < encoded)
    if window is not None:
        there &= start + chunk > position - window + 1
    scores, there = (x.reshape(kv, m // size, size, many).swapaxes(1, 2) for x in (scores, there))
    chosen, legal = choose(scores, there, pages.kind.tokens // chunk)
    if size == 1:
        held, at = pages.fetch(chosen[:, 0], legal[:, 0])
        at = at[:, None]
        return update(state, held, at, at >= begin)
    k, t = jnp.ogrid[:kv, :size]
    mask = jnp.zeros((kv, size, many), bool).at[k[..., None], t[..., None], chosen].set(legal)

    def read(column: Array, state: Any) -> Any:
        at = column * pages.size + jnp.arange(pages.size, dtype=jnp.int32)
        own = jax.lax.dynamic_slice_in_dim(mask, column * pages.chunks, pages.chunks, axis=2)
        own = jnp.tile(jnp.repeat(own, chunk, axis=2), (1, m // size, 1))
        held = jnp.where((at >= begin)[:, None], pages.whole(column), 0)
        return update(state, held, at, own & (at >= begin))

    return jax.lax.fori_loop(first, stop, read, state)


def chosen_tokens(
    pool: Slots,
    layer: Int[Array, ""],
    table: Int[Array, "R J"],
    request: Int[Array, " T"],
    q: Float[Array, "T K G H"],
    encoded: Int[Array, "T 1"],
    first: Int[Array, "T 1"],
    form: PageFormat,
    turn: Turn | None,
    softcap: float | None,
) -> tuple[Float[Array, "R S K W"], Bool[Array, "T S K"]]:
    """(contents of all pages by position, which of them a token reads); naive, for the reference.

    Args:
        request, q: request and scaled queries of each token.
        encoded, first: tokens that each reads from pages, and the first position that it sees.
    """
    requests, columns = table.shape
    chunk = form.kv_format.chunk

    def page(row: Array, column: Array) -> tuple[Array, Array, Array]:
        pages = ShadowPages(pool, layer, row, form, turn, q.dtype)
        landmarks, whole, at = pages.on_device(column)
        held, kv = pages.whole(column), landmarks.shape[0]
        if at.shape[1]:
            held = held.at[jnp.arange(kv)[:, None], at % pages.size].set(whole)
        return held, landmarks, pages.outliers(column)

    over = jax.vmap(jax.vmap(page, (None, 0)), (0, None))
    held, landmarks, outlier = over(table, jnp.arange(columns, dtype=jnp.int32))  # R J K *
    kv = held.shape[2]
    held = held.swapaxes(2, 3).reshape(requests, -1, kv, form.width)
    landmarks, outlier = (
        x.swapaxes(2, 3).reshape(requests, -1, *x.shape[2:3], *x.shape[4:]) for x in (landmarks, outlier)
    )  # R A K *
    scores = jnp.einsum("tkgh,takh->tkga", q, landmarks[request])
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    start = jnp.arange(scores.shape[-1], dtype=jnp.int32) * chunk
    here = (start < encoded) & (start + chunk > first)
    there = here[:, None, None] & ~outlier[request].swapaxes(1, 2)[:, :, None]
    chosen, legal = choose(scores, jnp.broadcast_to(there, scores.shape), shadow_format_of(form).tokens // chunk)
    mask = jnp.zeros((*scores.shape[:2], scores.shape[-1]), bool)
    t, k = jnp.ogrid[: scores.shape[0], :kv]
    mask = mask.at[t[..., None], k[..., None], chosen].set(legal)
    mask = mask.swapaxes(1, 2) | outlier[request]
    return held, jnp.repeat(mask, chunk, axis=1)


def shadow_format_of(form: PageFormat) -> ShadowFormat:
    """Format of the elements of pages whose queries choose chunks."""
    found = form.kv_format
    assert isinstance(found, ShadowFormat)
    return found
