"""Page allocator of the paged KV cache: reference counts, free pages, and cached pages that are found by content.

A sequence's page table lists its pages by position. A page whose tokens are all known is registered under a hash of
them and of all tokens before them. When nobody uses it any more it stays cached, can be found by the next request with
the same prefix, and is evicted when its memory is needed, least recently used first (arXiv:2312.07104 keeps a radix
tree of them; a chain of hashes finds the same pages).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

NO_PAGE = -1
"""Entry of a sequence's page list whose page was freed, because it lies behind the sliding window."""


class PageAllocator:
    """Allocator of the pages of one pool, by page number.

    Args:
        count: number of pages.
    """

    def __init__(self, count: int):
        self.count = count
        self.ref_counts = [0] * count
        self._free = list(range(count - 1, -1, -1))
        self._found: dict[bytes, int] = {}  # hash -> page
        self._hashes: dict[int, bytes] = {}  # page -> hash
        # (page, hash) of evicted pages, where somebody collects them.
        self.evicted: list[tuple[int, bytes]] | None = None
        self._cached: OrderedDict[int, None] = OrderedDict()  # registered pages in no sequence, oldest first

    @property
    def available(self) -> int:
        """Number of pages that can be allocated now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    def allocate(self) -> int:
        """Allocates a page, evicting the oldest cached one if none is free; one must be ``available``."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            digest = self._hashes.pop(page)
            del self._found[digest]
            if self.evicted is not None:
                self.evicted.append((page, digest))
        self.ref_counts[page] = 1
        return page

    def share(self, page: int) -> None:
        """Adds a reference to a page that is in use or cached."""
        if self.ref_counts[page] == 0:
            del self._cached[page]
        self.ref_counts[page] += 1

    def release(self, page: int) -> None:
        """Removes a reference; without references the page is cached if it is registered, else free."""
        assert self.ref_counts[page] > 0, f"page {page} has no reference to release"
        self.ref_counts[page] -= 1
        if self.ref_counts[page] == 0:
            if page in self._hashes:
                self._cached[page] = None
            else:
                self._free.append(page)

    def writable(self, page: int) -> bool:
        """Whether a sequence may write to its page: no other uses it and it is not registered."""
        return self.ref_counts[page] == 1 and page not in self._hashes

    def register(self, page: int, digest: bytes) -> None:
        """Makes a page findable by its hash, unless another page with the same tokens is."""
        if digest not in self._found and page not in self._hashes:
            self._found[digest] = page
            self._hashes[page] = digest

    def find(self, digest: bytes) -> int | None:
        """Page with this hash; ``share`` it before the next ``allocate``."""
        return self._found.get(digest)

    def registered(self) -> list[tuple[int, bytes]]:
        """(page, hash) of all registered pages."""
        return list(self._hashes.items())

    def clear_cache(self) -> None:
        """Unregisters all pages and frees the cached ones; pages in use stay."""
        self._free += self._cached
        self._cached.clear()
        self._found.clear()
        self._hashes.clear()


def page_hash(before: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of a page's tokens and all before them; ``before``: hash of the page before, or the request's salt."""
    return hashlib.blake2b(np.asarray(tokens, np.int32).tobytes(), key=before[:64], digest_size=16).digest()
