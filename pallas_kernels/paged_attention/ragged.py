"""RaggedBatch batch: token ranges, positions and page table of each request, and its blocks of tokens.

Legend: R requests, T tokens, J columns of the page table, P pages, C slots of a page, I blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class RaggedBatch(NamedTuple):
    """RaggedBatch batch of one step: which rows of the flat batch belong to which request, and its pages.

    Attributes:
        page_table: page numbers; entry j of a row is the page of positions j C to (j + 1) C - 1.
        starts: cumulative lengths: tokens ``starts[r]`` to ``starts[r + 1] - 1`` are request r's.
        kv_lens: context length of each request, including this step's tokens, which are its last.
    """

    page_table: Int[Array, "R J"]
    starts: Int[Array, " R1"]
    kv_lens: Int[Array, " R"]

    @property
    def requests(self) -> int:
        """Number of requests (R)."""
        return self.kv_lens.shape[0]

    @property
    def lengths(self) -> Int[Array, " R"]:
        """Number of tokens of each request in this step."""
        return self.starts[1:] - self.starts[:-1]

    @property
    def offsets(self) -> Int[Array, " R"]:
        """Difference between a token's position and its row of the flat batch, for each request."""
        return self.kv_lens - self.starts[1:]

    def part(self, first: int | Int[Array, ""], count: int | Int[Array, ""]) -> RaggedBatch:
        """Sub-batch of rows ``first`` to ``first + count - 1`` of the flat batch.

        The context of a request that has later rows ends before them.
        """
        later = jnp.clip(self.starts[1:] - (first + count), 0, self.lengths)
        return RaggedBatch(self.page_table, jnp.clip(self.starts - first, 0, count), self.kv_lens - later)

    def tokens(self, count: int) -> TokenRows:
        """Request, position and padding flag of each of ``count`` rows of the flat batch."""
        at = jnp.arange(count, dtype=jnp.int32)
        request = jnp.clip(jnp.searchsorted(self.starts, at, side="right") - 1, 0, self.requests - 1)
        return TokenRows(request, at + self.offsets[request], at < self.starts[-1])

    def blocks(self, count: int, size: int, lengths: Int[Array, " R"] | None = None) -> TokenBlocks:
        """Blocks of up to ``size`` consecutive tokens of one request each, in order.

        Args:
            count: T.
            size: tokens of a block; the last block of a request may have fewer.
            lengths: ``self.lengths``, or 0 for requests to leave out; None for all requests.
        """
        lengths = self.lengths if lengths is None else lengths
        ends = jnp.cumsum((lengths + size - 1) // size)
        index = jnp.arange(min(count, count // size + self.requests), dtype=jnp.int32)
        request = jnp.clip(jnp.searchsorted(ends, index, side="right"), 0, self.requests - 1)
        within = index - jnp.where(request > 0, ends[request - 1], 0)
        first = self.starts[request] + within * size
        tokens = jnp.where(index < ends[-1], jnp.minimum(self.starts[request + 1] - first, size), 0)
        return TokenBlocks(request, first, tokens, first + self.offsets[request], ends[-1])

    def block_and_row(self, size: int, tokens: TokenRows) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
        """(block, row in the block) of each row of the flat batch, in blocks of all requests; undefined for padding."""
        counts = (self.lengths + size - 1) // size
        within = jnp.arange(tokens.request.shape[0], dtype=jnp.int32) - self.starts[tokens.request]
        return (jnp.cumsum(counts) - counts)[tokens.request] + within // size, within % size

    def slots(self, pages: int, page_size: int, tokens: TokenRows) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
        """(page, slot) to write each token to; a page out of range for padding."""
        column = jnp.clip(tokens.position // page_size, 0, self.page_table.shape[1] - 1)
        page = jnp.where(tokens.real, self.page_table[tokens.request, column], pages)
        return page, tokens.position % page_size


class TokenRows(NamedTuple):
    """Rows of the flat batch.

    Attributes:
        request: request of the row's token.
        position: position of the token in its request.
        real: False for padding.
    """

    request: Int[Array, " T"]
    position: Int[Array, " T"]
    real: Bool[Array, " T"]


class TokenBlocks(NamedTuple):
    """Blocks of consecutive tokens of one request each.

    Attributes:
        request: request of the block.
        first: row of the flat batch of the first token.
        tokens: number of tokens; 0 from ``live`` on.
        position: position of the first token.
        live: number of blocks that hold tokens.
    """

    request: Int[Array, " I"]
    first: Int[Array, " I"]
    tokens: Int[Array, " I"]
    position: Int[Array, " I"]
    live: Int[Array, ""]
