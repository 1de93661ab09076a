"""The flat batch of a step: whose token each row is, where it stands, and blocks that belong to one request each.

Legend: R requests, T tokens, J columns of the page table, P pages, C slots of a page, I blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Ragged(NamedTuple):
    """Which tokens belong to which request, and which pages.

    Attributes:
        page_table: page numbers; entry j of a row is the page of positions j C to (j + 1) C - 1.
        starts: cumulated lengths: tokens ``starts[r]`` to ``starts[r + 1] - 1`` are request r's.
        kv_lens: tokens of a request in all, those of this step, which are its last, included.
    """

    page_table: Int[Array, "R J"]
    starts: Int[Array, " R1"]
    kv_lens: Int[Array, " R"]

    @property
    def requests(self) -> int:
        """R."""
        return self.kv_lens.shape[0]

    @property
    def lengths(self) -> Int[Array, " R"]:
        """Tokens of each request in this step."""
        return self.starts[1:] - self.starts[:-1]

    @property
    def offsets(self) -> Int[Array, " R"]:
        """What takes a request's row of the flat batch to its position."""
        return self.kv_lens - self.starts[1:]

    def part(self, first: int | Int[Array, ""], count: int) -> Ragged:
        """Rows ``first`` to ``first + count - 1`` of the flat batch as one of their own.

        A request of which later rows have tokens ends, there, before them.
        """
        later = jnp.clip(self.starts[1:] - (first + count), 0, self.lengths)
        return Ragged(self.page_table, jnp.clip(self.starts - first, 0, count), self.kv_lens - later)

    def tokens(self, count: int) -> Tokens:
        """Of each of ``count`` rows of the flat batch."""
        at = jnp.arange(count, dtype=jnp.int32)
        request = jnp.clip(jnp.searchsorted(self.starts, at, side="right") - 1, 0, self.requests - 1)
        return Tokens(request, at + self.offsets[request], at < self.starts[-1])

    def blocks(self, count: int, size: int, lengths: Int[Array, " R"] | None = None) -> Blocks:
        """Up to ``size`` tokens of one request each, in order; of requests of these lengths, or all of them.

        Args:
            count: T.
            size: tokens of a block; the last of a request may have fewer.
            lengths: ``self.lengths``, or 0 where a request is left out.
        """
        lengths = self.lengths if lengths is None else lengths
        ends = jnp.cumsum((lengths + size - 1) // size)
        index = jnp.arange(min(count, count // size + self.requests), dtype=jnp.int32)
        request = jnp.clip(jnp.searchsorted(ends, index, side="right"), 0, self.requests - 1)
        within = index - jnp.where(request > 0, ends[request - 1], 0)
        first = self.starts[request] + within * size
        tokens = jnp.where(index < ends[-1], jnp.minimum(self.starts[request + 1] - first, size), 0)
        return Blocks(request, first, tokens, first + self.offsets[request], ends[-1])

    def homes(self, size: int, tokens: Tokens) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
        """(block, place in it) of each row of the flat batch, in blocks of all requests; of padding anything."""
        counts = (self.lengths + size - 1) // size
        within = jnp.arange(tokens.request.shape[0], dtype=jnp.int32) - self.starts[tokens.request]
        return (jnp.cumsum(counts) - counts)[tokens.request] + within // size, within % size

    def slots(self, pages: int, page_size: int, tokens: Tokens) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
        """(page, slot) to write each token to; of padding a page that is not there."""
        column = jnp.clip(tokens.position // page_size, 0, self.page_table.shape[1] - 1)
        page = jnp.where(tokens.real, self.page_table[tokens.request, column], pages)
        return page, tokens.position % page_size


class Tokens(NamedTuple):
    """Of each row of the flat batch: its request, its position in it, and whether it is a token and not padding."""

    request: Int[Array, " T"]
    position: Int[Array, " T"]
    real: Bool[Array, " T"]


class Blocks(NamedTuple):
    """Consecutive tokens of one request each.

    Attributes:
        request: whose.
        first: row of the flat batch of the first token.
        tokens: how many; 0 from ``live`` on.
        position: of the first token.
        live: blocks that there are.
    """

    request: Int[Array, " I"]
    first: Int[Array, " I"]
    tokens: Int[Array, " I"]
    position: Int[Array, " I"]
    live: Int[Array, ""]
