"""Cached chunks (Cache-Craft, arXiv:2502.15734): parts of a prompt whose KV cache is reused wherever they stand.

A chunk's keys and values are those of the chunk behind its lead, the first page of the prompt, which prompts of one
application have in common: a prompt of its own, which the prefix cache keeps. In another prompt with that lead they are
copied to the chunk's place and the keys are turned to their new positions. What the chunk's tokens would have taken
from the rest of the text before it is missing then, so a share of them is recomputed in place: the first ones, which
know least of their own chunk, and those of its last page that is not full. The paper stores chunks as they were
computed in the first prompt that had them, and chooses the tokens by the attention that they gave to other chunks
there; docs/decisions/0022-cached-chunks.md says what that is worth.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import NamedTuple

DEFAULT_SHARE = 0.25
"""Share of a chunk's tokens that are recomputed, unless another is given."""
DEFAULT_LEAD = 1
"""Pages of a prompt's beginning that its chunks are computed behind, unless another number is given."""


class Reuse(NamedTuple):
    """Tokens of a prompt whose keys and values are copied.

    Attributes:
        start, stop: first position, and the one after the last.
        origin: position of the chunk's first token.
        end: position after the chunk's last token.
        lead: first tokens of the prompt that the chunk was computed behind.
    """

    start: int
    stop: int
    origin: int
    end: int
    lead: int = 0


@dataclass(frozen=True)
class CachedChunks:
    """Chunks of a prompt.

    Attributes:
        spans: first token, and the one after the last, of each chunk, by their places in the prompt; in order.
        share: share of each chunk's tokens that are recomputed, from its first on. 1 is plain prefill, 0 recomputes
            nothing but tokens of a page that is not full.
        lead: pages at the beginning of the prompt that chunks behind them are computed behind, and found by: prompts
            that begin with other tokens do not share their chunks. 0: each chunk is computed alone.

    Raises:
        ValueError: the share is not from 0 to 1, the lead is negative, or the spans are not in order.
    """

    spans: tuple[tuple[int, int], ...]
    share: float = DEFAULT_SHARE
    lead: int = DEFAULT_LEAD

    def __post_init__(self) -> None:
        if self.lead < 0:
            raise ValueError(f"cached_chunks: lead = {self.lead}; give 0 or more pages.")
        if not 0 <= self.share <= 1:
            raise ValueError(f"cached_chunks: share = {self.share}; give 0 to 1.")
        ends = [place for span in self.spans for place in span]
        if not ends or ends[0] < 0 or ends != sorted(ends) or any(start == stop for start, stop in self.spans):
            raise ValueError(
                f"cached_chunks: spans = {self.spans}; give (first, after the last) of each chunk, in the order of the "
                "prompt, none of them empty or in another."
            )

    def reuses(self, page_size: int, length: int) -> tuple[Reuse, ...]:
        """Reused tokens of a prompt of so many, whose last one is computed in any case."""
        found = []
        for origin, end in self.spans:
            whole = (end - origin) // page_size * page_size
            start = origin + math.ceil(self.share * (end - origin))
            stop = min(origin + whole, length - 1)
            if start < stop:
                found.append(Reuse(start, stop, origin, end, min(self.lead, origin // page_size) * page_size))
        return tuple(found)

    def mark(self, begin: int, end: int) -> bytes:
        """Digest of the chunks in a page, by which its numbers differ from those of the same text without chunks."""
        inside = [(start - begin, stop - begin) for start, stop in self.spans if start < end and stop > begin]
        if self.share == 1 or not inside:
            return b""
        return hashlib.blake2b(repr((inside, self.share, self.lead)).encode(), digest_size=16).digest()


def chunk_spans(prompt: list[int], chunks: list[list[int]]) -> tuple[tuple[int, int], ...]:
    """Spans of chunks in a prompt: the first place of each, in any order, that no other chunk has.

    Tokens at the ends of a text may be merged with their neighbours, so a chunk may lack its first and last token.

    Raises:
        ValueError: a chunk is not in the prompt; names its number.
    """
    spans: list[tuple[int, int]] = []
    for number, chunk in enumerate(chunks):
        for own in (chunk, chunk[1:], chunk[:-1], chunk[1:-1]):
            place = next((i for i in _places(prompt, own) if all(i >= b or i + len(own) <= a for a, b in spans)), None)
            if place is not None:
                spans.append((place, place + len(own)))
                break
        else:
            raise ValueError(
                f"cached_chunks: chunk {number} ({len(chunk)} tokens) is not in the prompt, or tokens at its ends are "
                "merged with the text beside it: let chunks begin and end at line breaks, and give them as they stand."
            )
    return tuple(sorted(spans))


def _places(prompt: list[int], chunk: list[int]) -> list[int]:
    if not chunk:
        return []
    most = len(prompt) - len(chunk) + 1
    return [i for i in range(most) if prompt[i] == chunk[0] and prompt[i : i + len(chunk)] == chunk]
