"""Who holds which page of a pool: reference counts, free pages, and pages found again by what is in them.

A page whose tokens are all known is registered under a hash of them and of all before them; it is kept when nobody
holds it any more, and found by the next request that begins alike, until its room is needed: least recently used first
(arXiv:2312.07104 keeps a tree of them; a chain of hashes finds the same pages).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

NONE = -1
"""In a sequence's list of pages: the page was given back, since no window reaches it any more."""


class Pages:
    """The pages of one pool, by number.

    Args:
        count: how many there are.
    """

    def __init__(self, count: int):
        self.count = count
        self.holders = [0] * count
        self._free = list(range(count - 1, -1, -1))
        self._found: dict[bytes, int] = {}  # hash -> page
        self._hashes: dict[int, bytes] = {}  # page -> hash
        self._kept: OrderedDict[int, None] = OrderedDict()  # registered and held by nobody, oldest first

    @property
    def available(self) -> int:
        """Pages that can be taken now."""
        return len(self._free) + len(self._kept)

    def take(self) -> int:
        """A page that nobody else holds; there must be one ``available``."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._kept.popitem(last=False)
            del self._found[self._hashes.pop(page)]
        self.holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """One more holds this page."""
        if self.holders[page] == 0:
            del self._kept[page]
        self.holders[page] += 1

    def release(self, page: int) -> None:
        """One holds it no more."""
        assert self.holders[page] > 0, f"page {page} is held by nobody"
        self.holders[page] -= 1
        if self.holders[page] == 0:
            if page in self._hashes:
                self._kept[page] = None
            else:
                self._free.append(page)

    def writable(self, page: int) -> bool:
        """Whether its one holder may write to it."""
        return self.holders[page] == 1 and page not in self._hashes

    def register(self, page: int, digest: bytes) -> None:
        """Lets it be found, unless another page with the same tokens is."""
        if digest not in self._found and page not in self._hashes:
            self._found[digest] = page
            self._hashes[page] = digest

    def find(self, digest: bytes) -> int | None:
        """The page with these tokens, to be held before anything is taken."""
        return self._found.get(digest)

    def forget(self) -> None:
        """Nothing is found any more; what is held stays."""
        self._free += self._kept
        self._kept.clear()
        self._found.clear()
        self._hashes.clear()


def chain(before: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of a page's tokens and of all before it; of the first page, ``before`` is the request's salt."""
    return hashlib.blake2b(np.asarray(tokens, np.int32).tobytes(), key=before[:64], digest_size=16).digest()
